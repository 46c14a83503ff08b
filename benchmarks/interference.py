"""What long prompts do to running streams: p99 of the gaps between tokens of 8 streams, quiet and loaded.

The load is prompts of 2,000 tokens at a fixed interval, with 1 and with 64 tokens of output. 1P1D has the claim; one
aggregated engine on the same cores stands beside it.
"""

import asyncio
import random
import time
from typing import NamedTuple

from benchmarks.load import Workload, check, complete, measure, random_prompt
from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from benchmarks.servers import Server, pdkv
from pdkv.bench.client import Reply
from pdkv.bench.report import percentile
from pdkv.bench.serve import run_loop

NUM_STREAMS = 8
STREAM_PROMPT_LEN = 16
STREAM_LEN = 1000
"""Tokens of one stream before it begins again, so that contexts stay alike over the run."""
PROMPT_LEN = 2000
LIMIT = 1.5
KV_MEMORY = "1GiB"
TINY_INTERVAL_S = 1.0


class Arrivals(NamedTuple):
    """Prompts that come in while the streams run."""

    interval_s: float
    output_len: int
    prompt_len: int = PROMPT_LEN


def run(context: Context, size: str) -> list[Claim]:
    """One claim for each length of output."""
    model = find_model(context.models, size)
    seconds = 6.0 if context.quick else 60.0
    memory = ("--kv-cache-memory", KV_MEMORY)
    with pdkv(model, prefill=1, decode=1, options=("--threads", "1", *memory)) as split:
        prompts = Workload(4, PROMPT_LEN, (1, 1), seed=1)
        is_tiny = size == "tiny"  # otherwise half of what prefill is capable of
        interval_s = TINY_INTERVAL_S if is_tiny else measure(split.url, split.model, prompts).wall_s / 2
        split_gaps = _all_gaps(split, interval_s, seconds)
    with pdkv(model, prefill=0, decode=1, options=memory) as aggregated:
        aggregated_gaps = _all_gaps(aggregated, interval_s, seconds / 4)
    claims = []
    for output_len in (1, 64):
        ratio = split_gaps[output_len] / split_gaps[0]
        figures = {
            "quiet p99 ms": split_gaps[0] * 1e3,
            "loaded p99 ms": split_gaps[output_len] * 1e3,
            "interval s": interval_s,
            "aggregated quiet p99 ms": aggregated_gaps[0] * 1e3,
            "aggregated loaded p99 ms": aggregated_gaps[output_len] * 1e3,
            "aggregated ratio": aggregated_gaps[output_len] / aggregated_gaps[0],
        }
        claims.append(Claim(f"{size}, {output_len} tokens out", ratio, LIMIT, "lower", figures))
    return claims


def _all_gaps(server: Server, interval_s: float, seconds: float) -> dict[int, float]:
    """p99 of the gaps in seconds by the load's tokens of output; 0: no load."""
    p99_gap(server, None, min(seconds, 3.0))  # warm
    loads = {0: None, 1: Arrivals(interval_s, 1), 64: Arrivals(interval_s, 64)}
    return {key: p99_gap(server, load, seconds) for key, load in loads.items()}


def p99_gap(server: Server, arrivals: Arrivals | None, seconds: float) -> float:
    """p99 of the gaps in seconds between tokens within streams that ran so long. Raises RuntimeError if any failed."""
    return percentile(run_loop(_gaps(server, arrivals, seconds)), 99)


async def _gaps(server: Server, arrivals: Arrivals | None, seconds: float) -> list[float]:
    rng = random.Random(7)
    replies: list[Reply] = []
    prompts: list[Reply] = []

    async def stream(first_len: int) -> None:
        length = first_len
        while True:
            replies.append(Reply())
            prompt = random_prompt(rng, STREAM_PROMPT_LEN)
            await complete(server.url, model=server.model, prompt=prompt, max_tokens=length, reply=replies[-1])
            if not replies[-1].ok:
                return
            length = STREAM_LEN

    async def one_prompt(load: Arrivals) -> None:
        prompt = random_prompt(rng, load.prompt_len)
        prompts.append(await complete(server.url, model=server.model, prompt=prompt, max_tokens=load.output_len))

    # Streams begin at different places in their lives, so that they do not all end together.
    tasks = [asyncio.create_task(stream(STREAM_LEN * (i + 1) // NUM_STREAMS)) for i in range(NUM_STREAMS)]
    end = time.perf_counter() + seconds
    await asyncio.sleep(min(1.0, seconds / 3))
    began = time.perf_counter()
    count = 0
    while arrivals is not None and began + count * arrivals.interval_s < end:
        await asyncio.sleep(began + count * arrivals.interval_s - time.perf_counter())
        tasks.append(asyncio.create_task(one_prompt(arrivals)))
        count += 1
    await asyncio.sleep(max(0.0, end - time.perf_counter()))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    check([*replies, *prompts])
    return [gap for reply in replies for gap in reply.gaps]
