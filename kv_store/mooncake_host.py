"""The engine's side of `mooncake_process.py`: starts it, opens connections to it, and ends it."""

import contextlib
import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

import msgspec

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.errors import StoreTimeout, StoreUnavailable
from pdkv.kv_store.base import Buffer
from pdkv.kv_store.connections import Channel, Deadline
from pdkv.kv_store.mooncake_process import LENGTH, MAX_CONTROL_BYTES, TAKEN, Call, Outcome, Ready, Start, Verb

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0  # on a machine that is busy
_END_TIMEOUT_S = 5.0
_PROBE_TIMEOUT_S = 0.1
_MAX_STARTS = 2  # for one connection
_MAX_CODE_BYTES = 9  # of an integer as msgpack
_MAX_ERROR_BYTES = 64 << 10


class ClientConnection(Channel):
    """A connection to the process, and the memory that it shares with it."""

    def __init__(self, sock: socket.socket, arena_fd: int, what: str) -> None:
        super().__init__(sock, what)
        self.arena_fd = arena_fd
        self.arena: Buffer = memoryview(b"")

    def reserve(self, num_bytes: int) -> None:
        """Make an arena of at least this many bytes; its content may be lost.

        Raises:
            StoreUnavailable: there is no memory for it.
        """
        if num_bytes > len(self.arena):
            try:
                os.ftruncate(self.arena_fd, num_bytes)
                self.arena = memoryview(mmap.mmap(self.arena_fd, num_bytes))
            except OSError as error:
                raise StoreUnavailable(
                    f"{self._what}: {num_bytes} bytes for passing values cannot be allocated: {error}"
                ) from error

    def call(
        self, verb: Verb, names: Sequence[str], starts: Sequence[int] = (), sizes: Sequence[int] = ()
    ) -> Sequence[int]:
        """Mooncake's code for each name.

        Raises:
            StoreTimeout: it did not answer by the deadline.
            StoreUnavailable: it or its process failed, or its answer is invalid.
        """
        order = msgspec.msgpack.encode(Call(verb, names, starts, sizes, len(self.arena)))
        self.send([LENGTH.pack(len(order)), order])
        (length,) = LENGTH.unpack(self.read_exactly(LENGTH.size))
        most = _MAX_ERROR_BYTES + _MAX_CODE_BYTES * len(names)
        if length > most:
            raise StoreUnavailable(f"{self._what}: its client answers with {length} bytes, of at most {most}")
        try:
            outcome = msgspec.msgpack.decode(self.read_exactly(length), type=Outcome)
        except msgspec.MsgspecError as error:
            raise StoreUnavailable(f"{self._what}: its client's answer is invalid: {error}") from error
        if outcome.error or len(outcome.codes) != len(names):
            raise StoreUnavailable(f"{self._what}: {outcome.error or 'an answer of unexpected length'}")
        return outcome.codes

    def close(self) -> None:
        super().close()
        if self.arena_fd >= 0:
            os.close(self.arena_fd)
            self.arena_fd = -1


class MooncakeHost:
    """Owns the process, which is started with the first connection, and again after it has ended. Thread-safe."""

    def __init__(
        self, master: tuple[str, int], metadata_server: str, timeout_s: float, what: str, clock: Clock = MONOTONIC
    ) -> None:
        """`master`: its host and port; `what` names it in messages. Starts nothing."""
        self._master = master
        self._metadata_server = metadata_server
        self._timeout_s = timeout_s
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._started_at = 0.0
        self._is_ready = False
        self._is_closed = False
        self._final_error = ""

    def connect(self, deadline: Deadline, connect_timeout_s: float) -> ClientConnection:
        """A new connection.

        Raises:
            StoreTimeout: the master cannot be reached within `connect_timeout_s`, or the process is not ready by the
                deadline; it goes on starting.
            StoreUnavailable: there is no master, or no client.
        """
        if not self._lock.acquire(timeout=deadline.remaining()):
            deadline.remaining()  # raises
        try:
            for _ in range(_MAX_STARTS):
                control = self._running(deadline, connect_timeout_s)
                try:
                    return self._open_connection(control, deadline)
                except StoreUnavailable as error:
                    lost = self._end("went away", error)
                    logger.warning("%s", lost)
            raise StoreUnavailable(lost)
        except OSError as error:  # no descriptors, no memory for a process
            raise StoreUnavailable(f"{self._what}: {error}") from error
        finally:
            self._lock.release()

    def probe(self, timeout_s: float = _PROBE_TIMEOUT_S) -> str:
        """This host's address as the master sees it.

        Raises:
            StoreTimeout: no connection within `timeout_s`.
            StoreUnavailable: it was refused.
        """
        try:
            with socket.create_connection(self._master, timeout_s) as sock:
                host: str = sock.getsockname()[0]
                return f"[{host}]" if ":" in host else host
        except TimeoutError as error:
            raise StoreTimeout(f"{self._what}: no connection within {timeout_s:g} s") from error
        except OSError as error:
            raise StoreUnavailable(f"{self._what}: {error}") from error

    def close(self) -> None:
        """End the process; calls under way are lost. Idempotent."""
        self._is_closed = True
        starting = self._process
        if starting is not None:
            starting.kill()  # a waiter that holds the lock sees this
        with self._lock:
            self._end("is closed")

    def _open_connection(self, control: socket.socket, deadline: Deadline) -> ClientConnection:
        """Open a connection that the process has accepted.

        Raises:
            StoreTimeout: it has not by the deadline.
            StoreUnavailable: it is about to end: one that is killed closes its sockets one by one, and before it can be
                waited for.
            OSError: there are no descriptors.
        """
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as unless_taken:
            unless_taken.callback(ours.close)
            with theirs:
                connection = ClientConnection(ours, os.memfd_create("pdkv-mooncake"), self._what)
                unless_taken.callback(connection.close)
                connection.deadline = deadline
                control.settimeout(deadline.remaining())
                try:
                    socket.send_fds(control, [b"connection"], [theirs.fileno(), connection.arena_fd])
                except OSError as error:
                    raise StoreUnavailable(f"{self._what}: {error}") from error
            connection.read_exactly(len(TAKEN))
            unless_taken.pop_all()
        return connection

    def _running(self, deadline: Deadline, connect_timeout_s: float) -> socket.socket:
        """The control socket of a process that is ready."""
        if self._is_closed:
            raise StoreUnavailable(f"{self._what}: the store is closed")
        if self._final_error:
            raise StoreUnavailable(self._final_error)
        if self._process is not None and self._process.poll() is not None:
            logger.warning("%s", self._end("ended by itself; it is restarted"))
        if self._control is None:
            self._begin(self.probe(min(connect_timeout_s, deadline.remaining())))
        assert self._control is not None
        if not self._is_ready:
            self._await_ready(self._control, deadline)
        return self._control

    def _begin(self, local_host: str) -> None:
        host, port = self._master
        start = Start(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}", local_host, self._metadata_server, self._timeout_s
        )
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as unless_started:
            unless_started.callback(control.close)
            control.send(msgspec.msgpack.encode(start))
            command = [sys.executable, "-P", "-m", "pdkv.kv_store.mooncake_process", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, process_group=0
            )  # out of a terminal's reach: the engine says when to end
            unless_started.pop_all()
        self._control, self._is_ready, self._started_at = control, False, self._clock.now()

    def _await_ready(self, control: socket.socket, deadline: Deadline) -> None:
        control.settimeout(deadline.remaining())
        try:
            answer = control.recv(MAX_CONTROL_BYTES)
        except TimeoutError:
            if self._clock.now() - self._started_at > _START_TIMEOUT_S:
                raise StoreUnavailable(self._end("did not start")) from None
            raise StoreTimeout(f"{self._what}: its client is not ready yet") from None
        except OSError as error:
            raise StoreUnavailable(self._end("did not start", error)) from error
        if not answer:
            raise StoreUnavailable(self._end("ended before it was ready"))
        try:
            ready = msgspec.msgpack.decode(answer, type=Ready)
        except msgspec.MsgspecError as error:
            raise StoreUnavailable(self._end("sent an unreadable answer", error)) from error
        if ready.error:
            self._end("is not ready")
            message = f"{self._what}: {ready.error}"
            self._final_error = message if ready.is_final else ""
            raise StoreUnavailable(message)
        self._is_ready = True

    def _end(self, reason: str, error: Exception | None = None) -> str:
        """End the process; returns a description of its end."""
        process, control = self._process, self._control
        self._process = self._control = None
        if control is not None:
            control.close()
        says = f"{self._what}: its client process {reason}" + (f" ({error})" if error is not None else "")
        if process is None:
            return says
        status = process.poll()
        process.kill()
        try:
            process.wait(timeout=_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("process %d does not end though it was killed", process.pid)
        return says if status is None else f"{says} (exit status {status})"
