"""Run the suite several times on a busy host, and list every test that failed once.

    python -m steady --runs 3 --load 6
    python -m steady --runs 1 --stops --out FOLDER -- tests/e2e

Beside the suite, `--load` processes use a processor each; with `--stops` a process of one of its deployments stands
still for a second every now and then. A run whose report is in `--out` is not repeated, so a call that was interrupted
goes on with the run that it was in; after a change, or for other tests, give another folder. What follows `--` goes to
pytest.
"""

import argparse
import contextlib
import random
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import psutil

ROOT = Path(__file__).parents[3]
SUITE = ("-n", "3", "--dist", "loadscope", "--no-loadscope-reorder", "-m", "not gpu and not slow", "-v")
STOP_S = 1.0
_PAUSES_S = (0.5, 5.0)
"""Between two stops, drawn evenly."""

_RUN_BOUND_S = 6 * 3600.0
_END_BOUND_S = 10.0
_NAME = "pd "
"""How the names of a deployment's processes begin."""


@contextlib.contextmanager
def hogs(number: int) -> Iterator[None]:
    """So many processes that compute all the time, of this process's session: the scheduler gives sessions equal
    shares.
    """
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


class Stops:
    """Stops processes of deployments below one process, one at a time."""

    def __init__(self, pid: int, seed: int) -> None:
        self.num_stops = 0
        self._top = psutil.Process(pid)
        self._rng = random.Random(seed)
        self._end = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While the block runs."""
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._rng.uniform(*_PAUSES_S)):
            with contextlib.suppress(psutil.NoSuchProcess):
                processes = [p for p in self._top.children(recursive=True) if _can_stop(p)]
                if processes:
                    self._stop(self._rng.choice(processes))

    def _stop(self, process: psutil.Process) -> None:
        process.send_signal(signal.SIGSTOP)
        try:
            self.num_stops += 1
            self._end.wait(STOP_S)
        finally:
            process.send_signal(signal.SIGCONT)


def _can_stop(process: psutil.Process) -> bool:
    """Whether it is of a deployment, and no test has stopped it: it would go on with this stop's end."""
    return process.name().startswith(_NAME) and process.status() != psutil.STATUS_STOPPED


def run_suite(report: Path, seed: int, load: int, stops: bool, arguments: Sequence[str]) -> None:
    """One run, whose report is there if it came to its end."""
    unfinished = report.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *SUITE, f"--junitxml={unfinished}", *arguments]
    with (
        report.with_suffix(".log").open("w") as log,
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT) as suite,
        hogs(load),
        Stops(suite.pid, seed).running() if stops else contextlib.nullcontext(),
    ):
        try:
            status = suite.wait(_RUN_BOUND_S)
        finally:
            if suite.poll() is None:
                suite.send_signal(signal.SIGINT)  # it ends its deployments
                with contextlib.suppress(subprocess.TimeoutExpired):
                    suite.wait(_END_BOUND_S)
                suite.kill()
    if status not in (0, 1) or not unfinished.exists():
        raise SystemExit(f"the suite ended with status {status}: {report.with_suffix('.log')} says why")
    unfinished.rename(report)


def failures(report: Path) -> tuple[int, list[str]]:
    """Tests of a report, and the names of those that failed or whose set-up or end did."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return len(cases), [f"{case.get('classname')}::{case.get('name')}" for case in bad]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser("steady", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of the suite")
    parser.add_argument("--load", type=int, default=0, help="processes that compute beside it")
    parser.add_argument("--stops", action="store_true", help="stop processes of its deployments for a second")
    parser.add_argument("--seed", type=int, default=0, help="of which are stopped, and when")
    parser.add_argument("--out", type=Path, default=ROOT / ".bench" / "steady", help="folder of the reports")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    failed, num_tests = defaultdict(list), 0
    for number in range(options.runs):
        report = (options.out / f"load{options.load}-stops{int(options.stops)}-{options.seed + number}.xml").absolute()
        if not report.exists():
            run_suite(report, options.seed + number, options.load, options.stops, options.pytest)
        num_tests, names = failures(report)
        print(f"run {number}: {len(names)} of {num_tests} tests failed", flush=True)
        for name in names:
            failed[name].append(number)
    for name, runs in sorted(failed.items(), key=lambda item: -len(item[1])):
        print(f"{len(runs)} of {options.runs} runs: {name}")
    return 1 if failed or not num_tests else 0


if __name__ == "__main__":
    sys.exit(main())
