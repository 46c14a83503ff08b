"""Throughput beside vLLM: one aggregated engine, and 1P1D over shared memory against 1P1D over NIXL."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks import load, peers, servers
from benchmarks.claims.rows import Row
from benchmarks.load import Workload

INPUT_LEN = 512
OUTPUT_LEN = (64, 64)
POOL = ("--kv-cache-memory", "2GiB")

AGGREGATED = {("mid", 1): 1.2, ("mid", 32): 1.5, ("tiny", 8): 1.2, ("tiny", 32): 1.2}
"""(model, concurrency) -> least ratio of output tokens/s."""

DISAGGREGATED = {("tiny", 8): 2.0, ("tiny", 32): 2.0}

Starter = Callable[[], AbstractContextManager[servers.Server]]


def num_requests(model: str, concurrency: int) -> int:
    """Enough for a steady state, few enough for minutes."""
    return {"tiny": max(4 * concurrency, 16), "mid": max(2 * concurrency, 4)}[model]


def throughput(start: Starter, model: str, concurrencies: list[int]) -> dict[int, dict[str, Any]]:
    """A report per concurrency, after a warm-up."""
    reports = {}
    with start() as server:
        for concurrency in concurrencies:
            warm_up = Workload(min(concurrency, 8), INPUT_LEN, (8, 8), concurrency, seed=99)
            load.measure(server.url, server.model, warm_up)
            workload = Workload(num_requests(model, concurrency), INPUT_LEN, OUTPUT_LEN, concurrency, seed=concurrency)
            reports[concurrency] = load.measure(server.url, server.model, workload)
    return reports


def rows(claim: str, model: str, ours: dict[int, Any], theirs: dict[int, Any], targets: dict[Any, float]) -> list[Row]:
    """Ratios, each with both figures in its note."""
    result = []
    for concurrency, mine in ours.items():
        peer = theirs[concurrency]
        note = ", ".join(
            f"{name} {r['output_tok_s']} tok/s, TTFT {r['ttft_ms']['p50']:.0f}, TPOT {r['tpot_ms']['p50']:.1f} ms"
            for name, r in (("pdkv", mine), ("vLLM", peer))
        )
        bound = targets.get((model, concurrency))
        ratio = mine["output_tok_s"] / peer["output_tok_s"]
        result.append(
            Row(claim, f"{model}, concurrency {concurrency}", ratio, "x", f">= {bound}" if bound else "", note)
        )
    return result


def aggregated(model: str, path: Path, venv: Path) -> list[Row]:
    """One engine on all cores against one vLLM server on all cores."""
    concurrencies = [c for m, c in AGGREGATED if m == model]
    theirs = throughput(lambda: peers.vllm(venv, path), model, concurrencies)
    ours = throughput(
        lambda: servers.pdkv(path, prefill=0, decode=1, options=["--threads", "2", *POOL]), model, concurrencies
    )
    return rows("aggregated / vLLM, output tokens/s", model, ours, theirs, AGGREGATED)


def disaggregated(model: str, path: Path, venv: Path) -> list[Row]:
    """1P1D, one core each."""
    concurrencies = [c for m, c in DISAGGREGATED if m == model]
    theirs = throughput(lambda: peers.vllm_pd(venv, path), model, concurrencies)
    options = ["--threads", "1", "--prefill-cpu-bind", "0", "--decode-cpu-bind", "1", *POOL]
    ours = throughput(lambda: servers.pdkv(path, prefill=1, decode=1, options=options), model, concurrencies)
    return rows("1P1D / vLLM 1P1D over NIXL, output tokens/s", model, ours, theirs, DISAGGREGATED)
