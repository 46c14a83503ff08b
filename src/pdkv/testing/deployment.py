"""Real deployments: `pd launch` in a separate process, and the check that it leaves nothing behind."""

import contextlib
import os
import queue
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from pdkv.base.clock import MONOTONIC

START_BOUND_S = 180.0
STOP_BOUND_S = 10.0  # twice the promised time: the machine may be busy
MARK = "LAUNCH_TEST_ID"


class Deployment:
    """A `pd launch` process, or a `pd engine`. Lines of its stderr can be waited for.

    `popen` starts it: for many launches it may be replaced by a class that keeps interpreters with finished imports
    ready (`tests/support/warm.py`).
    """

    popen: ClassVar[type[subprocess.Popen[str]]] = subprocess.Popen

    def __init__(
        self,
        arguments: list[str],
        environment: dict[str, str],
        directory: Path,
        *,
        command: str = "launch",
        enter: Callable[..., list[str]] = lambda *arguments: [*arguments],
    ) -> None:
        """Start it; `wait_ready` waits for it.

        Args:
            arguments: of the command.
            environment: in addition to this process's.
            directory: its TMPDIR, which must not contain its files at the end.
            enter: turns a command line into one that runs elsewhere.
        """
        self.directory = directory  # its TMPDIR
        self.mark = uuid.uuid4().hex
        self.lines: list[str] = []
        self.stopped = False
        self.elsewhere: list[Deployment] = []  # engines that were started separately
        self.listen: tuple[str, int] | None = None  # the address of such an engine
        self._new_lines: queue.Queue[str | None] = queue.Queue()
        self._shared_files = shared_memory_files()
        self.process = self.popen(
            enter(sys.executable, "-P", "-m", "pdkv.cli", command, *arguments),
            env={**os.environ, "TMPDIR": str(directory), MARK: self.mark, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read_stderr)
        self._reader.start()

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            self._new_lines.put(line.rstrip("\n"))
        self._new_lines.put(None)

    @property
    def log(self) -> str:
        """The process's stderr so far."""
        return "\n".join(self.lines)

    def wait_for_line(self, pattern: str, timeout_s: float = START_BOUND_S) -> re.Match[str]:
        """The next line of stderr, after those already waited for, that matches the pattern."""
        while (line := self._new_lines.get(timeout=timeout_s)) is not None:
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"no line with {pattern!r} before the end of:\n{self.log}")

    def wait_ready(self) -> str:
        """Wait for the ready line; its URL becomes `url`."""
        assert self.process.stdout is not None
        watchdog = threading.Timer(START_BOUND_S, self.process.kill)
        watchdog.start()
        line = self.process.stdout.readline().rstrip("\n")
        watchdog.cancel()
        assert line.startswith("ready: "), f"{line!r} instead of a ready line:\n{self.log}"
        self.url = line.split()[1]
        return line

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait, and check that nothing is left but what a kill -9 may leave. Returns the exit code."""
        self.process.send_signal(number)
        return self.finish(killed=number == signal.SIGKILL, bound_s=STOP_BOUND_S)

    def finish(self, *, killed: bool = False, bound_s: float = START_BOUND_S) -> int:
        """Wait for the end and check that nothing is left. A failing start may take as long as a successful one."""
        self.stopped = True
        try:
            code = self.process.wait(timeout=bound_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"still running after {bound_s} s:\n{self.log}") from None
        rest = self.pids_left()
        if killed or "a child process did not end within" in self.log:  # they notice by themselves that they are alone
            bound = MONOTONIC.now() + STOP_BOUND_S
            for process in rest:
                _wait_for_end(process, bound)
            rest = self.pids_left()
        names = [f"{process} {_read(process, 'comm').decode().strip()}" for process in rest]
        self.discard()
        assert not names, f"left behind: {names}\n{self.log}"
        if not killed:
            left = [path.name for path in self.directory.iterdir() if not _is_of_running_launch(path)]
            assert not left, f"left behind: {left}\n{self.log}"
        assert not shared_memory_files() - self._shared_files, "left behind in /dev/shm"
        return code

    def pids_left(self) -> list[int]:
        """Ids of processes that descend from this launch: they carry its mark in their environment."""
        mark = f"{MARK}={self.mark}\0".encode()
        return [int(name) for name in os.listdir("/proc") if name.isdecimal() and mark in _read(int(name), "environ")]

    def discard(self) -> None:
        """End what a failed test left, and close the pipes, which would cause warnings in another test. Idempotent."""
        self.kill_all()
        self.process.wait(timeout=STOP_BOUND_S)
        self._reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def kill_all(self) -> None:
        """Kill every process of the launch."""
        for pid in self.pids_left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def launched(*flags: str, environment: Mapping[str, str] | None = None) -> Iterator[Deployment]:
    """`pd launch` on a free port, stopped at the end, with its own TMPDIR.

    Raises:
        AssertionError: it does not start, does not end well, or leaves a process, a file or shared memory behind.
    """
    directory = Path(tempfile.mkdtemp(prefix="pd-"))  # short: unix sockets are below it
    deployment = Deployment(["--port", "0", *flags], dict(environment or {}), directory)
    try:
        deployment.wait_ready()
        yield deployment
        if not deployment.stopped:
            assert deployment.stop() == 0, deployment.log
    finally:
        deployment.discard()
        shutil.rmtree(directory, ignore_errors=True)


def complete_all(url: str, prompts: Sequence[str], *, num_at_once: int = 8, **fields: Any) -> list[str]:
    """Greedy completions of many prompts by OpenAI's client, `at_once` at a time; `fields` belong to the requests.

    Raises:
        openai.OpenAIError: one of them was not answered.
    """
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key="none") as client, ThreadPoolExecutor(num_at_once) as pool:
        model = client.models.list().data[0].id

        def complete(prompt: str) -> str:
            text: str = client.completions.create(model=model, prompt=prompt, temperature=0, **fields).choices[0].text
            return text

        return list(pool.map(complete, prompts))


def shared_memory_files() -> set[str]:
    """Named files of this project in shared memory, from any process."""
    return {name for name in os.listdir("/dev/shm") if "pdkv" in name}


def _is_of_running_launch(path: Path) -> bool:
    """Whether it is the run directory of another running deployment."""
    match = re.match(r"pdkv-(\d+)-", path.name)
    return match is not None and Path("/proc", match[1]).exists()


def _read(pid: int, name: str) -> bytes:
    """A file of a process in /proc; nothing if it has ended or is another user's."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def _wait_for_end(pid: int, until: float) -> None:
    """Wait until a process, which may be no child of this one, has ended."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        select.select([descriptor], [], [], max(until - MONOTONIC.now(), 0.0))
        os.close(descriptor)
