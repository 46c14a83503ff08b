"""Host processes from the kit's side: fork them through a zygote, send commands, stop, continue and kill them."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from pdkv.base.clock import MONOTONIC
from pdkv.connector_kit.rig import protocol as p
from pdkv.connector_kit.rig.host import STACKS_SIGNAL, Host
from pdkv.connector_kit.rig.zygote import MAX_REQUEST_BYTES
from pdkv.errors import ConfigError, IncompatiblePeers, PdkvError, StartupError
from pdkv.launch.fork_server import ENVIRONMENT

START_TIMEOUT_S = 120.0
STACKS_AFTER_S = 2.0
"""Seconds after which a host that has not answered is asked for its stacks."""

P = ParamSpec("P")
Result = TypeVar("Result")


class HostFailed(PdkvError):
    """A host died or does not answer: the connector crashed it or blocks its step thread."""

    code = "host_failed"


class ConnectorRaised(PdkvError):
    """A connector call raised an error outside of its contract."""

    code = "connector_raised"

    def __init__(self, raised: p.Raised) -> None:
        last = [line.strip() for line in raised.trace.splitlines() if line.strip().startswith("File ")]
        super().__init__(f"{raised.kind}: {raised.message} ({last[-1] if last else 'no trace'})")
        self.trace = raised.trace


class Zygote:
    """Forks hosts. Used as a context manager; at its end no host is left."""

    def __init__(self, directory: Path) -> None:
        """Start it; raises StartupError. `directory` is private to the kit."""
        self._directory = directory
        self._num_hosts = 0
        self._control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "pdkv.connector_kit.rig.zygote", str(remote.fileno())]
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": ":".join(filter(None, sys.path)),
        }
        self._process = subprocess.Popen(command, pass_fds=[remote.fileno()], env=environment, process_group=0)
        remote.close()
        self._control.settimeout(START_TIMEOUT_S)
        if self._receive() != b"ready":
            raise StartupError("the process that forks hosts has died")

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def __enter__(self) -> "Zygote":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fork(self) -> "HostProcess":
        """Fork a new host."""
        self._num_hosts += 1
        stacks = self._directory / f"stacks-{self._num_hosts}"
        local, remote = socket.socketpair()
        socket.send_fds(self._control, [str(stacks).encode()], [remote.fileno()])
        remote.close()
        pid = int(self._receive())
        return HostProcess(pid, Connection(local.detach()), stacks)

    def close(self) -> None:
        """End it and all its hosts. Idempotent."""
        self._control.close()
        try:
            self._process.wait(START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self) -> bytes:
        try:
            return self._control.recv(MAX_REQUEST_BYTES)
        except TimeoutError as error:
            raise StartupError("the process that forks hosts does not answer") from error


class HostProcess:
    """One host. Stopped by SIGSTOP, it does not answer; dead, it answers HostFailed."""

    def __init__(self, pid: int, connection: Connection, stacks: Path) -> None:
        self.pid = pid
        self.connection = connection
        self.stopped = False
        self.dead = False
        self._stacks = stacks
        self._pidfd = os.pidfd_open(pid)
        self._woken: set[str] = set()

    def ask(
        self, engine: str, method: Callable[Concatenate[Any, P], Result], timeout_s: float,
        *args: P.args, **kwargs: P.kwargs,
    ) -> Result:  # fmt: skip
        """Call a method of an engine's rank or, if `engine` is empty, of `Host`, and wait for its answer.

        Raises:
            HostFailed: no answer in time, or the host died.
            IncompatiblePeers, ConfigError: the connector raised it.
            ConnectorRaised: it raised anything else.
        """
        self.send(engine, method, *args, **kwargs)
        return self.receive(method, timeout_s)

    def send(
        self, engine: str, method: Callable[Concatenate[Any, P], object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Send a call; `receive` must follow."""
        assert not self.stopped, f"host {self.pid} is stopped"
        try:
            self.connection.send_bytes(p.encode_call(engine, method, *args, **kwargs))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise HostFailed(f"host process {self.pid} is dead") from error

    def receive(self, method: Callable[..., Result], timeout_s: float) -> Result:
        """The answer to the last call, which was of this method."""
        deadline = MONOTONIC.now() + timeout_s
        stacks_due = min(STACKS_AFTER_S, timeout_s / 2)
        stacks = ""
        while True:
            if not self.connection.poll(min(stacks_due, max(deadline - MONOTONIC.now(), 0.0))):
                stacks = stacks or self._take_stacks()
                stacks_due = timeout_s
                if MONOTONIC.now() >= deadline:
                    raise HostFailed(f"no answer within {timeout_s:g} s; its step thread: {_step_stack(stacks)}")
                continue
            answer = self._read()
            if isinstance(answer, p.Woken):
                self._woken.add(answer.engine)
                continue
            if isinstance(answer, p.Raised):
                raise _as_error(answer)
            return p.decode_result(method, answer)

    def take_woken(self, engine: str) -> bool:
        """Whether the engine's connector has called notify since the last time."""
        while not self.stopped and not self.dead and self.connection.poll():
            answer = self._read()
            assert isinstance(answer, p.Woken), answer
            self._woken.add(answer.engine)
        woken = engine in self._woken
        self._woken.discard(engine)
        return woken

    def stop(self) -> None:
        """SIGSTOP; returns when it has stopped."""
        self.stopped = True
        os.kill(self.pid, signal.SIGSTOP)
        state = Path(f"/proc/{self.pid}/stat")
        deadline = MONOTONIC.now() + STACKS_AFTER_S
        while state.read_text().rpartition(")")[2].split()[0] != "T" and MONOTONIC.now() < deadline:
            select.select([], [], [], 0.001)

    def resume(self) -> None:
        """SIGCONT."""
        if self.stopped and not self.dead:
            os.kill(self.pid, signal.SIGCONT)
        self.stopped = False

    def kill(self) -> None:
        """SIGKILL; returns when it is gone. Idempotent."""
        if self.dead:
            return
        self.dead = True
        self.stopped = False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._wait(START_TIMEOUT_S)
        self._forget()

    def exit(self, timeout_s: float) -> None:
        """Ask it to end and wait.

        Raises:
            HostFailed: it does not end in time, held by something that the connector left behind.
        """
        self.ask("", Host.exit, timeout_s)
        if not self._wait(timeout_s):
            stacks = self._take_stacks()
            self.kill()
            raise HostFailed(f"host process does not end within {timeout_s:g} s: {_step_stack(stacks)}")
        self.dead = True
        self._forget()

    def _forget(self) -> None:
        os.close(self._pidfd)
        self.connection.close()

    def _wait(self, timeout_s: float) -> bool:
        return bool(select.select([self._pidfd], [], [], timeout_s)[0])

    def _read(self) -> p.AnyAnswer:
        try:
            answer: p.AnyAnswer = p.decode_answer(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError) as error:
            raise HostFailed(f"host process {self.pid} has died") from error
        return answer

    def _take_stacks(self) -> str:
        """The stacks of all threads, as faulthandler writes them."""
        size = self._stacks.stat().st_size if self._stacks.exists() else 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, STACKS_SIGNAL)
        select.select([self._pidfd], [], [], 0.2)
        return self._stacks.read_text()[size:] if self._stacks.exists() else ""


def wait_for_any(hosts: Sequence[HostProcess], timeout_s: float) -> None:
    """Wait until one of them has something to say, or for `timeout_s`."""
    connections = {host.connection for host in hosts if not (host.stopped or host.dead)}
    if connections:
        wait(list(connections), timeout_s)


def _step_stack(stacks: str) -> str:
    """The innermost frames of the main thread, which faulthandler writes last."""
    frames = [line.strip() for line in stacks.rpartition("Current thread")[2].splitlines()[1:] if line.strip()]
    return " < ".join(frames[:4]) or "no stack"


def _as_error(raised: p.Raised) -> PdkvError:
    if raised.incompatible:
        return IncompatiblePeers(raised.message)
    if raised.config:
        return ConfigError(raised.message)
    return ConnectorRaised(raised)
