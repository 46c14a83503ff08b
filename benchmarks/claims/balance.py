"""What disaggregation costs in throughput: 1P1D against two aggregated engines, beside what the balance allows.

With p and d CPU seconds per request in the two phases, two equal cores that share all work finish a request every
(p + d) / 2 seconds, and 1P1D every max(p, d): it can reach (p + d) / (2 max(p, d)) of the aggregated throughput.
"""

from pathlib import Path

from benchmarks import load, servers
from benchmarks.claims.rows import Row
from benchmarks.load import Workload

CONCURRENCY = 16
REQUESTS = {"tiny": 96, "mid": 24}
OPTIONS = ("--threads", "1", "--kv-cache-memory", "2GiB")


def run(model: str, path: Path) -> list[Row]:
    """One row: the share of the possible that is reached."""
    workload = Workload(REQUESTS[model], 512, (64, 64), CONCURRENCY, seed=5)
    warm_up = Workload(CONCURRENCY, 512, (8, 8), CONCURRENCY, seed=6)
    with servers.pdkv(
        path, prefill=1, decode=1, options=[*OPTIONS, "--prefill-cpu-bind", "0", "--decode-cpu-bind", "1"]
    ) as server:
        load.measure(server.url, server.model, warm_up)
        before = servers.cpu_seconds(server)
        split = load.measure(server.url, server.model, workload)
        used = servers.cpu_seconds(server).since(before)
    with servers.pdkv(path, prefill=0, decode=2, options=[*OPTIONS, "--cpu-bind", "0|1"]) as server:
        load.measure(server.url, server.model, warm_up)
        joined = load.measure(server.url, server.model, workload)
    p, d = used.engines["prefill-0"] / workload.num_requests, used.engines["decode-0"] / workload.num_requests
    possible = (p + d) / (2 * max(p, d))
    ratio = split["output_tok_s"] / joined["output_tok_s"]
    note = (
        f"1P1D {split['output_tok_s']} tok/s, 2 aggregated {joined['output_tok_s']} tok/s; p {p * 1e3:.0f} ms, "
        f"d {d * 1e3:.0f} ms of CPU a request: {possible:.2f} is possible"
    )
    return [
        Row("1P1D / two aggregated engines, of what the balance allows", model, ratio / possible, "x", ">= 0.85", note)
    ]
