"""What a load came to: vLLM's metrics under vLLM's names, goodput, and how far the client itself is to be trusted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple, TextIO

import msgspec

from pdkv.bench.client import Reply
from pdkv.errors import ConfigError

LATENCIES = ("ttft", "tpot", "itl", "e2el")
TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (without the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
MAX_BUSY = 0.85
"""The share of a core above which the client's own work may show in the figures."""

MAX_CPU_US, SOME_BUSY = 15.0, 0.25
"""Microseconds of the client's processor per token above which it may be what is measured, if it was busy for that
share of a core at least.
"""

MAX_LATE_MS = 10.0
"""Milliseconds by which requests may be sent late."""


class Sent(NamedTuple):
    """One request as it went."""

    session: int
    turn: int
    due_s: float  # from the start of the run
    late_s: float  # sent so much later
    reply: Reply
    wanted: int  # output tokens

    @property
    def tpot(self) -> float | None:
        """Mean seconds between its tokens, if it has two."""
        return self.reply.tpot if self.reply.num_tokens > 1 else None


class Run(NamedTuple):
    """All requests of a run."""

    requests: Sequence[Sent]
    wall_s: float  # from the first send to the last token
    cpu_s: float  # processor time of this process
    num_unsent: int = 0  # turns behind a failed request of their session

    @property
    def replies(self) -> list[Reply]:
        """All of them, in the order of their ends."""
        return [sent.reply for sent in self.requests]


class Slo(NamedTuple):
    """Bounds that a good request keeps, in milliseconds."""

    bounds: Mapping[str, float]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Slo":
        """From texts such as "ttft:200". Raises ConfigError."""
        bounds = {}
        for text in texts:
            name, _, value = text.partition(":")
            try:
                bounds[name] = float(value)
            except ValueError:
                bounds[name] = -1.0
            if name not in ("ttft", "tpot", "e2el") or not 0 < bounds[name] < float("inf"):
                raise ConfigError(
                    f"--goodput {text!r}: ttft, tpot or e2el with milliseconds was expected, as in ttft:200"
                )
        return cls(bounds)

    def is_met(self, sent: Sent) -> bool:
        """Whether a request was complete and within all bounds."""
        reply = sent.reply
        if not reply.ok:
            return False
        found = {"ttft": reply.ttft, "tpot": sent.tpot or 0.0, "e2el": reply.latency}
        return all(found[name] * 1e3 <= most for name, most in self.bounds.items())


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile by linear interpolation, as vLLM's are."""
    import numpy as np  # once there are figures: the client does without

    return float(np.percentile(values, percent))


def summarize(run: Run, percents: Sequence[float], slo: Slo) -> dict[str, Any]:
    """Throughput over the whole run, latencies over the requests that are complete. Times in milliseconds."""
    good = [sent for sent in run.requests if sent.reply.ok]
    failed = [sent for sent in run.requests if not sent.reply.ok]
    output = sum(sent.reply.num_tokens for sent in good)
    prompt = sum(sent.reply.num_prompt_tokens for sent in good)
    cached = sum(sent.reply.num_cached_tokens for sent in good)
    wall = max(run.wall_s, 1e-9)
    report: dict[str, Any] = {
        "completed": len(good),
        "failed": len(failed),
        "unsent": run.num_unsent,
        "duration": run.wall_s,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "cached_input_tokens": cached,
        "request_throughput": len(good) / wall,
        "output_throughput": output / wall,
        "total_token_throughput": (prompt + output) / wall,
        "mean_concurrency": sum(sent.reply.latency for sent in good) / wall,
        "answers_without_usage": sum(not sent.reply.has_usage for sent in good),
        "short_answers": sum(sent.reply.num_tokens < sent.wanted for sent in good),
    }
    if slo.bounds:
        report["goodput"] = sum(map(slo.is_met, run.requests)) / wall
        report["slo_attainment"] = sum(map(slo.is_met, run.requests)) / max(len(run.requests) + run.num_unsent, 1)
        report["slo_ms"] = dict(slo.bounds)
    for name, values in series(run).items():
        report |= _spread(name, [1e3 * value for value in values], percents)
    if failed:
        report["errors"] = dict(Counter(str(sent.reply.error) for sent in failed).most_common(10))
    report |= {
        "client_cpu_us_per_token": 1e6 * run.cpu_s / max(output, 1),
        "client_busy": run.cpu_s / wall,
        "p99_late_ms": 1e3 * percentile([sent.late_s for sent in run.requests] or [0.0], 99),
    }
    return report


def series(run: Run) -> dict[str, list[float]]:
    """Seconds of the latencies of all requests that are complete, by name."""
    good = [sent for sent in run.requests if sent.reply.ok]
    return {
        "ttft": [sent.reply.ttft for sent in good],
        "tpot": [tpot for sent in good if (tpot := sent.tpot) is not None],
        "itl": [gap for sent in good for gap in sent.reply.gaps],
        "e2el": [sent.reply.latency for sent in good],
    }


def _spread(name: str, values: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    found = {f"mean_{name}_ms": fmean(values), f"median_{name}_ms": median(values)}
    return found | {f"p{percent:g}_{name}_ms": percentile(values, percent) for percent in percents}


def doubts(report: Mapping[str, Any], *, is_open_loop: bool) -> list[str]:
    """Why the figures may be the client's, not the server's."""
    found = []
    if report["client_busy"] > MAX_BUSY:
        found.append(
            f"the client was busy for {report['client_busy']:.0%} of a core: its own work shows in these figures; "
            "send less, or divide the load between several clients"
        )
    elif report["client_cpu_us_per_token"] > MAX_CPU_US and report["client_busy"] > SOME_BUSY:
        found.append(
            f"the client took {report['client_cpu_us_per_token']:.1f} us of a processor per token, above {MAX_CPU_US:g}"
        )
    if report["unsent"]:
        found.append(f"{report['unsent']} turns were not sent, since one before them failed: none is within the SLO")
    if is_open_loop and report["p99_late_ms"] > MAX_LATE_MS:
        found.append(f"requests were sent up to {report['p99_late_ms']:.1f} ms late (P99): the machine was too busy")
    if report["answers_without_usage"]:
        found.append("the server does not count tokens: each event of a stream counts as one, and no prompt token does")
    elif report["short_answers"]:
        found.append(f"{report['short_answers']} answers are shorter than asked for: the server ended them earlier")
    return found


_ROWS = (
    ("Successful requests", "completed"),
    ("Failed requests", "failed"),
    ("Turns not sent", "unsent"),
    ("Benchmark duration (s)", "duration"),
    ("Total input tokens", "total_input_tokens"),
    ("  of them cached", "cached_input_tokens"),
    ("Total generated tokens", "total_output_tokens"),
    ("  retokenized", "total_output_tokens_retokenized"),
    ("Request throughput (req/s)", "request_throughput"),
    ("Request goodput (req/s)", "goodput"),
    ("Requests within the SLO (share)", "slo_attainment"),
    ("Output token throughput (tok/s)", "output_throughput"),
    ("Total token throughput (tok/s)", "total_token_throughput"),
    ("Mean concurrency", "mean_concurrency"),
    ("Client CPU per token (us)", "client_cpu_us_per_token"),
    ("Roofline B_sat (requests)", "b_sat"),
)


def print_report(report: Mapping[str, Any], percents: Sequence[float], out: TextIO) -> None:
    """Print the report as `vllm bench serve` does, behind the report that it has as `recorded`, if any."""
    recorded = report.get("recorded")
    reports = [report] if recorded is None else [recorded, report]
    _title("Serving benchmark result", "=", out)
    if recorded is not None:
        print(f"{'':<46}{'recorded':>14}{'replayed':>14}", file=out)
    for label, name in _ROWS:
        _line(label, name, reports, out)
    for name in LATENCIES:
        if f"mean_{name}_ms" not in report:
            continue
        _title(TITLES[name], "-", out)
        label = name.upper()
        _line(f"Mean {label} (ms)", f"mean_{name}_ms", reports, out)
        _line(f"Median {label} (ms)", f"median_{name}_ms", reports, out)
        for percent in percents:
            _line(f"P{percent:g} {label} (ms)", f"p{percent:g}_{name}_ms", reports, out)
    print("=" * 60, file=out)
    for error, count in report.get("errors", {}).items():
        print(f"{count} failed: {error}", file=out)
    for error, count in (recorded or {}).get("errors", {}).items():
        print(f"{count} failed when recorded: {error}", file=out)


def _title(text: str, fill: str, out: TextIO) -> None:
    print(f" {text} ".center(60, fill), file=out)


def _line(label: str, name: str, reports: Sequence[Mapping[str, Any]], out: TextIO) -> None:
    """The line of a figure that the last report has."""
    if name in reports[-1]:
        print(f"{label + ':':<46}" + "".join(f"{_shown(report.get(name, '-')):>14}" for report in reports), file=out)


def _shown(value: Any) -> str:
    return "unknown" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def request_lines(run: Run) -> bytes:
    """One JSON line per request: times in seconds from the start of the run, or its error."""
    lines = []
    for sent in run.requests:
        reply = sent.reply
        line: dict[str, Any] = {
            "session": sent.session,
            "turn": sent.turn,
            "sent_s": round(sent.due_s + sent.late_s, 6),
            "late_s": round(sent.late_s, 6),
            "input_tokens": reply.num_prompt_tokens,
            "cached_tokens": reply.num_cached_tokens,
            "output_tokens": reply.num_tokens,
            "error": reply.error,
        }
        if reply.stamps:
            line["ttft_s"] = round(reply.ttft, 6)
            line["itl_s"] = [round(gap, 6) for gap in reply.gaps]
        lines.append(msgspec.json.encode(line))
    return b"\n".join(lines) + b"\n"
