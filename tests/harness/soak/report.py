"""Reports of soak runs: one JSON file and one markdown table per day; a run replaces an earlier one of its kind."""

import datetime
import json
from pathlib import Path
from typing import Any

import msgspec

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


class Report(msgspec.Struct, kw_only=True):
    """One backend's run."""

    backend: str
    ranks: tuple[int, int]  # of a prefill engine, of a decode engine
    seed: int
    seconds: float  # of chaos
    private_mounts: bool
    spared: tuple[str, ...] = ()
    events: dict[str, int] = {}
    outcomes: dict[str, int] = {}
    patient: dict[str, int] = {}  # of them those whose clients read to the end and had 10 s
    worst_s: float = 0.0
    remote_tokens: int = 0  # prompt tokens that decode engines alive at the end got from elsewhere
    descriptors: dict[str, tuple[int, int]] = {}  # by process name: before, afterwards
    resident_mib: dict[str, tuple[int, int]] = {}
    router_memory: str = ""
    router_resident: list[tuple[float, int, int]] = []  # at each rest: seconds, pid, bytes
    zero_accounts: int = 0  # the router's counts that were exactly zero at the last rest
    strangers: int = 0  # their connections that Gloo keeps between ranks
    loop_stalls: dict[str, int] = {}  # what held the router's event loop for more than 20 ms, by place and kind
    violations: list[str] = []
    skipped: str = ""

    @property
    def name(self) -> str:
        """Of the run, for people."""
        spared = f", {' and '.join(self.spared)} spared" if self.spared else ""
        return f"{self.backend}, TP {self.ranks[0]},{self.ranks[1]}{spared}"


def today() -> str:
    """The day of a report, in its files' names."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def write_json(name: str, result: object, folder: Path) -> Path:
    """A run's result, of what msgspec knows, as today's file of that name. Returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{today()}.json"
    path.write_text(json.dumps(msgspec.to_builtins(result), indent=2) + "\n")
    return path


def save(reports: list[Report], folder: Path = RESULTS) -> Path:
    """Merge into today's files. Returns the markdown file."""
    day = today()
    path = folder / f"soak-{day}.json"
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    document |= {report.name: msgspec.to_builtins(report) for report in reports}
    write_json("soak", document, folder)
    table = path.with_suffix(".md")
    table.write_text(markdown(day, {name: msgspec.convert(value, Report) for name, value in document.items()}))
    return table


def markdown(day: str, reports: dict[str, Report]) -> str:
    """A table of all runs, and what each did."""
    lines = [
        f"# Soak of {day}",
        "",
        "Two prefill and two decode engines of a small random float32 model under steady load with known tokens, while",
        "everything that can goes wrong. Wrong tokens, hanging requests, unclear errors and leaks are violations.",
        "",
        "| backend | chaos | events | requests | right | errors | worst | violations |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(report) for report in reports.values()]
    for report in reports.values():
        lines += ["", f"## {report.name}", "", *_details(report)]
    return "\n".join([*lines, ""])


def _row(report: Report) -> str:
    if report.skipped:
        return f"| {report.name} | skipped: {report.skipped} | | | | | | |"
    outcomes = report.outcomes
    errors = sum(count for name, count in outcomes.items() if name.startswith(("error", "broken")))
    mark = f"**{len(report.violations)}**" if report.violations else "none"
    return (
        f"| {report.name} | {report.seconds:.0f} s | {sum(report.events.values())} | {sum(outcomes.values())} "
        f"| {outcomes.get('right', 0)} | {errors} | {report.worst_s:.1f} s | {mark} |"
    )


def _details(report: Report) -> list[str]:
    if report.skipped:
        return [f"Skipped: {report.skipped}."]
    disk = "a small tmpfs of its own" if report.private_mounts else "RLIMIT_FSIZE (no private mounts allowed here)"
    lines = [
        f"- seed {report.seed}; full disk and /dev/shm by {disk}",
        f"- events: {_counts(report.events)}",
        f"- requests: {_counts(report.outcomes)}",
        f"- prompt tokens from elsewhere, on decode engines alive at the end: {report.remote_tokens}",
        f"- descriptors before → afterwards: {_pairs(report.descriptors)}",
        f"- MiB resident before → afterwards: {_pairs(report.resident_mib)}",
        f"- what held the router's event loop for more than 20 ms: {_counts(report.loop_stalls)}",
    ]
    if report.zero_accounts:  # reports of before have none of these
        lines += [
            f"- of the requests read to the end, within 10 s: {_counts(report.patient)}",
            f"- the router's counts of what is under way, exactly 0 at the last rest: {report.zero_accounts}",
            f"- the router's memory at rest: {report.router_memory or 'not judged, it was killed too often'}",
        ]
    if report.strangers:
        lines.append(f"- strangers' connections that Gloo keeps between ranks: {report.strangers}")
    return lines + [f"- **violation** {text}" for text in report.violations]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _pairs(pairs: dict[str, tuple[int, int]]) -> str:
    return ", ".join(f"{name.removeprefix('pd ')} {before} → {after}" for name, (before, after) in pairs.items())
