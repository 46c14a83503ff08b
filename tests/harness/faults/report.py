"""Results of a run: one JSON file and one markdown table per day; a cell replaces an earlier one of its name."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from faults.cells import LIMITED
from faults.run import Outcome

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"

HEADER = [
    "| backend | fault | at | requests | streamed | there | failed | wrong | hung | longest | went on elsewhere |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
]


def row(outcome: Outcome) -> str:
    """Of the table."""
    counters = ", ".join(f"{name} {count}" for name, count in outcome.counters.items() if count)
    failed = f"{outcome.failed} missed, {outcome.late} late" if outcome.kind == LIMITED else outcome.failed
    counts = (outcome.requests, outcome.streamed, outcome.there, failed, outcome.wrong, outcome.hung)
    kind = f"stop, {outcome.stop_s:.0f} s" if outcome.kind == "stop" else outcome.kind
    cells = (outcome.backend, kind, outcome.place, *counts, f"{outcome.longest_s:.1f} s", counters)
    return f"| {' | '.join(map(str, cells))} |"


def save(outcomes: Sequence[Outcome], folder: Path = RESULTS) -> Path:
    """Merge into today's files. Returns the markdown file."""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    path = folder / f"faults-{day}.json"
    document = json.loads(path.read_text()) if path.exists() else {}
    for outcome in outcomes:
        name = f"{outcome.backend}: {outcome.kind}, {outcome.place}"
        document[name] = msgspec.to_builtins(outcome)
    path.write_text(json.dumps(document, indent=2) + "\n")
    table = path.with_suffix(".md")
    table.write_text(markdown(day, [msgspec.convert(value, Outcome) for value in document.values()]))
    return table


def markdown(day: str, outcomes: Sequence[Outcome]) -> str:
    """The table of all cells."""
    rates = {
        backend: (
            min(o.rate for o in outcomes if o.backend == backend),
            max(o.rate for o in outcomes if o.backend == backend),
        )
        for backend in dict.fromkeys(outcome.backend for outcome in outcomes)
    }
    lines = [
        f"# Faults of {day}",
        "",
        "Two prefill and two decode engines of a small random float32 model. Requests come at a fixed rate, half of",
        "what the deployment was measured to do just before, whether or not others are done; every second one is",
        "streamed. After a third of them a fault meets an engine at which requests are where the table says (`there`:",
        "how many, as the router sees it; of a full pool, how many waited for blocks at most).",
        "",
        "Requests a second: " + ", ".join(f"{name} {low:.1f}-{high:.1f}" for name, (low, high) in rates.items()) + ".",
        "",
        f"Of {sum(o.requests for o in outcomes)} requests, {sum(o.streamed for o in outcomes)} of them streamed, "
        f"{sum(o.lost for o in outcomes)} were lost.",
        "",
        *HEADER,
        *map(row, outcomes),
    ]
    return "\n".join([*lines, ""])
