"""All ways in which KV travels, with all kinds of damage, and a table of what became of it."""

import datetime
import fcntl
import json
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from flights import RANKS, WAYS, FlightReport, damages_of, flights
from nixl_rig import HAS_NIXL

from pdkv.connector_kit.rig.processes import Zygote
from pdkv.connector_kit.rig.world import Refused

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"

HEAD = """\
Each trial hands one prompt over and damages it once on its way, where it is read; up to 24 fly together, and those
without damage must end well. Found: the load failed with an error's code, before a token was computed from it. Right:
it ended well with the right bytes, which only the last three kinds may do: what was reused had been read by then, the
bit was behind the prompt's last token in its block, or the connection was made anew, as in its greeting, or had done
its work. Sound: trials without damage. Wrong: a load that ended well with wrong bytes or in spite of its damage, or a
sound one that failed.

- flip: one bit
- swap: two hash blocks in each other's place
- foreign: a hash block of another request in the place of one
- lost: a short read; an end is reported that has not arrived
- stale: a block that was used anew behind the hand-off; late: while it may be read
- wire: a bit of all that goes over the sockets, greetings and frames too; a connection's end anywhere
"""


def fly_all(
    ways: Sequence[str], damages: Sequence[str], num_trials: int, seed: int, done: Collection[str] = ()
) -> Iterator[FlightReport]:
    """So many trials of each kind of damage on each way, between engines of each of RANKS that it takes.

    What the engines' processes log, which is every damage, goes to a file of the temporary folder.

    Args:
        done: names of reports that are not wanted again.
    """
    with tempfile.TemporaryDirectory(prefix="soak-flights-") as folder:
        with _errors_to(Path(folder) / "log"):
            zygote = Zygote(Path(folder))
        with zygote:
            for way in ways:
                if WAYS[way].connector == "nixl" and not HAS_NIXL:
                    continue
                for number, ranks in enumerate(RANKS):
                    wanted = [damage for damage in damages_of(WAYS[way]) if damage in damages]
                    wanted = [damage for damage in wanted if FlightReport(way, ranks, damage).name not in done]
                    directory = Path(folder) / f"{way} {number}"
                    directory.mkdir()
                    if wanted:
                        yield from _fly(way, ranks, wanted, num_trials, zygote=zygote, directory=directory, seed=seed)


def _fly(
    way: str, ranks: tuple[int, int], damages: Sequence[str], num_trials: int, *, zygote: Zygote, directory: Path,
    seed: int,
) -> Iterator[FlightReport]:  # fmt: skip
    try:
        with flights(way, ranks, zygote=zygote, directory=directory, seed=seed) as flight:
            for damage in damages:
                yield flight.run(damage, num_trials)
    except Refused:
        return


def finished(num_trials: int, seed: int) -> set[str]:
    """Names of today's saved reports that have so many trials and nothing wrong."""
    path = _path()
    saved = _load(path) if path.exists() else {}
    return {
        name
        for name, report in saved.items()
        if report.seed == seed and report.num_trials >= num_trials and not report.violations
    }


def save(report: FlightReport) -> None:
    """Merge it into today's files. Several processes may."""
    path = _path()
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        reports = _load(path) | {report.name: report}
        path.write_text(
            json.dumps({name: msgspec.to_builtins(each) for name, each in reports.items()}, indent=1) + "\n"
        )
        path.with_suffix(".md").write_text(_table(reports))


def _path() -> Path:
    return RESULTS / f"damage-{datetime.date.today()}.json"


def _load(path: Path) -> dict[str, FlightReport]:
    text = path.read_text()
    return {name: msgspec.convert(each, FlightReport) for name, each in json.loads(text or "{}").items()}


def _table(reports: dict[str, FlightReport]) -> str:
    ways = list(WAYS)
    lines = [
        f"# Damage in flight, {datetime.date.today()}",
        "",
        HEAD,
        "| way | ranks | damage | trials | found | as | right | sound | wrong |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for report in sorted(reports.values(), key=lambda report: (ways.index(report.way), report.ranks)):
        codes = ", ".join(f"{code} {count}" for code, count in sorted(report.found.items()))
        lines.append(
            f"| {report.way} | {report.ranks[0]} → {report.ranks[1]} | {report.damage} | {report.num_trials} | "
            f"{report.num_found} | {codes} | {report.num_right} | {report.num_sound} | {len(report.violations)} |"
        )
    return "\n".join([*lines, ""])


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
