"""1P1D against two aggregated engines, one core each, and what the balance of the two phases lets it reach.

With p and d the CPU seconds of a request in prefill and decode, two aggregated engines finish a request every
(p + d) / 2, and 1P1D one every max(p, d): so (p + d) / (2 max(p, d)) of their throughput is the most it can have.
Then prompts of two lengths arrive at random, at a rate that both can keep.
"""

import random
from itertools import pairwise
from statistics import median

from benchmarks.load import Workload, check, random_prompt
from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from benchmarks.servers import Server, cpu_seconds, pdkv
from benchmarks.versus import OUTPUT_LEN, throughput, workload
from pdkv.bench.report import percentile
from pdkv.bench.serve import Pace, Target, run_loop, send
from pdkv.bench.workload import one_turn

CONCURRENCY = 32
LIMIT = 0.85
ARRIVING = (128, 1024)
"""Tokens of the prompts that arrive at random."""

SHARE_OF_RATE = 0.7
"""The rate of arrivals, as a share of the slower side's rate in the closed loop."""

ARRIVAL_LIMITS = {"TTFT": 1.3, "gap": 0.9}
"""Bounds of the 99th percentiles, 1P1D / two aggregated engines."""

OPTIONS = ("--threads", "1", "--kv-cache-memory", "1GiB")


def balance(p: float, d: float) -> float:
    """The most that 1P1D can have of the throughput of two aggregated engines."""
    return (p + d) / (2 * max(p, d))


def run(context: Context, size: str) -> list[Claim]:
    """Three claims: the throughput, and the times of requests that arrive at random."""
    model = find_model(context.models, size)
    num_requests, rounds = (2 * CONCURRENCY, 2) if size == "mid" else (8 * CONCURRENCY, 4)
    if context.quick:
        num_requests, rounds = CONCURRENCY, 1
    phases: list[tuple[float, float]] = []
    rates: list[tuple[float, float]] = []
    with (
        pdkv(model, prefill=1, decode=1, options=OPTIONS) as split,
        pdkv(model, prefill=0, decode=2, options=OPTIONS) as aggregated,
    ):
        for server in (split, aggregated):
            throughput(server, workload(CONCURRENCY, CONCURRENCY))
        for _ in range(rounds):
            rate, p, d = _split_rate(split, workload(num_requests, CONCURRENCY))
            phases.append((p, d))
            rates.append((rate, throughput(aggregated, workload(num_requests, CONCURRENCY))))
        pace = SHARE_OF_RATE * min(median(a for a, _ in rates), median(b for _, b in rates)) / OUTPUT_LEN
        times = {"1P1D": _arrive(split, num_requests, pace), "aggregated": _arrive(aggregated, num_requests, pace)}
    p, d = median(p for p, _ in phases), median(d for _, d in phases)
    ratio = median(a / b for a, b in rates)
    allowed = balance(p, d)
    figures = {
        "1P1D tok/s": median(a for a, _ in rates),
        "2 aggregated tok/s": median(b for _, b in rates),
        "their ratio": ratio,
        "balance allows": allowed,
        "p ms": p * 1e3,
        "d ms": d * 1e3,
    }
    claims = [Claim(f"{size}, share of what the balance allows", ratio / allowed, LIMIT, "higher", figures)]
    for what, limit in ARRIVAL_LIMITS.items():
        both = {f"{name} p99 ms": each[what] * 1e3 for name, each in times.items()} | {"requests/s": pace}
        title = f"{size}, prompts of 128 and 1,024 tokens at random, p99 of {what}, 1P1D / two aggregated engines"
        claims.append(Claim(title, times["1P1D"][what] / times["aggregated"][what], limit, "lower", both))
    return claims


def _arrive(server: Server, num_requests: int, rate: float) -> dict[str, float]:
    """99th percentiles in seconds of Poisson arrivals, the same for each server."""
    rng = random.Random(11)
    sessions = [one_turn(random_prompt(rng, rng.choice(ARRIVING)), OUTPUT_LEN) for _ in range(num_requests)]
    replies = run_loop(send(Target(server.url, server.model), sessions, Pace(rate, seed=11))).replies
    check(replies)
    gaps = [later - earlier for reply in replies for earlier, later in pairwise(reply.stamps)]
    return {"TTFT": percentile([reply.ttft for reply in replies], 99), "gap": percentile(gaps, 99)}


def _split_rate(split: Server, load: Workload) -> tuple[float, float, float]:
    """(output tokens a second, CPU seconds per request of prefill, of decode)."""
    before = cpu_seconds(split)
    rate = throughput(split, load)
    engines = cpu_seconds(split).since(before).engines
    return rate, engines["prefill-0"] / load.num_requests, engines["decode-0"] / load.num_requests
