"""Many requests at once: none fails, and a token costs engine and router no more CPU than with few."""

from pathlib import Path

from benchmarks import load, servers
from benchmarks.claims.rows import Row
from benchmarks.load import Workload

CONCURRENCIES = (64, 256, 512)


def run(model: str, path: Path) -> list[Row]:
    """CPU seconds of engine and router per output token, relative to 64 requests at once."""
    result, first = [], 0.0
    options = ["--threads", "1", "--max-num-seqs", "512", "--kv-cache-memory", "2GiB"]
    with servers.pdkv(path, prefill=0, decode=1, options=options) as server:
        load.measure(server.url, server.model, Workload(64, 10, (20, 40), 64, seed=1))
        for concurrency in CONCURRENCIES:
            before = servers.cpu_seconds(server)
            report = load.measure(server.url, server.model, Workload(concurrency, 10, (20, 500), concurrency, seed=4))
            used = servers.cpu_seconds(server).since(before)
            per_token = used.total / report["tokens"]
            first = first or per_token
            result.append(
                Row(
                    "CPU per token of engine and router, relative to 64 at once",
                    f"{model}, {concurrency} at once",
                    per_token / first,
                    "x",
                    "<= 1.2" if concurrency > 64 else "",
                    f"{per_token * 1e6:.0f} µs a token, of which router {used.router / report['tokens'] * 1e6:.0f} µs; "
                    f"{report['output_tok_s']} tok/s, {report['failed']} failed",
                )
            )
    return result
