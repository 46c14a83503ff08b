"""Chaos under load on each backend: right tokens or clear errors, no hang, no leak. Exit code 1 on any violation.

Reports go to benchmarks/results/soak-DATE.{md,json} and logs to .bench/soak/, with --out both to its folder. The same
seed draws the same requests and the same events at the same times.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest
from deployments import Running, launches
from matrix_rows import Chosen
from oracle import Expected
from prompt_set import forty_prompts
from serving_checks import read_books, serve_directory
from small_models import make_hf_model
from traffic import client_of

from soak import hostile_frames, strangers
from soak.accounts import accounts
from soak.backends import (
    BACKENDS,
    HAVE_CONNECTIONS,
    HAVE_FILES,
    REQUEST_TIMEOUT_S,
    STORE_MIB,
    choose,
    extra_flags,
    select,
)
from soak.checks import (
    Held,
    check_let_go,
    check_log,
    check_not_negative,
    loop_stalls,
    measure,
    router_memory,
    wait_for_calm,
)
from soak.journal import Journal
from soak.load import Load
from soak.operations import Operator
from soak.private_mounts import SHM, enter, mount_tmpfs, unmount
from soak.report import RESULTS, Report, save
from soak.router_memory import Sample, judge_memory
from soak.schedule import Site, draw
from soak.world import World

LOGS = Path(__file__).parents[3] / ".bench" / "soak"
ROUND_S = 60.0
GAP_S = 2.0
LOOK_EVERY_S = 1.0
NUM_EACH = 2
CLIENTS = 6
NUM_OUTPUT = 32
SHM_BYTES = 256 << 20


class Plan(NamedTuple):
    """One deployment's run."""

    backend: str
    ranks: tuple[int, int]
    seconds: float
    seed: int
    private: bool
    logs: Path
    spared: tuple[str, ...] = ()

    @property
    def log(self) -> Path:
        """Where its log goes."""
        prefill, decode = self.ranks
        spared = "".join(f"-no-{what}" for what in self.spared)
        return self.logs / f"{self.backend.replace(' ', '_')}-tp{prefill}-{decode}-seed{self.seed}{spared}.log"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    options = _parse(arguments)
    if options.frames:
        return hostile_frames.main(options.frames, options.seed)
    if options.strangers:
        return strangers.main()
    command = [sys.executable, "-m", "soak", *(sys.argv[1:] if arguments is None else arguments)]
    private = enter(command)
    if private:
        mount_tmpfs(SHM, SHM_BYTES)
    signal.signal(signal.SIGTERM, _stop)  # so that deployments are ended
    reports = []
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        work = Path(folder)
        expected = _expected(work)
        for backend, (ranks, share) in itertools.product(options.backends, options.tp):
            plan = Plan(
                backend, ranks, options.seconds * share, options.seed, private, options.out or LOGS, options.spare
            )
            report = run(plan, work / "served", expected)
            reports.append(report)
            save([report], options.out or RESULTS)
            print(_summary(report, plan.log), flush=True)
    return 1 if any(report.violations for report in reports) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="of chaos per backend")
    parser.add_argument("--seconds", type=float, help="the same in seconds")
    parser.add_argument("--backends", nargs="*", default=[], metavar="NAME", help=f"of {', '.join(BACKENDS)}")
    parser.add_argument("--tp", type=_ranks, help="ranks of prefill and of decode engines, such as 1,2 (default: both)")
    parser.add_argument(
        "--spare", nargs="*", default=[], metavar="WHAT",
        help="nothing happens to these, such as router: its memory is judged over the whole run",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=0, help="no chaos: so many hostile frames per connector")
    parser.add_argument("--strangers", action="store_true", help="no chaos: strangers at every door, per connector")
    parser.add_argument("--out", type=Path, help="folder of report and logs")
    options = parser.parse_args(arguments)
    try:
        options.backends = select(options.backends)
    except ValueError as error:
        parser.error(str(error))
    options.spare = tuple(options.spare)
    options.seconds = options.minutes * 60 if options.seconds is None else options.seconds
    options.tp = [(options.tp, 1.0)] if options.tp is not None else [((1, 1), 2 / 3), ((1, 2), 1 / 3)]
    return options


def _ranks(text: str) -> tuple[int, int]:
    prefill, decode = map(int, text.split(","))
    return prefill, decode


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _expected(work: Path) -> list[Expected]:
    """A model in `work`/served, and what transformers says to the forty prompts."""
    model = make_hf_model(work / "model", "llama", "float32", initializer_range=0.2)
    return forty_prompts(serve_directory(model, work), NUM_OUTPUT)


def run(plan: Plan, model: Path, expected: Sequence[Expected]) -> Report:
    """Launch, soak, stop; what goes wrong is in the report."""
    ranks, seed = plan.ranks, plan.seed
    report = Report(
        backend=plan.backend,
        ranks=ranks,
        seed=seed,
        seconds=plan.seconds,
        private_mounts=plan.private,
        spared=plan.spared,
    )
    journal = Journal()
    count = str(NUM_EACH)
    flags = ["--prefill", count, "--decode", count, "--prefill-tp", str(ranks[0]), "--decode-tp", str(ranks[1])]
    flags += ["--local-turns", "auto"]
    deployment: Running | None = None
    try:
        with _disk(plan) as disk, choose(plan.backend, disk) as chosen, launches(model) as launch:
            deployment = launch(*flags, *chosen.flags, *extra_flags(plan.backend))
            asyncio.run(_soak(plan, deployment, chosen, disk, expected, journal, report))
    except pytest.skip.Exception as skip:
        report.skipped = str(skip)
    except AssertionError as error:  # of the launch, or of what it has left behind
        journal.violation(f"at the end: {error}")
    report.events, report.outcomes, report.patient = map(dict, (journal.events, journal.outcomes, journal.patient))
    report.worst_s, report.violations = round(journal.worst_s, 2), journal.violations
    if deployment is not None:
        plan.logs.mkdir(parents=True, exist_ok=True)
        plan.log.write_text(journal.text(deployment))
    return report


@contextlib.contextmanager
def _disk(plan: Plan) -> Iterator[Path]:
    """A directory for stores, small where that is possible."""
    path = Path(tempfile.mkdtemp(prefix="soak-disk-"))
    if plan.private:
        mount_tmpfs(path, 2 * STORE_MIB << 20)
    try:
        yield path
    finally:
        if plan.private:
            unmount(path)
        shutil.rmtree(path)


async def _soak(
    plan: Plan,
    deployment: Running,
    chosen: Chosen,
    disk: Path,
    expected: Sequence[Expected],
    journal: Journal,
    report: Report,
) -> None:
    """Warm up, then rounds of chaos, each with a calm behind it."""
    engines = list(deployment.pids())
    others = [f"{name}.{rank}" for name in engines for rank in range(1, plan.ranks[name.startswith("decode")])]
    has_files = plan.backend in HAVE_FILES
    has_links = plan.backend in HAVE_CONNECTIONS and not others  # else an engine's ranks would be cut from each other
    site = Site(engines, others, chosen.server is not None, has_files, has_links, plan.spared)
    async with client_of(deployment) as client:
        client.headers["x-pd-timeout-s"] = str(REQUEST_TIMEOUT_S)
        load = Load(client, expected, journal, plan.seed)
        world = World(
            deployment, site, chosen.server, disk if has_files else None, plan.private, load, journal, str(plan.seed),
            Operator(deployment, NUM_EACH, journal),
        )  # fmt: skip
        await load.verify(CLIENTS)
        await world.operator.restore()  # from now on there is a file with what operators said
        await wait_for_calm(world)
        baseline = measure(world)
        rng = random.Random(plan.seed)
        rests: list[Sample] = []
        left = plan.seconds
        while left > 0:
            seconds = left if left < 1.5 * ROUND_S else ROUND_S
            await _round(world, rng, seconds)
            left -= seconds
            await load.verify(CLIENTS)
            await wait_for_calm(world)
            held = await check_let_go(world, baseline)
            _keep(report, baseline, held)
            rests += [sample] if (sample := router_memory(world)) is not None else []
        report.zero_accounts = sum(not account.value for account in accounts(deployment.get("/metrics").text))
        _judge_memory(report, rests, journal)
        check_log(world)
        report.loop_stalls = loop_stalls(deployment.lines)
        report.remote_tokens = sum(read_books(deployment).sources("decode")[source] for source in ("remote", "store"))


def _judge_memory(report: Report, rests: list[Sample], journal: Journal) -> None:
    report.router_resident = [(round(sample.at_s, 1), sample.pid, sample.resident) for sample in rests]
    verdict = judge_memory(rests)
    if verdict is not None:
        report.router_memory = str(verdict)
        if not verdict.is_flat:
            journal.violation(f"the router's memory grows: {verdict}")


async def _look(world: World) -> None:
    """At what must hold at any moment."""
    while True:
        await asyncio.to_thread(check_not_negative, world)
        await asyncio.sleep(LOOK_EVERY_S)


async def _round(world: World, rng: random.Random, seconds: float) -> None:
    """Load, and events at their times; returns at rest."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.TaskGroup() as clients:
        for number in range(CLIENTS):
            clients.create_task(world.load.work(number, stop))
        look = clients.create_task(_look(world))
        async with asyncio.TaskGroup() as happening:
            for event in draw(rng, world.site, seconds, min(GAP_S, seconds / 12)):
                await asyncio.sleep(began + event.at_s - loop.time())
                happening.create_task(world.happen(event))
            await asyncio.sleep(began + seconds - loop.time())
        stop.set()
        look.cancel()
    await world.operator.restore()
    world.journal.note("the round is over")
    await wait_for_calm(world)
    world.journal.note("it is calm")


def _keep(report: Report, before: Held, now: Held) -> None:
    report.strangers = now.strangers
    report.descriptors = {
        name: (before.descriptors.get(name, 0), count) for name, count in sorted(now.descriptors.items())
    }
    report.resident_mib = {
        name: (before.resident.get(name, 0) >> 20, size >> 20) for name, size in sorted(now.resident.items())
    }


def _summary(report: Report, log: Path) -> str:
    if report.skipped:
        return f"{report.name}: skipped, {report.skipped}"
    verdict = f"{len(report.violations)} VIOLATIONS (log: {log})" if report.violations else "no violation"
    lines = [
        f"{report.name}: {report.seconds:.0f} s, {sum(report.events.values())} events, "
        f"{sum(report.outcomes.values())} requests, {report.outcomes.get('right', 0)} right, {verdict}"
    ]
    return "\n".join([*lines, *(f"  {text[:2000]}" for text in report.violations)])
