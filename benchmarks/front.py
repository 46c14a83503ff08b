"""What the router costs, all limits on: CPU of tokens, memory of slow streams, and time.

It stands in front of a paced engine, which computes nothing: more streams than this machine could compute, and CPU time
of the router's process, which says nearly the same beside other work.
"""

import asyncio
import random
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.engine_link import EngineLink, Timing
from benchmarks.load import Workload, check, complete, measure, random_prompt
from benchmarks.report import Claim, Context
from benchmarks.router_alone import Alone, router_alone
from pdkv.bench.client import Reply
from pdkv.bench.serve import run_loop
from pdkv.connector_kit.bench.turns import take_turns
from pdkv.host.sockets import raise_open_files_limit

TOKEN_LIMITS_US = {64: 40.0, 1000: 30.0}
DISPATCHER_US, TOGETHER_LIMIT = 8.0, 1.15
STREAM_LIMIT_KIB = 30.0
LATENCY_LIMIT_MS = 2.0
REFUSAL_LIMIT_MS = 10.0
PACE_S = 0.002
"""Seconds of a step, if time is measured."""


def run(context: Context) -> list[Claim]:
    """Two claims of tokens, four of fronts, two of streams, two of time."""
    raise_open_files_limit()
    return [
        *(_tokens(num_streams, context.quick) for num_streams in TOKEN_LIMITS_US),
        *(claim for num_streams in TOKEN_LIMITS_US for claim in fronts(num_streams, context.quick)),
        *slow_streams(context.quick),
        added_latency(context.quick),
        refusals(context.quick),
    ]


# --- tokens -------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """The shape of requests."""

    input_len: int
    output_len: tuple[int, int]


LONG, SHORT = Shape(10, (20, 500)), Shape(512, (64, 64))
"""Long answers to short prompts, and the lengths of most other benchmarks."""


def _tokens(num_streams: int, quick: bool) -> Claim:
    """Router CPU a token, what requests cost included; `num_streams` at once get a token each per step."""
    shapes = {"us": LONG, "us of 512 in, 64 out": SHORT}
    figures = {name: _cost(num_streams, shape, quick).router for name, shape in shapes.items()}
    limit = TOKEN_LIMITS_US[num_streams]
    title = f"router CPU a token, {num_streams} streams of 10 in, 20 to 500 out / {limit:g} us"
    return Claim(title, figures["us"] / limit, 1.0, "lower", figures)


class Cost(NamedTuple):
    """CPU microseconds a token."""

    router: float  # or dispatcher
    fronts: float


def _cost(num_streams: int, shape: Shape, quick: bool, num_fronts: int = 0) -> Cost:
    pace_s = 0.02 if num_streams < 256 else 0.1
    num_requests, lengths = (num_streams, (8, 8)) if quick else (2 * num_streams, shape.output_len)
    with router_alone(pace_s=pace_s, num_seqs=2 * num_streams, num_fronts=num_fronts) as router:
        load = Workload(num_requests, shape.input_len, lengths, num_streams, seed=num_streams)
        measure(router.url, router.model, Workload(64, shape.input_len, (20, 20), 64))  # warm
        began = router.cpu_seconds(), router.fronts_cpu_seconds()
        replies = measure(router.url, router.model, load).replies
        used = router.cpu_seconds() - began[0], router.fronts_cpu_seconds() - began[1]
    num_tokens = sum(reply.num_tokens for reply in replies)
    return Cost(*(seconds / num_tokens * 1e6 for seconds in used))


def fronts(num_streams: int, quick: bool) -> list[Claim]:
    """A front and its dispatcher, beside one process that does both; two rounds by turns."""
    rounds = [(_cost(num_streams, LONG, quick), _cost(num_streams, LONG, quick, 1)) for _ in range(1 if quick else 2)]
    one = median(alone.router for alone, _ in rounds)
    dispatcher, front = (median(values) for values in zip(*(pair for _, pair in rounds), strict=True))
    figures = {"one process us": one, "dispatcher us": dispatcher, "front us": front}
    title, limit = f"{num_streams} streams behind a front", DISPATCHER_US
    return [
        Claim(f"{title}: dispatcher's CPU a token / {limit:g} us", dispatcher / limit, 1.0, "lower", figures),
        Claim(f"{title}: both / one process", (dispatcher + front) / one, TOGETHER_LIMIT, "lower", figures),
    ]


# --- slow streams -------------------------------------------------------------------------------------------------


def slow_streams(quick: bool) -> list[Claim]:
    """10,000 streams that are open at once, each with a token a second."""
    num_streams, num_tokens, at_once = (200, 12, 200) if quick else (10_000, 60, 1_000)
    with router_alone(
        pace_s=0.2 if quick else 1.0, num_seqs=num_streams + 64, max_connections=num_streams + 512
    ) as router:
        seen = run_loop(_open_streams(router, num_streams, num_tokens, at_once))
    failed, peak, kib = seen
    figures = {"streams": float(num_streams), "open at once": float(peak), "KiB each": kib}
    title = f"{num_streams} slow streams"
    return [
        Claim(f"{title}: failures", float(failed), 0.0, "lower", figures),
        Claim(f"{title}: router memory each / 30 KiB", kib / STREAM_LIMIT_KIB, 1.0, "lower", figures),
    ]


async def _open_streams(router: Alone, num_streams: int, num_tokens: int, at_once: int) -> tuple[int, int, float]:
    """(failures, most streams open at one time, KiB of the router for each of them then); `at_once` begin together."""
    rng = random.Random(0)
    for _ in range(2):  # warm
        await asyncio.gather(*(_stream(router, rng, 4) for _ in range(32)))
    base = router.memory_kib()
    replies = [Reply(0.0) for _ in range(num_streams)]
    tasks: list[asyncio.Task[Reply]] = []
    peak, memory = 0, base
    while not tasks or not all(task.done() for task in tasks):
        num_waiting = sum(not reply.stamps and not task.done() for reply, task in zip(replies, tasks, strict=False))
        for reply in replies[len(tasks) : len(tasks) + at_once - num_waiting]:
            tasks.append(asyncio.create_task(_stream(router, rng, num_tokens, reply)))
        await asyncio.wait(tasks, timeout=0.5)
        num_open = sum(bool(r.stamps) and not task.done() for r, task in zip(replies, tasks, strict=False))
        if num_open > peak:
            peak, memory = num_open, router.memory_kib()
    return sum(not reply.ok for reply in replies), peak, (memory - base) / max(peak, 1)


async def _stream(router: Alone, rng: random.Random, num_tokens: int, reply: Reply | None = None) -> Reply:
    prompt = random_prompt(rng, 10)
    return await complete(router.url, model=router.model, prompt=prompt, max_tokens=num_tokens, reply=reply)


# --- time ---------------------------------------------------------------------------------------------------------


def added_latency(quick: bool) -> Claim:
    """One request at a time, through the router and straight to the engine's socket by turns: paired differences."""
    rounds = 8 if quick else 200
    rng = random.Random(0)
    with router_alone(pace_s=PACE_S, num_seqs=8) as router, EngineLink(router.endpoint) as link:

        def through_router(prompt: list[int]) -> Timing:
            reply = run_loop(complete(router.url, model=router.model, prompt=prompt, max_tokens=16))
            check([reply])
            return Timing(reply.ttft, reply.stamps[-1] - reply.sent)

        def ask(way: Callable[[list[int]], Timing]) -> Timing:
            time.sleep(5 * PACE_S)  # the engine is idle, whichever way is next
            return way(random_prompt(rng, 32))

        ways = {"router": partial(ask, through_router), "engine": partial(ask, lambda p: link.complete(p, 16))}
        took = take_turns(ways, rounds, warm=4)
    pairs = list(zip(took["router"], took["engine"], strict=True))
    first, end = (median(routed[i] - straight[i] for routed, straight in pairs) * 1e3 for i in range(2))
    figures = {"to the first token ms": first, "to the end ms": end}
    worst = max(figures.values())
    return Claim("latency that the router adds, p50 / 2 ms", worst / LATENCY_LIMIT_MS, 1.0, "lower", figures)


def refusals(quick: bool) -> Claim:
    """429s, one after the other and each on a connection of its own, while the queue is full and 64 streams run."""
    num_seqs, num_queued, num_refusals = (4, 4, 20) if quick else (64, 32, 200)
    with router_alone(pace_s=0.01, num_seqs=num_seqs, max_queued_requests=num_queued) as router:
        seconds = run_loop(_refusals(router, 2 * num_seqs + num_queued, num_refusals))
    figures = {"p50 ms": median(seconds) * 1e3, "worst ms": max(seconds) * 1e3}
    p99 = sorted(seconds)[len(seconds) * 99 // 100] * 1e3
    return Claim("a full queue's 429, p99 / 10 ms", p99 / REFUSAL_LIMIT_MS, 1.0, "lower", figures)


async def _refusals(router: Alone, num_streams: int, number: int) -> list[float]:
    """Seconds of each, by the clock of another process than that of the streams."""
    rng = random.Random(0)
    streams = [asyncio.create_task(_stream(router, rng, 900)) for _ in range(num_streams)]  # some may be refused, too
    try:
        command = [sys.executable, "-m", "benchmarks.refused", router.url, router.model, str(number)]
        process = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parent.parent, stdout=PIPE)
        output, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError("benchmarks.refused failed")
        return [float(word) for word in output.split()]
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
