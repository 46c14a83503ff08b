"""What the hand-off costs one request: time to the first token, and from the first to the second."""

import statistics
from pathlib import Path

from benchmarks import load, servers
from benchmarks.claims.rows import Row
from benchmarks.client import Reply
from benchmarks.load import Workload

REQUESTS = 24
POOL = ("--kv-cache-memory", "1GiB")


def _replies(server: servers.Server) -> list[Reply]:
    load.measure(server.url, server.model, Workload(4, 512, (16, 16), 1, seed=1))
    replies, _ = load.run(load.send_all(server.url, server.model, Workload(REQUESTS, 512, (16, 16), 1, seed=2)))
    return list(replies)


def run(model: str, path: Path) -> list[Row]:
    """TTFT as a ratio; the second-token gap beside a decode step and the transfer itself."""
    with servers.pdkv(path, prefill=0, decode=1, options=["--threads", "1", *POOL]) as server:
        joined = _replies(server)
    with servers.pdkv(path, prefill=1, decode=1, options=["--threads", "1", *POOL]) as server:
        split = _replies(server)
        transfer_s = servers.metric(server, "pdkv_engine_kv_transfer_seconds_total") / (REQUESTS + 4)
        moved = servers.metric(server, "pdkv_engine_kv_received_bytes_total") / (REQUESTS + 4)
    ttft_split, ttft_joined = (statistics.median(r.ttft for r in replies) for replies in (split, joined))
    second = statistics.median(r.gaps[0] for r in split)
    step = statistics.median(gap for r in split for gap in r.gaps[1:])
    allowed = step + 1.2 * transfer_s + 0.003
    ttfts = f"{ttft_split * 1e3:.1f} ms against {ttft_joined * 1e3:.1f} ms"
    parts = f"step {step * 1e3:.1f} ms, transfer {transfer_s * 1e3:.2f} ms for {moved / 2**20:.1f} MiB"
    return [
        Row("TTFT, 1P1D / aggregated with as many threads", model, ttft_split / ttft_joined, "x", "<= 1.1", ttfts),
        Row(
            "first to second token / (decode step + 1.2 transfers + 3 ms)",
            model,
            second / allowed,
            "x",
            "<= 1.0",
            f"{second * 1e3:.1f} ms; {parts}",
        ),
    ]
