"""What disaggregation is for: gaps between tokens of running streams while long prompts arrive."""

import asyncio
from pathlib import Path
from typing import Any

from benchmarks import load, servers
from benchmarks.claims.rows import Row
from benchmarks.client import Reply, complete
from benchmarks.load import Workload, percentile, random_prompt

NUM_STREAMS = 8
PROMPT_LEN = 2000
STREAM_PROMPT_LEN = 64
POOL = ("--kv-cache-memory", "1GiB")


async def gaps(url: str, model: str, seconds: float, interval_s: float | None, output_len: int) -> list[float]:
    """Gaps of streams that run for `seconds`, while prompts of 2,000 tokens arrive every `interval_s` (None: none)."""
    import random

    rng = random.Random(3)
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    replies: list[Reply] = []

    async def stream(number: int) -> None:
        while loop.time() < end:
            prompt = random_prompt(rng, STREAM_PROMPT_LEN)
            replies.append(await complete(url, model=model, prompt=prompt, max_tokens=400 + 7 * number))

    async def disturb() -> None:
        pending: set[asyncio.Task[Reply]] = set()
        while interval_s is not None and loop.time() < end:
            prompt = random_prompt(rng, PROMPT_LEN)
            pending.add(loop.create_task(complete(url, model=model, prompt=prompt, max_tokens=output_len)))
            await asyncio.sleep(interval_s)
        for reply in await asyncio.gather(*pending):
            if not reply.ok:
                raise RuntimeError(f"a long prompt failed: {reply.error}")

    await asyncio.gather(disturb(), *(stream(number) for number in range(NUM_STREAMS)))
    bad = [reply.error for reply in replies if not reply.ok]
    if bad:
        raise RuntimeError(f"a stream failed: {bad[0]}")
    return [gap for reply in replies for gap in reply.gaps]


def p99(url: str, model: str, seconds: float, interval_s: float | None, output_len: int = 1) -> float:
    """In ms."""
    values: list[float] = load.run(gaps(url, model, seconds, interval_s, output_len))
    return percentile(values, 0.99) * 1e3


def prefill_interval_s(url: str, model: str) -> float:
    """Seconds between prompts at half of the measured prefill capacity."""
    report: dict[str, Any] = load.measure(url, model, Workload(6, PROMPT_LEN, (1, 1), 1, seed=8))
    return 2 * float(report["wall_s"]) / 6


def run(model: str, path: Path, seconds: float) -> list[Row]:
    """p99 with prompts arriving over p99 without, in 1P1D and aggregated."""
    result = []
    pd = ["--threads", "1", "--prefill-cpu-bind", "0", "--decode-cpu-bind", "1", *POOL]
    shapes = {"1P1D": (1, pd), "aggregated": (0, ["--threads", "2", *POOL])}
    for shape, (prefill, options) in shapes.items():
        with servers.pdkv(path, prefill=prefill, decode=1, options=options) as server:
            interval_s = 1.0 if model == "tiny" else prefill_interval_s(server.url, server.model)
            load.measure(server.url, server.model, Workload(8, STREAM_PROMPT_LEN, (32, 32), 8, seed=9))
            quiet = p99(server.url, server.model, seconds, None)
            for output_len in (1, 64):
                loaded = p99(server.url, server.model, seconds, interval_s, output_len)
                arrivals = f"a prompt of 2,000 tokens every {interval_s:.2f} s"
                result.append(
                    Row(
                        "p99 of inter-token gaps, prompts arriving / quiet",
                        f"{model}, {shape}, prompts with {output_len} tokens of output",
                        loaded / quiet,
                        "x",
                        "<= 1.5" if shape == "1P1D" else "",
                        f"quiet {quiet:.1f} ms, loaded {loaded:.1f} ms, {arrivals}",
                    )
                )
    return result
