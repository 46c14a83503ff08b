"""What a benchmark hands back, and how it is kept: one JSON file and one markdown table per day and machine."""

import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from pdkv.connector_kit.bench.turns import Spread
from pdkv.host.cuda_devices import count_cuda_devices
from pdkv.host.processor import instruction_set

RESULTS = Path(__file__).parent / "results"


class Context(NamedTuple):
    """What benchmarks need to know of the machine, and how long they may take."""

    models: Path  # folder of random models, made when they are missing
    vllm: Path | None  # virtual environment of the peer; None: what needs it is skipped
    routers: Path | None = None  # folder with a virtual environment of each other router; None: as for `vllm`
    quick: bool = False  # a few seconds each: shows that it works, measures nothing
    clock: Callable[[], float] = time.perf_counter  # around what runs on this thread


class Claim(msgspec.Struct, frozen=True):
    """A ratio within one run, its limit, and the figures that it was made of."""

    name: str
    ratio: float
    limit: float
    better: Literal["higher", "lower"]
    figures: dict[str, float]
    quartiles: tuple[float, float] | None = None  # of the ratios of all rounds, whose median `ratio` is

    @classmethod
    def of(
        cls, name: str, ratio: Spread, limit: float, better: Literal["higher", "lower"], figures: dict[str, float]
    ) -> "Claim":
        """One about ratios that were taken in each round."""
        return cls(name, ratio.median, limit, better, figures, (ratio.low, ratio.high))

    @property
    def met(self) -> bool:
        """Whether the ratio is on the right side of its limit."""
        return self.ratio >= self.limit if self.better == "higher" else self.ratio <= self.limit

    @property
    def cells(self) -> str:
        """Cells of a table: its name, what was measured, what was wanted, and whether that was met."""
        spread = f" ({self.quartiles[0]:.2f} to {self.quartiles[1]:.2f})" if self.quartiles else ""
        wanted = f"{'≥' if self.better == 'higher' else '≤'} {self.limit:.2f}"
        return f"{self.name} | {self.ratio:.2f}{spread} | {wanted} | {'' if self.met else '**missed**'}"

    @property
    def shown_figures(self) -> str:
        """The figures from which the ratio was computed."""
        return ", ".join(f"{key} {_short(value)}" for key, value in self.figures.items())


class Outcome(msgspec.Struct, frozen=True):
    """One benchmark's run."""

    claims: list[Claim]
    seconds: float
    load_before: float  # the machine's load average: above a few tenths others were at work
    at: str


def hardware() -> dict[str, Any]:
    """The machine and the versions that figures depend on."""
    cpu = platform.processor() or platform.machine()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory = next((int(x.split()[1]) >> 20 for x in _lines("/proc/meminfo") if x.startswith("MemTotal")), 0)
    return {
        "cpu": cpu,
        "isa": instruction_set(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": memory,
        "python": platform.python_version(),
        "torch": version("torch"),
        "pdkv": version("pdkv"),
        **_gpu(),
    }


def _gpu() -> dict[str, str]:
    """The card, if there is one."""
    if count_cuda_devices() == 0:
        return {}
    import torch

    return {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda), "triton": version("triton")}


def load_average() -> float:
    """The load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def save(outcomes: dict[str, Outcome], folder: Path = RESULTS, *, prefix: str = "") -> Path:
    """Merge outcomes into today's files: a benchmark that ran again replaces what it said before.

    Where today's files are of a machine with another instruction set, that of this one is part of the names.

    Args:
        prefix: of the files' names, in front of the date.

    Returns:
        The markdown file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    machine = hardware()
    path = folder / f"{prefix}{day}.json"
    if path.exists() and json.loads(path.read_text())["hardware"]["isa"] != machine["isa"]:
        path = folder / f"{prefix}{day}-{machine['isa']}.json"
    document: dict[str, Any] = {"date": day, "hardware": machine, "benchmarks": {}}
    if path.exists():
        document["benchmarks"] = json.loads(path.read_text())["benchmarks"]
    document["benchmarks"] |= {name: _to_json(outcome) for name, outcome in outcomes.items()}
    path.write_text(json.dumps(document, indent=2) + "\n")
    table = path.with_suffix(".md")
    table.write_text(markdown(document))
    return table


def markdown(document: dict[str, Any]) -> str:
    """The document as a table."""
    machine = document["hardware"]
    card = f"{machine['gpu']}, CUDA {machine['cuda']}, Triton {machine['triton']}; " if "gpu" in machine else ""
    lines = [
        f"# Benchmarks of {document['date']}",
        "",
        f"{card}{machine['cpu']}, {machine['isa']}, {machine['cores']} cores, {machine['memory_gib']} GiB; "
        f"Python {machine['python']}, torch {machine['torch']}, pdkv {machine['pdkv']}. "
        "Every figure is a ratio within one run; in brackets the quartiles of its rounds.",
        "",
        "| benchmark | claim | measured | wanted | | figures |",
        "|---|---|---|---|---|---|",
    ]
    for name, outcome in document["benchmarks"].items():
        for claim in msgspec.convert(outcome["claims"], list[Claim]):
            lines.append(f"| {name} | {claim.cells} | {claim.shown_figures} |")
    lines += ["", "Load average before each: " + ", ".join(
        f"{name} {outcome['load_before']}" for name, outcome in document["benchmarks"].items()
    ) + ".", ""]  # fmt: skip
    return "\n".join(lines)


def show(name: str, claims: Sequence[Claim]) -> str:
    """Claims for a terminal."""
    return "\n".join(f"| {name} | {claim.cells} | {claim.shown_figures} |" for claim in claims)


def _to_json(outcome: Outcome) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(outcome)
    for claim, built in zip(outcome.claims, document["claims"], strict=True):
        built["met"] = claim.met
    return document


def _short(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
