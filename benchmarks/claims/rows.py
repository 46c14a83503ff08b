"""What a claim reports: rows with a value, its unit and the target it is held against."""

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One figure."""

    claim: str
    case: str
    value: float
    unit: str
    target: str = ""  # such as ">= 1.2"; empty: context for another row
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None: there is none."""
        if not self.target:
            return None
        sign, bound = self.target.split()[:2]
        return self.value >= float(bound) if sign == ">=" else self.value <= float(bound)


def hardware() -> str:
    """The machine in words."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, {memory:.0f} GiB"


def markdown(rows: Sequence[Row]) -> str:
    """A table."""
    lines = ["| claim | case | figure | target | met | note |", "|---|---|---|---|---|---|"]
    words = {True: "yes", False: "**no**", None: ""}
    for row in rows:
        lines.append(
            f"| {row.claim} | {row.case} | {row.value:.4g} {row.unit} | {row.target} | {words[row.met]} | {row.note} |"
        )
    return "\n".join(lines)


def write(folder: Path, name: str, rows: Sequence[Row]) -> None:
    """NAME.json and NAME.md, with date and hardware."""
    folder.mkdir(parents=True, exist_ok=True)
    date = time.strftime("%Y-%m-%d")
    report: dict[str, Any] = {"date": date, "hardware": hardware(), "rows": [row._asdict() for row in rows]}
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / f"{name}.md").write_text(f"# {name}\n\n{date}, {hardware()}\n\n{markdown(rows)}\n")
