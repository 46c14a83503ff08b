"""Load on any OpenAI server: closed loop by concurrency, or Poisson arrivals by rate. Latencies and throughput out.

    python -m benchmarks.load URL --model NAME [--concurrency 8 | --rate 4] [--requests 32] [--input-len 512] ...

Prompts are random token ids in [10, 4000), so any model with a vocabulary of 4,000 or more will do.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Coroutine, Sequence
from statistics import mean
from typing import Any, NamedTuple

import uvloop

from benchmarks.client import Reply, complete


class Workload(NamedTuple):
    """What is sent. Equal seeds send equal prompts and lengths in equal order."""

    num_requests: int
    input_len: int
    output_len: tuple[int, int]  # tokens, both ends included
    concurrency: int = 1
    rate: float = 0.0  # requests a second, Poisson; 0: as concurrency allows
    seed: int = 0


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """Token ids."""
    return rng.choices(range(10, 4000), k=length)


async def send_all(url: str, model: str, workload: Workload) -> tuple[list[Reply], float]:
    """All replies, and the seconds from the first send to the last token."""
    rng = random.Random(workload.seed)
    prompts = [random_prompt(rng, workload.input_len) for _ in range(workload.num_requests)]
    lengths = [rng.randint(*workload.output_len) for _ in prompts]
    gate = asyncio.Semaphore(len(prompts) if workload.rate else workload.concurrency)

    async def one(prompt: list[int], length: int, delay_s: float) -> Reply:
        await asyncio.sleep(delay_s)
        async with gate:
            return await complete(url, model=model, prompt=prompt, max_tokens=length)

    delays, clock = [], 0.0
    for _ in prompts:
        delays.append(clock)
        clock += rng.expovariate(workload.rate) if workload.rate else 0.0
    start = time.perf_counter()
    replies = await asyncio.gather(*map(one, prompts, lengths, delays))
    return list(replies), time.perf_counter() - start


def check(replies: Sequence[Reply]) -> None:
    """Raises RuntimeError if one failed: a figure over what is left would be wrong."""
    errors = [reply.error for reply in replies if not reply.ok]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(replies)} requests failed: {errors[0]}")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share of all values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


class Rates(NamedTuple):
    """Throughput of a run; `concurrency` is the mean number of requests in flight (Little's law)."""

    requests_s: float
    input_tok_s: float
    output_tok_s: float
    total_tok_s: float
    concurrency: float


def rates(num_requests: int, wall_s: float, input_tokens: int, output_tokens: int, mean_latency_s: float) -> Rates:
    """What `num_requests` requests within `wall_s` seconds come to."""
    return Rates(
        num_requests / wall_s,
        input_tokens / wall_s,
        output_tokens / wall_s,
        (input_tokens + output_tokens) / wall_s,
        num_requests * mean_latency_s / wall_s,
    )


def summarize(replies: Sequence[Reply], wall_s: float, input_len: int) -> dict[str, Any]:
    """Throughput over the whole run, latencies over the replies that are complete. Times in ms."""
    good = [reply for reply in replies if reply.ok]
    report: dict[str, Any] = {"ok": len(good), "failed": len(replies) - len(good), "wall_s": round(wall_s, 3)}
    if len(good) < len(replies):
        report["first_error"] = next(reply.error for reply in replies if not reply.ok)
    if not good:
        return report
    num_tokens = sum(reply.num_tokens for reply in good)
    latency_s = mean(reply.stamps[-1] - reply.sent for reply in good)
    found = rates(len(good), wall_s, len(good) * input_len, num_tokens, latency_s)
    report |= {"tokens": num_tokens} | {name: round(value, 2) for name, value in found._asdict().items()}
    series = {
        "ttft": [reply.ttft for reply in good],
        "tpot": [reply.tpot for reply in good],
        "itl": [gap for reply in good for gap in reply.gaps],
    }
    for name, values in series.items():
        if values:
            report[f"{name}_ms"] = {
                f"p{share}": round(percentile(values, share / 100) * 1e3, 3) for share in (50, 90, 99)
            }
    return report


def measure(url: str, model: str, workload: Workload) -> dict[str, Any]:
    """Send a workload and summarize what came back.

    Raises:
        RuntimeError: a request failed.
    """
    replies, wall_s = run(send_all(url, model, workload))
    check(replies)
    return summarize(replies, wall_s, workload.input_len)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", required=True, help="its name in the API")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.0, help="Poisson arrivals a second instead of a closed loop")
    parser.add_argument("--input-len", type=int, default=512, help="tokens")
    parser.add_argument("--output-len", type=int, nargs="+", default=[64], help="tokens, or least and most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    lengths = (options.output_len[0], options.output_len[-1])
    workload = Workload(options.requests, options.input_len, lengths, options.concurrency, options.rate, options.seed)
    replies, wall_s = run(send_all(options.url, options.model, workload))
    report = summarize(replies, wall_s, workload.input_len)
    print(json.dumps(report, indent=2))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
