"""Random schedules of the hand-off state machine, with a proposer that is often wrong, at each number of steps ahead.

python -m soak.schedules --schedules 10000: so many at each of 0, 1 and 2 steps ahead, over every legal mode and order
and mixtures of connectors. Exit code 1 where a token was wrong, a block did not come back, or anything was published
that no client got, or where no schedule planned that many steps ahead. Each failure is printed with what runs it again:
--lags 2 --only 4711. --save writes today's table in benchmarks/results/.
"""

import argparse
import datetime
import json
import logging
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from peer_groups import FULL_AND_WINDOW
from random_proposer import RandomProposer
from state_machine.host import MULTI_PAIRS, PAIRS, STAND_IN, World, run_schedule
from state_machine.standin import StandIn

from pdkv.host.processor import instruction_set

ALL_PAIRS = (*PAIRS, *MULTI_PAIRS)
WINDOWS = StandIn(FULL_AND_WINDOW)
PROGRESS_S = 60.0
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"

HEAD = """\
Each schedule is a random order of everything that can happen to two or three engines over the memory connector, the
stand-in store or `multi`: steps, messages, transfers, losses, holes in the store, aborts, deadlines, killed engines. A
proposer guesses up to three tokens per request and step, seven of ten rightly; the model's thread is stopped at every
point between two orders. Failed: a wrong token or one behind the end, a write into a block of another one, a block that
does not come back, or anything in a cache or the store that no client got, such as the KV of a wrong guess.
"""

COLUMNS = (
    "requests",
    "tokens",
    "steps",
    "right guesses",
    "wrong guesses",
    "preemptions",
    "failed loads",
    "aborts",
    "restarts",
    "retries",
)


class ScheduleReport(msgspec.Struct):
    """What the schedules of one number of steps ahead have seen."""

    lag: int
    seed: int
    num_schedules: int = 0
    seen: dict[str, int] = {}
    failures: list[str] = []
    seconds: float = 0.0  # CPU
    isa: str = ""

    @property
    def num_as_far_ahead(self) -> int:
        """Schedules that planned as many steps ahead as they might."""
        return self.seen.get(_ahead(self.lag), 0)

    @property
    def is_good(self) -> bool:
        """Whether nothing failed, and all was as far ahead as it was meant to be at least once."""
        return not self.failures and self.num_as_far_ahead > 0

    def __str__(self) -> str:
        verdict = f"{len(self.failures)} FAILED" if self.failures else "none failed"
        seen = ", ".join(f"{count} {name}" for name, count in sorted(self.seen.items()))
        return f"lag {self.lag}: {self.num_schedules} schedules, {verdict} ({self.seconds:.0f} s of CPU); {seen}"


def _ahead(lag: int) -> str:
    return f"schedules with {lag} steps ahead"


def run_one(seed: int, lag: int, number: int) -> World:
    """One schedule; the same arguments give the same one. Raises whatever a broken contract raises."""
    rng = random.Random(f"{seed} {lag} {number}")
    pair = ALL_PAIRS[number % len(ALL_PAIRS)]
    forward = WINDOWS if "store" not in pair[0] and rng.random() < 0.2 else STAND_IN
    make_world = partial(World, forward=forward, lag=lag, num_drafts=rng.choice((1, 2, 3, 3)))
    return run_schedule(rng.randbytes(rng.randint(40, 500)), pair, make_world)


def count(world: World) -> Counter[str]:
    """What one schedule was about, as far as engines that lived to its end have seen it."""
    seen = Counter(
        requests=len(world.clients),
        aborts=sum(client.aborted for client in world.clients),
        tokens=sum(len(client.got) for client in world.clients),
        restarts=world.num_restarts,
        retries=sum(client.flow.attempt > 0 for client in world.clients),
    )
    seen[_ahead(world.most_ahead)] += 1
    for engine in world.engines.values():
        load, proposer = engine.core.reports.make_load(), getattr(engine.core.executor, "proposer", None)
        assert isinstance(proposer, RandomProposer)
        seen += Counter(
            {
                "steps": load.steps,
                "preemptions": load.preemptions,
                "failed loads": load.load_failures,
                "right guesses": proposer.num_right,
                "wrong guesses": proposer.num_wrong,
            }
        )
    return seen


def soak(lag: int, numbers: Sequence[int], seed: int) -> ScheduleReport:
    """Run the schedules of these numbers."""
    report = ScheduleReport(lag, seed, isa=instruction_set())
    start, said = time.process_time(), time.monotonic()
    for number in numbers:
        try:
            report.seen = Counter(report.seen) + count(run_one(seed, lag, number))
        except Exception as error:  # any: a wrong token, a broken book, or an engine falling over it
            report.failures.append(f"--seed {seed} --lags {lag} --only {number}: {type(error).__name__}: {error}")
            print(f"FAILED: {report.failures[-1]}", flush=True)
            if len(numbers) == 1:
                traceback.print_exc()
        report.num_schedules += 1
        report.seconds = time.process_time() - start
        if time.monotonic() - said > PROGRESS_S:
            said = time.monotonic()
            print(report, flush=True)
    return report


def save(reports: Sequence[ScheduleReport], folder: Path = RESULTS) -> Path:
    """Merge into today's files: a run replaces an earlier one of its lag and seed. Returns the table."""
    path = folder / f"schedules-{datetime.datetime.now(datetime.UTC).date()}.json"
    document = json.loads(path.read_text()) if path.exists() else {}
    document |= {f"lag {report.lag}, seed {report.seed}": msgspec.to_builtins(report) for report in reports}
    path.write_text(json.dumps(document, indent=1) + "\n")
    table = path.with_suffix(".md")
    table.write_text(_table([msgspec.convert(document[name], ScheduleReport) for name in sorted(document)]))
    return table


def _table(reports: Sequence[ScheduleReport]) -> str:
    lines = [
        f"# Random schedules, {datetime.datetime.now(datetime.UTC).date()}",
        "",
        HEAD,
        f"| steps ahead | seed | schedules | as far ahead | failed | {' | '.join(COLUMNS)} | CPU | ISA |",
        "|---" * (len(COLUMNS) + 7) + "|",
    ]
    for report in reports:
        figures = " | ".join(str(report.seen.get(name, 0)) for name in COLUMNS)
        lines.append(
            f"| {report.lag} | {report.seed} | {report.num_schedules} | {report.num_as_far_ahead} | "
            f"{len(report.failures)} | {figures} | {report.seconds:.0f} s | {report.isa} |"
        )
    return "\n".join([*lines, ""])


def main(args: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m soak.schedules", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--schedules", type=int, default=10_000, help="at each number of steps ahead (%(default)s)")
    parser.add_argument("--lags", default="0,1,2", help="steps ahead (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--only", type=int, help="the number of the one schedule to run, with its traceback")
    parser.add_argument("--save", action="store_true", help="to today's table in benchmarks/results/")
    options = parser.parse_args(args)
    logging.disable(logging.CRITICAL)  # expired leases and failed loads are what this is about: no log line each
    numbers = range(options.schedules) if options.only is None else [options.only]
    reports: list[ScheduleReport] = []
    for lag in map(int, options.lags.split(",")):
        reports.append(soak(lag, numbers, options.seed))
        print(reports[-1], flush=True)
        if options.save:
            save(reports[-1:])
    if options.only is not None:
        return 1 if reports[-1].failures else 0
    return 0 if all(report.is_good for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
