"""64, 256 and 512 concurrent requests of 10 tokens in, 20 to 500 out: no failure, and no token costs more CPU."""

from benchmarks.load import Workload, send_all
from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from benchmarks.servers import CpuSeconds, Server, cpu_seconds, pdkv

CONCURRENCIES = (64, 256, 512)
LIMIT = 1.2
INPUT_LEN = 10
OUTPUT_LEN = (20, 500)


def run(context: Context) -> list[Claim]:
    """Failures, then engines' and router's CPU seconds per token at most against least concurrency."""
    model = find_model(context.models, "tiny")
    lengths = (20, 60) if context.quick else OUTPUT_LEN
    failures = 0
    costs: dict[int, CpuSeconds] = {}
    with pdkv(model, prefill=1, decode=1, options=("--kv-cache-memory", "512MiB")) as server:
        _send(server, Workload(64, INPUT_LEN, (20, 20), 64))  # warm
        for concurrency in CONCURRENCIES:
            load = Workload(max(CONCURRENCIES), INPUT_LEN, lengths, concurrency, seed=concurrency)
            failed, costs[concurrency] = _send(server, load)
            failures += failed
    least, most = min(CONCURRENCIES), max(CONCURRENCIES)
    engines = {n: sum(cost.engines.values()) * 1e6 for n, cost in costs.items()}
    router = {n: cost.router * 1e6 for n, cost in costs.items()}
    return [
        Claim("failed requests", float(failures), 0.0, "lower", {"sent": float(len(costs) * most)}),
        Claim(
            f"engine CPU per token, {most} against {least}",
            engines[most] / engines[least],
            LIMIT,
            "lower",
            {f"us at {n}": cost for n, cost in engines.items()},
        ),
        Claim(
            f"router CPU per token, {most} against {least}",
            router[most] / router[least],
            LIMIT,
            "lower",
            {f"us at {n}": cost for n, cost in router.items()},
        ),
    ]


def _send(server: Server, load: Workload) -> tuple[int, CpuSeconds]:
    """(requests that failed, CPU seconds per token)."""
    before = cpu_seconds(server)
    replies = send_all(server.url, server.model, load).replies
    used = cpu_seconds(server).since(before)
    num_tokens = sum(reply.num_tokens for reply in replies)
    per_token = CpuSeconds({name: s / num_tokens for name, s in used.engines.items()}, used.router / num_tokens)
    return sum(not reply.ok for reply in replies), per_token
