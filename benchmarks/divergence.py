"""How often a stream that moves to another engine goes on with another text, and how often streams differ anyway.

    python -m benchmarks.divergence --streams 320 --tokens 128
    python -m benchmarks.divergence --model FOLDER --dtype bfloat16

Each stream is compared with the same one on an aggregated engine, 16 at once. *company*: the same engine, other
streams beside it, seven at once. *1P1D*: prefill and decode on two engines, KV handed over. *migrated*: another engine
goes on behind a cut in the middle, as after a death, and computes again what was there. Counts, no times: it may run
beside other things.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.models import VOCAB_SIZE, find_model
from pdkv.assemble.engine import build_engine
from pdkv.config import EngineConfig, HandoffConfig
from pdkv.engine.core import EngineCore
from pdkv.host.processor import instruction_set
from pdkv.models.config import load_model_config
from pdkv.sampling.params import SamplingParams
from pdkv.wire.kv import KVHandoff
from pdkv.wire.messages import EngineToRouter, Failed, Finished, HandedOff, Peers, Release, Submit, Tokens

AT_ONCE, OTHERS_AT_ONCE = 16, 7
DTYPES = ("float32", "bfloat16")


class Stream(NamedTuple):
    """One request."""

    prompt: list[int]
    params: SamplingParams


class Engine:
    """One engine in this process, stepped by hand."""

    def __init__(self, name: str, model: Path, dtype: str) -> None:
        config = EngineConfig(
            model=model, device="cpu", dtype=dtype, kv_cache_memory=128 << 20, threads=1, max_num_seqs=32
        )
        self.core: EngineCore = build_engine(config, HandoffConfig(connector="memory"), name=name, epoch=name)
        self.core.router_joined("r", "1")

    def submit(self, request_id: str, stream: Stream, **fields: object) -> None:
        """Ask it for a request, or for a part."""
        submit = Submit(
            request_id=request_id,
            transfer_id=request_id,
            attempt=0,
            prompt_token_ids=stream.prompt,
            params=stream.params,
            cache_salt=request_id,  # nothing is found in a cache
            **fields,  # type: ignore[arg-type]
        )
        self.core.handle("r", submit, time.monotonic())

    def step(self) -> list[EngineToRouter]:
        """One step, and what it says."""
        self.core.step(time.monotonic())
        return [message for _, sent in self.core.take_messages(time.monotonic()) for message in sent]


class Progress:
    """Tokens of the requests of one run, and how many have ended."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.handoffs: list[KVHandoff] = []
        self.num_ended = 0

    def take(self, messages: Sequence[EngineToRouter]) -> None:
        """What an engine said."""
        for message in messages:
            match message:
                case Tokens():
                    self.tokens.setdefault(message.request_id, []).extend(message.token_ids)
                case Finished():
                    self.num_ended += 1
                case HandedOff():
                    self.handoffs.append(message.handoff)
                case Failed():
                    raise RuntimeError(f"{message.request_id} failed: {message.message}")


Start = Callable[[int, str], None]
"""Asks an engine for the stream of this number, under this id."""


def run_alike(engine: Engine, numbers: Sequence[int], start: Start, mode: str, at_once: int) -> dict[int, list[int]]:
    """Tokens of these streams on one engine, so many at once; one that ends makes room for the next."""
    progress, todo, num_running = Progress(), list(numbers), 0
    while progress.num_ended < len(numbers):
        while todo and num_running - progress.num_ended < at_once:
            number = todo.pop(0)
            start(number, f"{mode}-{number}")
            num_running += 1
        progress.take(engine.step())
    return {number: progress.tokens[f"{mode}-{number}"] for number in numbers}


def run_disaggregated(prefill: Engine, decode: Engine, streams: Sequence[Stream], mode: str) -> dict[int, list[int]]:
    """The same with the prompts on one engine and the rest on another."""
    progress, todo, num_running = Progress(), list(range(len(streams))), 0
    while progress.num_ended < len(streams):
        while todo and num_running - progress.num_ended < AT_ONCE:
            number = todo.pop(0)
            prefill.submit(f"{mode}-{number}", streams[number], kv="handoff", until="first_token")
            num_running += 1
        for engine in (prefill, decode):
            said = engine.step()
            progress.take(said)
            for message in said:
                if isinstance(message, Release):
                    prefill.core.handle("r", message, time.monotonic())
        for handoff in progress.handoffs:
            stream = streams[int(handoff.request_id.rpartition("-")[2])]
            first = list(progress.tokens[handoff.request_id])
            decode.submit(handoff.request_id, stream, kv="await_peer", handoff=handoff, output_token_ids=first)
        progress.handoffs.clear()
    return {number: progress.tokens[f"{mode}-{number}"] for number in range(len(streams))}


class Divergence(NamedTuple):
    """How two runs of the same streams compare."""

    num_streams: int
    num_different: int
    num_tokens: int  # compared, up to the first that differs

    def __str__(self) -> str:
        rate = f"1 of {self.num_tokens / self.num_different:,.0f}" if self.num_different else "none"
        share = self.num_different / self.num_streams
        return f"{self.num_different} of {self.num_streams} streams ({share:.1%}); {rate} of {self.num_tokens:,} tokens"


def compare(right: dict[int, list[int]], found: dict[int, list[int]], cuts: Sequence[int]) -> Divergence:
    """`cuts`: tokens of each stream that both have in common from the start."""
    num_different = num_tokens = 0
    for number, tokens in found.items():
        pairs = list(zip(right[number][cuts[number] :], tokens[cuts[number] :], strict=True))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        num_different += first is not None
        num_tokens += len(pairs) if first is None else first + 1
    return Divergence(len(found), num_different, num_tokens)


def make_streams(num: int, num_tokens: int, vocabulary: int, temperature: float, lengths: list[int]) -> list[Stream]:
    """Random prompts of lengths between these two, each with a seed of its own."""
    chance = random.Random(0)
    return [
        Stream(
            [chance.randrange(3, vocabulary) for _ in range(chance.randint(*lengths))],
            SamplingParams(temperature=temperature, max_tokens=num_tokens, seed=seed, ignore_eos=True),
        )
        for seed in range(num)
    ]


def measure(
    model: Path, dtype: str, num_streams: int, num_tokens: int, temperature: float, lengths: list[int]
) -> dict[str, Divergence]:
    """By mode, how streams differ from those of an aggregated engine."""
    one, other, prefill, decode = (Engine(name, model, dtype) for name in ("one", "other", "prefill", "decode"))
    for engine in (prefill, decode):
        engine.core.handle("r", Peers([prefill.core.card, decode.core.card]), time.monotonic())
    vocabulary = min(VOCAB_SIZE, load_model_config(model, None).vocab_size)
    streams = make_streams(num_streams, num_tokens, vocabulary, temperature, lengths)
    numbers = list(range(num_streams))
    whole = [0] * num_streams
    right = run_alike(one, numbers, lambda n, name: one.submit(name, streams[n]), "right", AT_ONCE)
    chance = random.Random(1)
    cuts = [chance.randint(1, num_tokens - 2) for _ in streams]

    def go_on(number: int, name: str) -> None:
        other.submit(name, streams[number], output_token_ids=right[number][: cuts[number]])

    migrated = run_alike(other, numbers, go_on, "migrated", AT_ONCE)
    shuffled = chance.sample(numbers, num_streams)
    company = run_alike(one, shuffled, lambda n, name: one.submit(name, streams[n]), "company", OTHERS_AT_ONCE)
    found = {
        "company": compare(right, company, whole),
        "1P1D": compare(right, run_disaggregated(prefill, decode, streams, "pd"), whole),
        "migrated": compare(right, {n: right[n][: cuts[n]] + migrated[n] for n in numbers}, cuts),
    }
    for engine in (one, other, prefill, decode):
        engine.core.shutdown()
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: the random tiny one of benchmarks.models")
    parser.add_argument("--dtype", choices=DTYPES, help="default: both")
    parser.add_argument("--streams", type=int, default=320)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream's output")
    parser.add_argument(
        "--prompts", type=int, nargs=2, default=[40, 200], help="tokens of the shortest and the longest"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{instruction_set()}, torch {torch.__version__}, {options.streams} streams of {options.tokens} tokens")
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or find_model(Path(folder), "tiny")
        for dtype in [options.dtype] if options.dtype else DTYPES:
            for temperature in (0.0, 1.0):
                kind = "greedy" if temperature == 0.0 else "sampled"
                counts = options.streams, options.tokens, temperature, options.prompts
                for mode, found in measure(model, dtype, *counts).items():
                    print(f"{dtype}, {kind}, {mode}: {found}", flush=True)


if __name__ == "__main__":
    main()
