"""A run in the form of llm-d's benchmark reports, version 0.2 (github.com/llm-d/llm-d-benchmark)."""

import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean, pstdev
from typing import Any

from pdkv.base.clock import unix_time
from pdkv.base.version import VERSION
from pdkv.bench.datasets import SYNTHETIC
from pdkv.bench.report import Run, percentile, series
from pdkv.bench.serve import Pace

_PERCENTS = {"p0p1": 0.1, "p1": 1, "p5": 5, "p10": 10, "p25": 25, "p50": 50, "p75": 75, "p90": 90, "p95": 95, "p99": 99,
             "p99p9": 99.9}  # fmt: skip


def llm_d_report(run: Run, report: Mapping[str, Any], pace: Pace, dataset: str) -> dict[str, Any]:
    """The report as JSON-ready data, of a run that has just ended. `report`: of `summarize`."""
    good = [reply for reply in run.replies if reply.ok]
    inputs = _statistics([float(reply.num_prompt_tokens) for reply in good], "count")
    load = {
        "tool": "pdkv",
        "tool_version": VERSION,
        "source": "random" if dataset in SYNTHETIC else "sampled",
        "input_seq_len": {"distribution": "other", "value": inputs["mean"] if inputs else 0},
        **({"rate_qps": pace.rate} if pace.rate < float("inf") else {}),
        **({"concurrency": pace.max_concurrency} if pace.max_concurrency else {}),
    }
    performance = {
        "requests": _present(
            total=len(run.requests),
            failures=report["failed"],
            incomplete=run.num_unsent,
            input_length=inputs,
            output_length=_statistics([float(reply.num_tokens) for reply in good], "count"),
        ),
        "latency": _latency(run),
        "throughput": {
            "input_token_rate": _rate(report["total_input_tokens"] / max(run.wall_s, 1e-9), "tokens/s"),
            "output_token_rate": _rate(report["output_throughput"], "tokens/s"),
            "total_token_rate": _rate(report["total_token_throughput"], "tokens/s"),
            "request_rate": _rate(report["request_throughput"], "queries/s"),
        },
    }
    return {
        "version": "0.2",
        "run": {"uid": secrets.token_hex(16), "time": _times(run.wall_s)},
        "scenario": {"load": {"metadata": {}, "standardized": load, "native": {"args": {"dataset_name": dataset}}}},
        "results": {"request_performance": {"aggregate": performance}},
    }


def _latency(run: Run) -> dict[str, Any]:
    found = series(run)
    return _present(
        time_to_first_token=_statistics(found["ttft"], "s"),
        time_per_output_token=_statistics(found["tpot"], "s/token"),
        inter_token_latency=_statistics(found["itl"], "s/token"),
        request_latency=_statistics(found["e2el"], "s"),
    )


def _times(wall_s: float) -> dict[str, str]:
    end = unix_time()
    start, stop = (datetime.fromtimestamp(at, UTC).isoformat() for at in (end - wall_s, end))
    return {"start": start, "end": stop, "duration": f"PT{wall_s:.3f}S"}


def _statistics(values: Sequence[float], units: str) -> dict[str, Any] | None:
    if not values:
        return None
    percents = {name: percentile(values, percent) for name, percent in _PERCENTS.items()}
    ends = {"min": min(values), "max": max(values)}
    return {"units": units, "mean": fmean(values), "stddev": pstdev(values), **ends, **percents}


def _rate(value: float, units: str) -> dict[str, Any]:
    return {"units": units, "mean": value}


def _present(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
