"""All ways in which KV travels, with all kinds of damage, and a table of what became of it."""

import datetime
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flights import RANKS, WAYS, FlightReport, damages_of, flights
from nixl_rig import HAS_NIXL

from pdkv.connector_kit.rig.processes import Zygote
from pdkv.connector_kit.rig.world import Refused

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def fly_all(ways: Sequence[str], damages: Sequence[str], num_trials: int, seed: int) -> Iterator[FlightReport]:
    """So many trials of each kind of damage on each way, between engines of each of RANKS that it takes.

    What the engines' processes log, which is every damage, goes to a file of the temporary folder.
    """
    with tempfile.TemporaryDirectory(prefix="soak-flights-") as folder:
        with _errors_to(Path(folder) / "log"):
            zygote = Zygote(Path(folder))
        with zygote:
            for name in ways:
                if WAYS[name].connector == "nixl" and not HAS_NIXL:
                    continue
                for number, ranks in enumerate(RANKS):
                    directory = Path(folder) / f"{name} {number}"
                    directory.mkdir()
                    try:
                        with flights(name, ranks, zygote=zygote, directory=directory, seed=seed) as flight:
                            for damage in damages_of(WAYS[name]):
                                if damage in damages:
                                    yield flight.run(damage, num_trials)
                    except Refused:
                        continue


def save(reports: Sequence[FlightReport], seed: int) -> None:
    """Write the table of today."""
    today = datetime.date.today()
    lines = [
        f"# Damage in flight, {today}",
        "",
        f"`python -m soak.damage --save --seed {seed}`: each trial hands one prompt over and damages it once on its",
        "way. Found: its load failed with an error's code. Beside: what was loaded was right, as the damage was",
        "elsewhere or was made good. Sound: trials without damage, which ended well. Wrong: a load that ended well",
        "with wrong bytes, or a sound one that failed.",
        "",
        "| way | ranks | damage | trials | found | as | beside | sound | wrong |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for report in reports:
        codes = ", ".join(f"{code} {count}" for code, count in sorted(report.found.items()))
        lines.append(
            f"| {report.way} | {report.ranks[0]} → {report.ranks[1]} | {report.damage} | {report.num_trials} | "
            f"{report.found.total()} | {codes} | {report.num_beside} | {report.num_sound} | {len(report.violations)} |"
        )
    (RESULTS / f"damage-{today}.md").write_text("\n".join([*lines, ""]))


@contextmanager
def _errors_to(path: Path) -> Iterator[None]:
    """What processes that are started meanwhile write to their standard error goes to a file."""
    own = os.dup(2)
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)
