"""A launch that is forked from a warm process is what an interpreter's would be, to whoever looks at it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm
from warm import COMMAND, PYTHON, WarmPopen

from pdkv.testing.deployment import Deployment, launched

PROGRAM = (
    "import os, sys; print(sys.argv, __name__, os.getcwd(), sys.stdin.isatty()); sys.exit(eval(os.environ['CODE']))"
)
SMALL = ("--kv-cache-memory", "8MiB", "--threads", "1")


def ended(popen: type[subprocess.Popen[Any]], *arguments: str, **how: Any) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of what `python -P` runs."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with popen([*PYTHON, *arguments], **pipes, **how) as process:
        said = process.communicate(timeout=120)
    return (process.returncode, *said)


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["-m", "pdkv.cli", "launch", "--config", "own.toml"], {}),
        (["-m", "pdkv.cli", "launch"], {"PDKV_PREFILL": "many"}),
        (["-m", "pdkv.cli", "connector", "show", "memory"], {"COLUMNS": "60"}),
        (["-c", PROGRAM, "a"], {"CODE": "3"}),
        (["own.py", "b"], {"CODE": "'why'"}),
    ],
    ids=str,
)
def test_commands_end_and_say_the_same(
    arguments: list[str], variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.toml").write_text("no-such-option = 1\n")
    (tmp_path / "own.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, **variables}
    forked = ended(WarmPopen, *arguments, env=environment)
    assert forked == ended(subprocess.Popen, *arguments, env=environment)
    assert forked[1] or forked[2]


def test_a_reader_that_is_gone_and_a_signal_end_it_likewise() -> None:
    for popen in (WarmPopen, subprocess.Popen):
        ours, theirs = os.pipe()
        os.close(ours)
        process = popen([*COMMAND, "connector", "show", "memory"], stdout=theirs)
        os.close(theirs)
        assert process.wait(120) == 141


def channels_of(pid: int) -> set[str]:
    """Sockets and pipes that a process has open, standard input and outputs apart."""
    files = Path(f"/proc/{pid}/fd")
    names = {os.readlink(file) for file in files.iterdir() if int(file.name) > 2 and file.is_symlink()}
    return {name for name in names if name.startswith(("socket:", "pipe:"))}


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    monkeypatch.setattr(Deployment, "popen", WarmPopen)
    with launched("--prefill", "1", "--decode", "1", *SMALL) as started:
        yield started


def test_its_processes_are_where_and_whose_they_would_be_and_bear_its_mark(deployment: Deployment) -> None:
    launcher = psutil.Process(deployment.process.pid)
    assert launcher.ppid() == os.getpid()
    assert os.getsid(launcher.pid) == os.getsid(0)
    children = launcher.children()
    assert sorted(child.name() for child in children) == ["pd decode-0", "pd fork-server", "pd prefill-0", "pd router"]
    assert all(os.getpgid(child.pid) == child.pid for child in children)
    assert {os.getsid(child.pid) for child in children} == {os.getsid(0)}, "niceness would not count between them"
    assert {*deployment.pids_left()} == {launcher.pid, *(child.pid for child in launcher.children(recursive=True))}
    held = channels_of(os.getpid()) | channels_of(warm._warm()._process.pid)
    for process in (launcher, *children):
        assert not channels_of(process.pid) & held, process.name()


def test_it_ends_by_a_signal_as_one_would(deployment: Deployment) -> None:
    assert deployment.stop(signal.SIGKILL) == -signal.SIGKILL


def test_what_an_interpreter_reads_when_it_starts_starts_one(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('customized')")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    code, said, _ = ended(WarmPopen, *COMMAND[2:], "--version", env=variables)
    assert (code, said.splitlines()[0]) == (0, "customized")
