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
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from benchmarks.models import VOCAB_SIZE, find_model
from pdkv.host.processor import instruction_set
from pdkv.models.config import load_model_config
from pdkv.sampling.params import SamplingParams
from pdkv.testing.engine import InProcessEngine, SideBySide, of_type, output_of, submit
from pdkv.wire.messages import EngineToRouter, Failed, HandedOff, Release, Submit

AT_ONCE, OTHERS_AT_ONCE = 16, 7
DTYPES = ("float32", "bfloat16")


class Stream(NamedTuple):
    """One request."""

    prompt: list[int]
    params: SamplingParams


def run_alike(engine: InProcessEngine, submits: Sequence[Submit], at_once: int) -> list[list[int]]:
    """Tokens of these requests on one engine, so many at once."""
    for first in range(0, len(submits), at_once):
        engine.tell(*submits[first : first + at_once])
        engine.rest()
    return _outputs(engine.sent, submits)


def run_disaggregated(pair: SideBySide, submits: Sequence[Submit]) -> list[list[int]]:
    """The same with the prompts on one engine and the rest on another."""
    for first in range(0, len(submits), AT_ONCE):
        batch = submits[first : first + AT_ONCE]
        said = pair.prefill.tell(*(replace(asked, kv="handoff", until="first_token") for asked in batch))
        handoffs = {message.request_id: message.handoff for message in of_type(said, HandedOff)}
        parts = (
            replace(asked, kv="await_peer", handoff=handoffs[asked.request_id], output_token_ids=tokens)
            for asked, tokens in zip(batch, _outputs(said, batch), strict=True)
        )
        pair.decode.tell(*parts)
        pair.decode.rest()
        pair.prefill.tell(*(Release(asked.transfer_id, asked.attempt) for asked in batch))
        pair.prefill.rest()
    return _outputs([*pair.prefill.sent, *pair.decode.sent], submits)


def _outputs(messages: Sequence[EngineToRouter], submits: Sequence[Submit]) -> list[list[int]]:
    """Raises RuntimeError where one failed."""
    if failed := of_type(messages, Failed):
        raise RuntimeError(f"{failed[0].request_id} failed: {failed[0].message}")
    return [output_of(messages, asked.request_id) for asked in submits]


class Divergence(NamedTuple):
    """How two runs of the same streams compare."""

    num_streams: int
    num_different: int
    num_tokens: int  # compared, up to the first that differs

    def __str__(self) -> str:
        rate = f"1 of {self.num_tokens / self.num_different:,.0f}" if self.num_different else "none"
        share = self.num_different / self.num_streams
        return f"{self.num_different} of {self.num_streams} streams ({share:.1%}); {rate} of {self.num_tokens:,} tokens"


def compare(right: Sequence[list[int]], found: Sequence[list[int]], cuts: Sequence[int]) -> Divergence:
    """`cuts`: tokens of each stream that both have in common from the start."""
    num_different = num_tokens = 0
    for expected, tokens, cut in zip(right, found, cuts, strict=True):
        pairs = list(zip(expected[cut:], tokens[cut:], strict=True))
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
    vocabulary = min(VOCAB_SIZE, load_model_config(model, None).vocab_size)
    streams = make_streams(num_streams, num_tokens, vocabulary, temperature, lengths)
    chance = random.Random(1)
    cuts = [chance.randint(1, num_tokens - 2) for _ in streams]
    size: dict[str, Any] = {"dtype": dtype, "kv_cache_memory": 128 << 20, "max_num_seqs": 32}
    with ExitStack() as stack:
        one, other = (InProcessEngine.of_model(model, name=name, epoch=name, **size) for name in ("one", "other"))
        stack.callback(one.close)
        stack.callback(other.close)
        pair = stack.enter_context(SideBySide.of_model(model, "memory", **size))
        right = run_alike(one, _submits("right", streams), AT_ONCE)
        rest = [
            replace(asked, output_token_ids=tokens[:cut])
            for asked, tokens, cut in zip(_submits("migrated", streams), right, cuts, strict=True)
        ]
        migrated = run_alike(other, rest, AT_ONCE)
        shuffled = chance.sample(range(num_streams), num_streams)
        company = run_alike(one, [_submits("company", streams)[n] for n in shuffled], OTHERS_AT_ONCE)
        disaggregated = run_disaggregated(pair, _submits("pd", streams))
    whole = [0] * num_streams
    return {
        "company": compare([right[n] for n in shuffled], company, whole),
        "1P1D": compare(right, disaggregated, whole),
        "migrated": compare(right, [r[:cut] + m for r, m, cut in zip(right, migrated, cuts, strict=True)], cuts),
    }


def _submits(mode: str, streams: Sequence[Stream]) -> list[Submit]:
    """One for each stream, none of which finds anything in a cache."""
    return [
        submit(stream.prompt, request_id=f"{mode}-{n}", params=stream.params, cache_salt=f"{mode}-{n}")
        for n, stream in enumerate(streams)
    ]


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
