"""The sockets of `p2p` links: unix within a host, TCP between hosts; KV goes directly from pool to pool.

A whole piece is one call of the compiled kernel; without it, and for frames, the socket module is used.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from pdkv.base.clock import MONOTONIC
from pdkv.errors import PeerGone, TransferTimeout
from pdkv.kernels.stream import StreamArgs, stream

Rows = Sequence[memoryview]

IOV_MAX = 1024
UNIX_BUFFER_BYTES = 4 << 20
"""Requested buffer size; the system gives at most net.core.wmem_max. A piece that fits frees its sender at once."""

BACKLOG = 1024
"""Connections that the kernel keeps until the listener's thread takes them: a burst of strangers fills no queue."""

PIPE_BYTES = 256 << 10
NO_PIPE = (-1, -1)

_SECONDS = struct.Struct("@ll")


def host_id() -> str:
    """An id shared by processes that can reach, and may use, each other's abstract unix sockets: boot, namespaces,
    user.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.stat(f"/proc/self/ns/{name}") for name in ("net", "user")]
    except OSError:
        return ""  # no other process has the same one
    names = [boot, str(os.geteuid()), *(f"{space.st_dev}.{space.st_ino}" for space in spaces)]
    return hashlib.sha256("/".join(names).encode()).hexdigest()[:16]


def listen(host: str) -> tuple[socket.socket, socket.socket, str]:
    """A listening unix and TCP socket, and the unix one's abstract name. Raises OSError."""
    name = f"pdkv-p2p-{secrets.token_hex(8)}"
    within = socket.socket(socket.AF_UNIX)
    try:
        within.bind(f"\0{name}")
        within.listen(BACKLOG)
        return within, socket.create_server((host, 0), backlog=BACKLOG), name
    except BaseException:
        within.close()
        raise


def connect(unix_name: str, address: tuple[str, int], timeout_s: float) -> socket.socket:
    """A connection to the abstract unix socket if a name is given, else to the TCP address. Raises OSError."""
    if not unix_name:
        return socket.create_connection(address, timeout_s)
    made = socket.socket(socket.AF_UNIX)
    try:
        _limit(made, socket.SO_SNDTIMEO, timeout_s)
        made.connect(f"\0{unix_name}")
    except BaseException:
        made.close()
        raise
    return made


class Connection:
    """One socket to a peer. One thread uses it; any may `interrupt` it.

    All errors are PeerGone, when the connection ended, or TransferTimeout, when the peer does nothing for too long.
    """

    def __init__(self, connected: socket.socket, peer: str) -> None:
        self.socket = connected
        self.is_unix = connected.family == socket.AF_UNIX
        self.peer = peer
        self._pipe: tuple[int, int] | None = None
        connected.setblocking(True)  # and each call has a deadline
        if self.is_unix:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        else:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes, timeout_s: float) -> None:
        """Send all of a frame."""
        self.send_rows([memoryview(data)], timeout_s)

    def receive(self, size: int, timeout_s: float) -> bytes:
        """Wait for this many bytes."""
        data = bytearray(size)
        self.receive_rows([memoryview(data)], timeout_s)
        return bytes(data)

    def send_rows(self, rows: Rows, timeout_s: float) -> None:
        """Send memory, row by row."""
        self._move(rows, socket.SO_SNDTIMEO, lambda some: self.socket.sendmsg(some, [], socket.MSG_NOSIGNAL), timeout_s)

    def receive_rows(self, rows: Rows, timeout_s: float) -> None:
        """Fill memory, row by row."""
        self._move(
            rows, socket.SO_RCVTIMEO, lambda some: self.socket.recvmsg_into(some, 0, socket.MSG_WAITALL)[0], timeout_s
        )

    @property
    def is_open(self) -> bool:
        """Whether the peer has neither closed the connection nor sent anything unrequested."""
        found = select.poll()
        found.register(self.socket, select.POLLIN)
        return not found.poll(0)

    @property
    def has_left(self) -> bool:
        """Whether the peer has closed the connection, whatever it sent before."""
        found = select.poll()
        found.register(self.socket, select.POLLRDHUP)
        return bool(found.poll(0))

    def pipe(self) -> tuple[int, int]:
        """A pipe through which memory is sent to a unix socket without a copy; NO_PIPE if that is not possible."""
        if self._pipe is None:
            self._pipe = _new_pipe() if self.is_unix and can_splice() else NO_PIPE
        return self._pipe

    def interrupt(self) -> None:
        """End the connection from any thread; a waiting thread wakes up with PeerGone."""
        with contextlib.suppress(OSError):  # the peer was faster
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close, on the thread that uses it. Idempotent."""
        self.interrupt()
        self.socket.close()
        pipe, self._pipe = self._pipe or NO_PIPE, NO_PIPE
        _close_pipe(pipe)

    def _move(self, rows: Rows, limit: int, call: Callable[[Rows], int], timeout_s: float) -> None:
        deadline = MONOTONIC.now() + timeout_s
        try:
            while rows:
                _limit(self.socket, limit, deadline - MONOTONIC.now())
                moved = call(rows[:IOV_MAX])
                if not moved:
                    raise PeerGone(f"{self.peer} closed the connection")
                rows = _rest(rows, moved)
        except BlockingIOError:
            raise TransferTimeout(f"{self.peer}: no data moved for {timeout_s:g} s") from None
        except OSError as error:
            raise PeerGone(f"{self.peer}: {error.strerror or error}") from error


def stream_rows(args: StreamArgs, connections: Sequence[Connection], timeout_s: float) -> None:
    """Have the kernel move rows over one socket or two. Raises the same as `Connection`."""
    for i, connection in enumerate(connections):
        args.fds[i] = connection.socket.fileno()
        with contextlib.suppress(OSError):  # closed: the call finds out, too
            _limit(connection.socket, socket.SO_SNDTIMEO if args.sends else socket.SO_RCVTIMEO, timeout_s)
    args.deadline_ns = int((MONOTONIC.now() + timeout_s) * 1e9)
    number = stream(args)
    peer = connections[0].peer
    if number == errno.EAGAIN:
        raise TransferTimeout(f"{peer}: no data moved for {timeout_s:g} s")
    if number:
        raise PeerGone(f"{peer}: {os.strerror(number)}")


@cache
def can_splice() -> bool:
    """Whether the system sends memory to a unix socket without a copy: not every sandbox allows it."""
    data = np.arange(2, dtype=np.int64)  # its own row table: from offset 0 on, one byte
    sent, received = socket.socketpair(socket.AF_UNIX)
    with sent, received:
        received.setblocking(False)
        pipe = _new_pipe()
        try:
            args = StreamArgs(base=data.ctypes.data, rows=data.ctypes.data, num_rows=1, num_bytes=1, sends=1, num_fds=1)
            args.fds[0], args.pipe[:], args.batch_bytes, args.step_bytes = sent.fileno(), pipe, 1, 1
            return pipe != NO_PIPE and not stream(args) and received.recv(2) == b"\0"
        except BlockingIOError:
            return False
        finally:
            _close_pipe(pipe)


def _new_pipe() -> tuple[int, int]:
    try:
        pipe = os.pipe()
    except OSError:  # no descriptors are left: memory is copied
        return NO_PIPE
    with contextlib.suppress(OSError):  # the user has many large ones: a small one works, too
        fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return pipe


def _close_pipe(pipe: tuple[int, int]) -> None:
    if pipe != NO_PIPE:
        for end in pipe:
            os.close(end)


def _limit(connection: socket.socket, option: int, seconds: float) -> None:
    """How long a call on a blocking socket may take; 0 would mean no limit."""
    whole, part = divmod(max(seconds, 1e-3), 1)
    connection.setsockopt(socket.SOL_SOCKET, option, _SECONDS.pack(int(whole), int(part * 1e6)))


def _rest(rows: Rows, moved: int) -> Rows:
    """The rest of rows of which the first `moved` bytes are done; the first row may begin in its middle."""
    for number, row in enumerate(rows):
        if moved < len(row):
            return [row[moved:], *rows[number + 1 :]]
        moved -= len(row)
    return []
