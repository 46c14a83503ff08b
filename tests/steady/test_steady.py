"""`make steady`: what failed once is listed, whole runs are not repeated, and deployments' processes are stopped."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from steady.__main__ import ROOT, Stops, failures, hogs, main

SUITE = """
import os, pathlib
def test_once():
    runs = pathlib.Path(__file__).with_name("runs")
    number = len(runs.read_text()) if runs.exists() else 0
    runs.write_text("x" * (number + 1))
    assert number != 1
def test_always():
    pass
"""


@pytest.fixture(autouse=True)
def _few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of pytest within these tests imports what it needs."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run(folder: Path, *options: str) -> int:
    suite = folder / "test_it.py"
    if not suite.exists():
        suite.write_text(SUITE)
    return main(
        ["--out", str(folder / "out"), *options, "--", "-pxdist.plugin", "-n0", "--rootdir", str(folder), str(suite)]
    )


def test_every_test_that_failed_once_is_listed_and_a_whole_run_is_not_repeated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--runs", "1") == 0
    assert run(tmp_path, "--runs", "3") == 1  # the second of them fails
    assert (tmp_path / "runs").read_text() == "xxx"
    said = capfd.readouterr().out
    assert "run 1: 1 of 2 tests failed" in said
    assert "1 of 3 runs: " in said
    assert "::test_once" in said
    assert "test_always" not in said


def test_a_run_that_did_not_end_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import os\ndef test_ends_everything():\n    os._exit(7)\n")
    with pytest.raises(SystemExit, match="ended with status 7"):
        run(tmp_path, "--runs", "1")
    assert not list((tmp_path / "out").glob("*.xml"))


def test_a_suite_without_tests_has_not_passed(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("")
    with pytest.raises(SystemExit, match="ended with status 5"):
        run(tmp_path, "--runs", "1")


def test_errors_of_fixtures_count(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<r><testcase classname="a" name="b"><error/></testcase><testcase classname="a" name="c"/></r>')
    assert failures(report) == (2, ["a::b"])


def test_processes_of_deployments_are_stopped_and_go_on() -> None:
    """The one below this process that has such a name: it counts, and stands still now and then."""
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'pd engine'); print('named', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "named\n"
        stops = Stops(psutil.Process().pid, seed=0)
        seen = set()
        with stops.running():
            deadline = time.monotonic() + 60.0
            while not (stops.num_stops and psutil.STATUS_STOPPED in seen) and time.monotonic() < deadline:
                seen.add(psutil.Process(process.pid).status())
                time.sleep(0.01)
        assert psutil.STATUS_STOPPED in seen
        assert stops.num_stops >= 1
        process.communicate("\n", timeout=60.0)  # which a stopped one would not answer
        assert process.returncode == 0


def test_hogs_end_with_the_block() -> None:
    before = set(psutil.Process().children())
    with hogs(2):
        assert len(set(psutil.Process().children()) - before) == 2
    assert not set(psutil.Process().children()) - before
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
    assert (ROOT / "Makefile").exists()
