"""The launcher's view of its child processes, and the only module that spawns. Nothing here imports torch."""

import asyncio
import contextlib
import glob
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from pdkv.errors import ConfigError, DiedEarly, MalformedMessage, OtherRankGone, StartupError
from pdkv.host.memory_limits import num_oom_kills
from pdkv.host.process_info import process_name
from pdkv.launch.fork_server import ENVIRONMENT
from pdkv.launch.specs import KNOWN, Ack, EngineSpec, Identified, Progress, Started, StartFailed, decode_ack, encode
from pdkv.models.rank_sockets import connect_ranks
from pdkv.router.spec import RouterSpec

_MAX_ACK_BYTES = 64 * 1024

FORK_S = 5.0
"""Seconds for a fork once the fork server has imported everything; it takes some 20 ms."""

_Popen = subprocess.Popen[bytes]


class Child:
    """A running process that was started for this one, which learns of its death as an event of the loop."""

    endpoint = ""
    """Where an engine listens, if that was only found when it started."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self._died: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        """Whether it has not been seen to die."""
        return not self._died.done()

    def when_dead(self, call: Callable[[object], None]) -> None:
        """Have `call` called when the child's death is noticed."""
        self._died.add_done_callback(call)

    async def wait(self) -> int:
        """Wait for its exit status; -N if signal N killed it."""
        return await asyncio.shield(self._died)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal if it is still running."""
        raise NotImplementedError


class LocalChild(Child):
    """A child of this process. Its death is noticed through its pidfd."""

    known: ClassVar[set[int]] = set()  # pids of all unreaped children

    def __init__(self, name: str, pid: int, popen: subprocess.Popen[bytes] | None = None) -> None:
        """`pid` is an unreaped child of this process, so it cannot have been reused."""
        super().__init__(name, pid)
        self._popen = popen
        self._pidfd = os.pidfd_open(pid)
        self.known.add(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    def _reap(self) -> None:
        result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        assert result is not None  # without WNOHANG it waits
        status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.known.discard(self.pid)
        if self._popen is not None:
            # otherwise Popen would wait for a pid that may belong to another process by then
            self._popen.returncode = status
        self._died.set_result(status)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal if it is still running."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):  # dead, but the loop has not noticed yet
                signal.pidfd_send_signal(self._pidfd, number)


class _Strays:
    """Orphaned children: the requester of their fork is gone, or their fork server before it reported their pid, or an
    engine that had started them, such as a store's client.

    They end by themselves (`Acknowledger.wait_known`), and would remain zombies as long as this process lives.
    """

    def __init__(self) -> None:
        self._num_forks = 0  # forks in progress: their children are not known yet, but are not strays
        self._wanted = False

    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        """A context in which a child's pid is awaited."""
        self._num_forks += 1
        try:
            yield
        finally:
            self._num_forks -= 1
            if self._wanted:
                self.adopt()

    def adopt(self, _: object = None) -> None:
        """Reap the current strays when they end, and their own children: a fork server forks twice."""
        self._wanted = self._num_forks > 0
        if self._wanted:
            return
        for pid in _forked_children() - LocalChild.known:
            LocalChild("a stray", pid).when_dead(self.adopt)


_strays = _Strays()


def _forked_children() -> set[int]:
    """Children of this process with names of ours; others may belong to another user of `subprocess`."""
    found: set[int] = set()
    for path in glob.glob("/proc/self/task/*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found.update(map(int, Path(path).read_text().split()))
    return {pid for pid in found if process_name(pid).startswith(("pd ", "pdkv-"))}


def _engine_child(name: str, pid: int, popen: _Popen | None = None) -> Child:
    """A rank of an engine. Its own children become this process's when it dies."""
    child = LocalChild(name, pid, popen)
    child.when_dead(_strays.adopt)
    return child


def describe_exit(status: int, *, out_of_memory: bool = False) -> str:
    """An exit status in words, such as "killed by SIGKILL"; `out_of_memory`: the kernel killed it for lack of
    memory.
    """
    if status >= 0:
        return f"exited with {status}"
    if out_of_memory:
        return "was killed by the kernel because memory ran out; run fewer engines or lower --kv-cache-memory"
    if status == -signal.SIGBUS:  # no exception: the kernel has no other way to say it
        return "killed by SIGBUS: a file that it read in place, such as the weights, became shorter or is damaged"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


class OomWatch:
    """Recognizes kills for lack of memory: the kernel counts its kills, and each explains one death."""

    def __init__(self, count: Callable[[], int | None] = num_oom_kills) -> None:
        self._count = count
        self._num_explained = count() or 0

    def explains(self, status: int) -> bool:
        """Whether a child that ended with this status was, in all likelihood, the kernel's victim."""
        if status != -signal.SIGKILL or (self._count() or 0) <= self._num_explained:
            return False
        self._num_explained += 1
        return True


class RankLinks:
    """The sockets between the ranks of an engine: one for rank 0's orders, then one per pair for data. Their end shows
    that a rank is gone.
    """

    def __init__(self, num_ranks: int) -> None:
        pairs = [socket.socketpair() for _ in range(num_ranks - 1)]
        orders = [[first for first, _ in pairs], *([other] for _, other in pairs)]
        self._sockets = [own + peers for own, peers in zip(orders, connect_ranks(num_ranks), strict=True)]

    def fds(self, rank: int) -> list[int]:
        """The descriptors that the process of that rank inherits."""
        return [sock.fileno() for sock in self._sockets[rank]]

    def handed_over(self, rank: int) -> None:
        """Close the copies that the rank's process has inherited. Idempotent."""
        for sock in self._sockets[rank]:
            sock.close()

    def close(self) -> None:
        """Idempotent."""
        for rank in range(len(self._sockets)):
            self.handed_over(rank)


def _nothing(*_: object) -> None:
    """The default notification, which does nothing."""


class AckSocket:
    """The socket on which a starting child reports, and is told that it is known."""

    def __init__(self) -> None:
        self._buffer = b""
        self._open()

    def _open(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)

    def start_over(self) -> None:
        """Give an attempt up, so that a child that the launcher does not know ends (`Acknowledger.wait_known`), and
        begin another attempt.
        """
        self.close()
        self._open()

    @property
    def child_fd(self) -> int:
        """The descriptor that the child inherits."""
        return self._theirs.fileno()

    def handed_over(self) -> None:
        """Let the child, which is now known and has its own copy, continue; from now on its death shows as an end of
        file.
        """
        self._theirs.close()
        with contextlib.suppress(BrokenPipeError):  # it is already dead, as `wait_ready` will notice
            self._ours.send(KNOWN)

    async def wait_ready(
        self,
        name: str,
        timeout_s: float,
        on_progress: Callable[[str], None],
        on_identity: Callable[[str], None] = _nothing,
    ) -> None:
        """Return when the child has reported that it is ready.

        Args:
            on_identity: called with the identity of the model that it loads; an error in it ends the wait.

        Raises:
            ConfigError: it reported that a flag, file or value is at fault.
            StartupError: it failed in another way, missed another rank (OtherRankGone), died (DiedEarly), or was silent
                for `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not heed(decode_ack(await self._read_line(name)), name, on_progress, on_identity):
                    pass
        except TimeoutError:
            raise StartupError(f"{name} was not ready after {timeout_s:g} s") from None
        except MalformedMessage as error:
            raise StartupError(f"{name} sent no valid acknowledgement: {error}") from None

    async def _read_line(self, name: str) -> bytes:
        loop = asyncio.get_running_loop()
        while b"\n" not in self._buffer:
            readable = asyncio.Event()
            loop.add_reader(self._ours, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(self._ours)
            try:
                data = self._ours.recv(_MAX_ACK_BYTES)
            except ConnectionResetError:  # it died before it read that it is known
                data = b""
            if not data:
                raise DiedEarly(f"{name} died before it was ready")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def close(self) -> None:
        """Idempotent."""
        self._ours.close()
        self._theirs.close()


def heed(ack: Ack, name: str, on_progress: Callable[[str], None], on_identity: Callable[[str], None]) -> bool:
    """Pass an ack on; returns whether the process is ready. Raises the errors of `AckSocket.wait_ready`."""
    match ack:
        case Progress(text=text):
            on_progress(text)
        case Identified(model=model):
            on_identity(model)
        case StartFailed(message=message, config=True):
            raise ConfigError(message)
        case StartFailed(message=message, rank_gone=True):
            raise OtherRankGone(f"{name}: {message}")
        case StartFailed(message=message):
            raise StartupError(f"{name}: {message}")
        case Started():
            return True
    return False


def _spawn(module: str, arguments: Sequence[int | str], fds: Sequence[int], spec: bytes = b"") -> _Popen:
    """Start a process that calls `main` of a module, with the given descriptors and `spec` as its standard input.

    It is in a process group of its own, since a terminal's Ctrl-C is for the launcher, but in the launcher's session:
    Linux may give each session an equal share of the processors (autogroups), and then niceness would not count.
    """
    with os.fdopen(os.memfd_create("pdkv-spec"), "w+b") as stdin:
        stdin.write(spec)
        stdin.seek(0)
        return subprocess.Popen(
            # -P: never import from the working directory
            [sys.executable, "-P", "-m", "pdkv.launch.child", str(os.getpid()), module, *map(str, arguments)],
            stdin=stdin,
            stdout=2,  # the launcher's stdout only carries the ready line
            pass_fds=fds,
            process_group=0,
            env={**ENVIRONMENT, **os.environ},
        )


def spawn_engine(spec: EngineSpec, ack_fd: int, lifeline_fd: int, rank_fds: Sequence[int] = ()) -> Child:
    """Start a rank of an engine as a fresh interpreter: the fallback if the fork server does not work."""
    fds = [ack_fd, lifeline_fd, *rank_fds]
    popen = _spawn("pdkv.launch.engine_process", fds, fds, encode(spec))
    return _engine_child(spec.process_name, popen.pid, popen)


def spawn_router(name: str, spec: RouterSpec, listen_fd: int, ack_fd: int, lifeline_fd: int) -> Child:
    """Start the router, or a front, on the launcher's listening socket, or a dispatcher on the one for fronts."""
    fds = [listen_fd, ack_fd, lifeline_fd]
    popen = _spawn("pdkv.launch.router_process", [name, *fds], fds, encode(spec))
    return LocalChild(name, popen.pid, popen)


class ForkServer:
    """The launcher's side of the fork server."""

    def __init__(self, connector_target: str, lifeline_fd: int) -> None:
        """Starts it at once; the imports run in parallel to the launcher."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        arguments: list[int | str] = [theirs.fileno(), lifeline_fd, connector_target]
        popen = _spawn("pdkv.launch.fork_server", arguments, [theirs.fileno(), lifeline_fd])
        theirs.close()
        self._control = ours
        self.child = LocalChild("fork-server", popen.pid, popen)
        self.child.when_dead(_strays.adopt)
        self._answers: deque[asyncio.Future[bytes]] = deque()
        self._turn = asyncio.Lock()  # to ask: the socket holds some 20 requests, and each has its own time
        self._ready = self._expect_answer()
        asyncio.get_running_loop().add_reader(ours, self._receive)

    def _expect_answer(self) -> asyncio.Future[bytes]:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        return answer

    def _receive(self) -> None:
        try:
            data = self._control.recv(64)
        except ConnectionResetError:
            data = b""
        if not data:
            self.close()
        elif not (answer := self._answers.popleft()).done():
            answer.set_result(data)
        else:  # the requester was cancelled
            _strays.adopt()

    @property
    def usable(self) -> bool:
        """Whether it can still fork."""
        return self._control.fileno() >= 0

    async def fork_engine(
        self, spec: EngineSpec, ack_fd: int, rank_fds: Sequence[int] = (), *, timeout_s: float
    ) -> Child:
        """Fork a rank of an engine. `timeout_s`: how long the server's imports may take.

        Raises:
            StartupError: the fork server is gone, ends before it has answered, or is late, in which case it is killed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._ready)
            timeout_s = min(timeout_s, FORK_S)
            async with self._turn, asyncio.timeout(timeout_s):
                if not self.usable:
                    raise StartupError("the fork server died")
                with _strays.forking():
                    socket.send_fds(self._control, [encode(spec)], [ack_fd, *rank_fds])
                    return _engine_child(spec.process_name, int(await self._expect_answer()))
        except (TimeoutError, ConnectionError) as error:  # the latter before the loop has heard of its end
            self.child.send_signal(signal.SIGKILL)
            self.close()
            why = f"did not answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else "died"
            raise StartupError(f"the fork server {why}") from None

    def close(self) -> None:
        """End it (its engines live on) and fail pending requests. Idempotent."""
        if self.usable:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
        while self._answers:
            answer = self._answers.popleft()
            if not answer.done():
                answer.set_exception(StartupError("the fork server died"))
                answer.exception()  # retrieved: there may be no waiter
