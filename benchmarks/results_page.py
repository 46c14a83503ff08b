"""Write docs/results.md and its plot from benchmarks/results/: python -m benchmarks.results_page

The page has the newest run of each benchmark on each kind of machine, and the newest report of each other kind.
What explains a run's figures stands in benchmarks/results/notes.md.
"""

import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.peers import NEEDED_BY
from benchmarks.report import RESULTS, Claim

DOCS = Path(__file__).parents[1] / "docs"
SUPERSEDED = {"structured": "2026-11-23", "shapes": "2026-11-23", "dtypes": "2026-11-22", "swap": "2026-11-26"}
SUPERSEDED |= dict.fromkeys(("identity_mid", "identity_large", "many"), "2026-11-22")
SUPERSEDED |= dict.fromkeys(("connector_store_redis", "kv_busy_steps", "kv_codecs", "kv_inside_vllm"), "2026-11-26")
"""The day up to which a benchmark's figures, or a report, are of replaced code or of a benchmark that is gone."""
COMMANDS = {
    "autoscale": "python -m benchmarks.autoscale",
    "bench_clients": "python -m benchmarks.fixed_delays --guidellm PYTHON --vllm PYTHON",
    "dashboard": "python -m dashboard",
    "plan_traces": "python -m benchmarks.plan_traces --seconds 180 --stretch TIMES --engines 3",
    "simulated": "cd tests/harness && python -m simulated --save",
    "simulator": "pd simulate --prefill 0 --decode 1000 --num-prompts 100000 --request-rate 2000 --input-len 512 "
    "--output-len 100",
}
"""What is measured by a command of its own."""
PARTS = re.compile(r"(?P<kind>[a-z-]*?)-?(?P<day>\d{4}-\d\d-\d\d)(?:-\w+)?")
HEAD = """# Results

How fast is pdkv, on which machine and when was that measured, and which goals are missed? This page has the newest run
of each benchmark on each kind of machine. `python -m benchmarks.results_page` writes it from `benchmarks/results/`: do
not edit it.

Each figure is a ratio within one run unless its claim names a unit, and "wanted" is a limit that was set before the
measurement. In brackets are the quartiles of a run's rounds. A day links to the run's report, with the absolute figures
and the versions; the machine is the CPU's instruction set or the GPU. Tiny has 5 M parameters, mid 197 M, 8B the shape
of Llama 3.1 8B with random weights. CPU runs used two cores unless the report says otherwise. A run's load average is
in its report: above a few tenths, other work slowed it down.

![tokens per second of one engine, relative to vLLM](results.svg)
"""
TABLE = "| claim | measured | wanted | | machine | day |\n|---|---|---|---|---|---|"
REPORTS = """
## Reports

The newest run of each harness that provokes failures, and what it found:

"""


class Row(NamedTuple):
    """One claim of the newest run of its benchmark on one kind of machine."""

    benchmark: str
    machine: str
    day: str
    report: str  # name of the markdown file with all figures
    claim: Claim

    @property
    def cells(self) -> str:
        """A line of a table."""
        return f"| {self.claim.cells} | {self.machine} | [{self.day}](../benchmarks/results/{self.report}) |"


def newest(folder: Path = RESULTS) -> list[Row]:
    """The rows of the page, those of one benchmark together.

    Runs that do not name an instruction set are left out: what they measured cannot be told from other machines.
    """
    runs: dict[tuple[str, str], list[Row]] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: _parts(path)["day"]):
        document = json.loads(path.read_text())
        if "benchmarks" not in document or "isa" not in document["hardware"]:
            continue
        machine, day = document["hardware"].get("gpu", document["hardware"]["isa"]), document["date"]
        for name, outcome in document["benchmarks"].items():
            if day > SUPERSEDED.get(name, ""):
                claims = msgspec.convert(outcome["claims"], list[Claim])
                runs[name, machine] = [Row(name, machine, day, path.with_suffix(".md").name, c) for c in claims]
    return [row for key in sorted(runs, key=lambda key: (key[1].startswith("NVIDIA"), key)) for row in runs[key]]


def page(folder: Path = RESULTS) -> str:
    """The text of docs/results.md."""
    lines, notes = [HEAD], _notes(folder)
    for benchmark, group in groupby(newest(folder), key=lambda row: row.benchmark):
        rows = list(group)
        lines += [f"## {benchmark}", "", f"`{_command(rows[0])}`", "", TABLE, *(row.cells for row in rows), ""]
        for day in sorted({row.day for row in rows}):
            lines += [notes[f"{benchmark} {day}"], ""] if f"{benchmark} {day}" in notes else []
    return "\n".join(lines) + REPORTS + "\n".join(_reports(folder)) + "\n"


def plot(folder: Path = RESULTS) -> str:
    """An SVG of the engine's output tokens a second, relative to vLLM's in the same run."""
    rows = [row for row in newest(folder) if row.benchmark in ("engine_tiny", "engine_mid")]
    height = 24 * len(rows) + 56
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="760" height="{height}" fill="white"/>',
        '<text x="10" y="22" font-weight="bold">Output tokens/s of one engine on a CPU, pdkv / vLLM</text>',
    ]
    for at, row in enumerate(rows):
        y, width = 24 * at + 38, 130 * row.claim.ratio
        pdkv, vllm = row.claim.figures["pdkv tok/s"], row.claim.figures["vllm tok/s"]
        parts += [
            f'<text x="10" y="{y + 13}">{row.claim.name}</text>',
            f'<rect x="260" y="{y}" width="{width:.0f}" height="17" fill="#3572a5"/>',
            f'<text x="{268 + width:.0f}" y="{y + 13}">{row.claim.ratio:.2f}: {pdkv:.0f} / {vllm:.0f}</text>',
        ]
    parts.append(f'<line x1="390" x2="390" y1="32" y2="{height - 14}" stroke="black" stroke-dasharray="4"/>')
    parts.append(f'<text x="376" y="{height - 2}">vLLM</text>')
    return "\n".join([*parts, "</svg>", ""])


def _command(row: Row) -> str:
    if row.benchmark.startswith("smoke_"):
        return "make gpu smoke"
    if row.machine.startswith("NVIDIA"):
        return f'make gpu PARTS="{row.benchmark.replace("smoke", "launch")}"'
    if row.benchmark in COMMANDS:
        return COMMANDS[row.benchmark]
    beside = " --vllm VENV" if row.benchmark in NEEDED_BY else " --routers DIR" if "routers_" in row.benchmark else ""
    return f"python -m benchmarks.run {row.benchmark}{beside}"


def _notes(folder: Path) -> dict[str, str]:
    path = folder / "notes.md"
    sections = path.read_text().split("\n## ")[1:] if path.exists() else []
    return {head: text.strip() for head, _, text in (section.partition("\n") for section in sections)}


def _parts(path: Path) -> dict[str, str]:
    parts = PARTS.fullmatch(path.stem) or PARTS.match(path.stem)
    return {"kind": "", "day": ""} if parts is None else parts.groupdict()


def _reports(folder: Path) -> Iterator[str]:
    """A line for the newest report of each kind that is not one of benchmarks."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(folder.glob("*.md"), key=lambda path: _parts(path)["day"]):
        kind, day = _parts(path)["kind"], _parts(path)["day"]
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        if not title.startswith("Benchmarks of") and day > SUPERSEDED.get(kind, ""):
            found[kind] = (title, path.name)
    return (f"- [{title}](../benchmarks/results/{name})" for _, (title, name) in sorted(found.items()))


if __name__ == "__main__":
    (DOCS / "results.md").write_text(page())
    (DOCS / "results.svg").write_text(plot())
