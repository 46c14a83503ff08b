"""Runs cells: deployments, their load, one fault after another, and the count of what was lost."""

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import httpx
import msgspec
from deployments import Launch, Running
from prometheus_client.parser import text_string_to_metric_families
from soak.backends import choose, extra_flags
from traffic import engines_are_there, wait_for_rest, wait_until_true

from faults.cells import LIMITED, Build, Cell
from faults.inject import Site, Strike, inject
from faults.load import Load, capacity, load_on, right_answers

LIMIT_S = 1.5
GRACE_S = 2.0
"""From so long after a stop on, no client may miss its limit."""

SMALL_POOL_BYTES = 68 * 12288
"""64 blocks are one request of the longest length; a block of the model is 12 KiB."""

CONNECTOR = Path(__file__).parent / "connector"
COUNTERS = ("retries", "migrations", "moves")


class Outcome(msgspec.Struct, kw_only=True):
    """What became of the requests of one cell."""

    backend: str
    kind: str
    place: str
    rate: float  # requests a second
    stop_s: float  # how long engines were stopped, if any was
    requests: int = 0
    streamed: int = 0
    failed: int = 0
    wrong: int = 0
    hung: int = 0
    there: int = 0  # requests at the place when it happened; of a full pool: that waited, at most
    late: int = 0  # of those with a limit that failed: sent more than 2 s after the stop
    longest_s: float = 0.0
    counters: dict[str, int] = {}  # what the router did about it
    errors: list[str] = []

    @property
    def lost(self) -> int:
        """Failed, wrong or hung. Of requests with a limit two may miss it."""
        lost = self.wrong + self.hung
        return lost + (self.failed if self.kind != LIMITED else self.late + max(0, self.failed - 2))


async def run_cell(site: Site, cell: Cell, expected: Sequence[list[int]], num: int, rate: float) -> Outcome:
    """Send the load: a third of it before the fault, and a third behind."""
    label = f"{cell.backend}-{cell.kind}-{cell.place}".replace(" ", "_").replace(",", "")
    outcome = Outcome(
        backend=cell.backend, kind=cell.kind, place=str(cell.place), rate=round(rate, 1), stop_s=site.stop_s
    )
    strike, struck = Strike(), asyncio.Event()
    async with load_on(site.deployment, label, rate, LIMIT_S if cell.kind == LIMITED else None) as load:
        await load.run(num // 3)
        fault = asyncio.create_task(inject(site, cell, load, strike, struck))
        fault.add_done_callback(lambda _: struck.set())
        await load.run(0, until=struck)
        await load.run(max(num // 3, num - len(load.sent)))
        await load.finish()
        await fault
    count(load, strike, expected, outcome)
    return outcome


def count(load: Load, strike: Strike, expected: Sequence[list[int]], outcome: Outcome) -> None:
    """Compare every answer."""
    outcome.there = strike.num_there
    for sent in load.sent:
        outcome.requests += 1
        outcome.streamed += sent.ask.stream
        outcome.longest_s = round(max(outcome.longest_s, sent.ended - sent.began), 2)
        if sent.answer is None:
            outcome.hung += 1
        elif sent.answer.token_ids is None:
            outcome.failed += 1
            outcome.late += sent.began > strike.at + GRACE_S
            outcome.errors.append(str(sent.answer.error or sent.answer._replace(begun=())))
        else:
            outcome.wrong += sent.answer.token_ids != expected[sent.number]


def is_well(deployment: Running) -> bool:
    """Whether every engine is there, and no store is taken for one that does not answer."""
    with contextlib.suppress(httpx.TransportError):
        return engines_are_there(deployment) and deployment.get("/health").json() == {"status": "ok"}
    return False


def counters_of(deployment: Running) -> dict[str, int]:
    """What the router has done for requests, and loads that failed."""
    counts = dict.fromkeys((*COUNTERS, "failed loads"), 0)
    for family in text_string_to_metric_families(deployment.get("/metrics").text):
        for sample in family.samples:
            name = sample.name.removeprefix("pdkv_").removesuffix("_total")
            name = "failed loads" if name == "engine_kv_load_failures" else name
            if name in counts:
                counts[name] += int(sample.value)
    return counts


@contextlib.contextmanager
def site_of(launch: Launch, directory: Path, backend: str, build: Build, stop_s: float) -> Iterator[Site]:
    """A deployment of 2 prefill and 2 decode engines."""
    with choose(backend, directory) as chosen:
        flags = ["--prefill", "2", "--decode", "2", *chosen.flags, *extra_flags(backend)]
        switch, environment = None, {}
        if build.small:
            flags += [f"--{build.small}-kv-cache-memory", str(SMALL_POOL_BYTES)]
        if build.refusing and chosen.server is None:
            switch = directory / "refuse"
            flags[flags.index("--connector") + 1] = "refusing:Refusing"
            flags += ["--connector-config", f"of={backend.split()[0]}", "--connector-config", f"switch={switch}"]
            environment = {"PYTHONPATH": str(CONNECTOR)}
        running = launch(*flags, environment=environment)
        try:
            yield Site(running, chosen.server, switch, stop_s)
        finally:
            assert running.stop() == 0, running.log


def run_cells(
    launch: Launch,
    cells: Sequence[Cell],
    *,
    num: int,
    rate: float | None,
    stop_s: float,
    done: Callable[[Outcome], None],
) -> list[Outcome]:
    """Run cells of one backend, on one deployment per kind of deployment; `rate` None: half of what it can do."""
    outcomes = []
    for build, group in groupby(cells, key=lambda cell: cell.build):
        with (
            tempfile.TemporaryDirectory(prefix="faults-") as directory,
            site_of(launch, Path(directory), cells[0].backend, build, stop_s) as site,
        ):
            expected = asyncio.run(right_answers(site.deployment))
            asked = rate if rate is not None else asyncio.run(capacity(site.deployment, 120)) / 2
            for cell in group:
                outcome = run_one(site, cell, expected, num, asked)
                done(outcome)
                outcomes.append(outcome)
    return outcomes


def run_one(site: Site, cell: Cell, expected: Sequence[list[int]], num: int, rate: float) -> Outcome:
    """Run a cell on a deployment whose engines are all there, and return when they are again, and at rest."""
    wait_until_true(lambda: is_well(site.deployment), "all engines")
    before = counters_of(site.deployment)
    outcome = asyncio.run(run_cell(site, cell, expected, num, rate))
    after = counters_of(site.deployment)
    outcome.counters = {name: max(0, after[name] - before[name]) for name in after}
    wait_until_true(lambda: is_well(site.deployment), "all engines are back")
    wait_for_rest(site.deployment)
    return outcome
