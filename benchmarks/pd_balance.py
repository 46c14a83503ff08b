"""1P1D against two aggregated engines, one core each, and what the balance of the two phases lets it reach.

With p and d the CPU seconds of a request in prefill and decode, two aggregated engines finish a request every
(p + d) / 2, and 1P1D one every max(p, d): so (p + d) / (2 max(p, d)) of their throughput is the most it can have.
"""

from statistics import median

from benchmarks.load import Workload
from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from benchmarks.servers import Server, cpu_seconds, pdkv
from benchmarks.versus import throughput, workload

CONCURRENCY = 32
LIMIT = 0.85
OPTIONS = ("--threads", "1", "--kv-cache-memory", "1GiB")


def balance(p: float, d: float) -> float:
    """The most that 1P1D can have of the throughput of two aggregated engines."""
    return (p + d) / (2 * max(p, d))


def run(context: Context, size: str) -> list[Claim]:
    """One claim."""
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
    return [Claim(f"{size}, share of what the balance allows", ratio / allowed, LIMIT, "higher", figures)]


def _split_rate(split: Server, load: Workload) -> tuple[float, float, float]:
    """(output tokens a second, CPU seconds per request of prefill, of decode)."""
    before = cpu_seconds(split)
    rate = throughput(split, load)
    engines = cpu_seconds(split).since(before).engines
    return rate, engines["prefill-0"] / load.num_requests, engines["decode-0"] / load.num_requests
