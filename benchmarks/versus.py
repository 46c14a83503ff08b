"""Throughput of two servers beside each other: rounds alternate between them, so that both see the same machine."""

from collections.abc import Sequence
from itertools import count
from statistics import median
from typing import NamedTuple

from benchmarks.load import Workload, measure
from benchmarks.servers import Server

INPUT_LEN = 512
OUTPUT_LEN = 64

_seeds = count(1)
"""Every workload has prompts of its own: nothing is found in a prefix cache."""


class Versus(NamedTuple):
    """Medians over the rounds."""

    ratio: float  # of the rounds' ratios, ours to theirs
    ours: float  # output tokens a second
    theirs: float


def workload(num_requests: int, concurrency: int) -> Workload:
    """A closed loop of 512 tokens in, 64 out, with prompts that nobody sent before."""
    return Workload(num_requests, INPUT_LEN, (OUTPUT_LEN, OUTPUT_LEN), concurrency, seed=next(_seeds))


def throughput(server: Server, load: Workload) -> float:
    """Output tokens a second. Raises RuntimeError if a request failed."""
    report = measure(server.url, server.model, load)
    return float(report["output_tok_s"])


def compare(ours: Server, theirs: Server, *, concurrency: int, num_requests: int, rounds: int) -> Versus:
    """Warm both up, then alternate; the one that begins changes every round."""
    servers: Sequence[Server] = (ours, theirs)
    for server in servers:
        throughput(server, workload(concurrency, concurrency))
    rates: list[tuple[float, float]] = []
    for turn in range(rounds):
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        found = {i: throughput(servers[i], workload(num_requests, concurrency)) for i in order}
        rates.append((found[0], found[1]))
    return Versus(
        ratio=median(a / b for a, b in rates), ours=median(a for a, _ in rates), theirs=median(b for _, b in rates)
    )
