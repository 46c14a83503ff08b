"""Admission of TCP connections to an engine: routers of the deployment get in, and others cost little.

ZeroMQ itself admits every client that knows the engine's public key, keeps any number of silent connections for half a
minute each, and accepts messages as long as a router's from them. So one thread here answers which keys are accepted
(ZAP), and ends unauthenticated connections when there are too many of them, or when they send more than a handshake
needs.
"""

import contextlib
import logging
import os
import socket
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias, cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from pdkv.base.clock import MONOTONIC
from pdkv.base.log_limit import LogLimit
from pdkv.base.service_thread import ServiceThread
from pdkv.errors import ServerBusy
from pdkv.host.sockets import LISTEN_BACKLOG
from pdkv.host.strangers import who_makes_room
from pdkv.wire.cluster_key import ClusterKey

HANDSHAKE_TIMEOUT_S = 10.0
"""Seconds that a router needs on the slowest of networks, and for which a silent connection may stay."""

MAX_HANDSHAKE_BYTES = 4096
"""A router sends fewer than 1,000 bytes until it is admitted."""

_SWEEP_MS = 20
"""Seconds between checks while there are unauthenticated connections; until then ZeroMQ keeps everything they send."""

_EVENTS_PER_TURN = 64

_PAUSE_S = 0.1
"""Pause after an unexpected error, which may recur at once."""

_REFUSED_BYTES = 64 + 170 + 20
"""The most bytes that an engine sends to a connection that is not admitted: its greeting, WELCOME and an ERROR. READY,
which is encrypted, only follows the proof, and exceeds it.
"""

_TCP_INFO = struct.Struct("=120xQQ")
"""Offsets in linux/tcp.h: tcpi_bytes_acked and tcpi_bytes_received."""

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_MONITOR_STOPPED

Socket: TypeAlias = "zmq.Socket[bytes]"

logger = logging.getLogger(__name__)


class _Unproven(NamedTuple):
    """A connection that has not authenticated yet. ZeroMQ may close its descriptor at any time."""

    fd: int
    source: str


class Doorkeeper:
    """Guards sockets of one context. Used by the thread that owns them; has its own thread."""

    def __init__(self, context: "zmq.Context[Socket]", key: ClusterKey) -> None:
        """Raises zmq.ZMQError if no socket can be created."""
        self.num_refused = 0  # connections that made room or sent too much, and keys that are not accepted
        self._context = context
        self._key = key
        self._ports: set[int] = set()
        self._unproven: OrderedDict[int, _Unproven] = OrderedDict()  # by inode, oldest first
        self._next_sweep = 0.0
        self._log_limit = LogLimit()
        self._monitors: list[Socket] = []
        self._requests = context.socket(zmq.REP)
        self._requests.linger = 0
        self._requests.bind("inproc://zeromq.zap.01")
        self._poller = zmq.Poller()
        self._poller.register(self._requests, zmq.POLLIN)
        self._thread = ServiceThread(self._run, lambda: None, "doorkeeper")

    def guard(self, guarded: Socket) -> None:
        """Guard a socket: without the key, no connection is admitted. Call it before bind."""
        self._key.guard(guarded)
        guarded.setsockopt(zmq.BACKLOG, LISTEN_BACKLOG)  # else a router waits a second for each time that it is full
        guarded.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_TIMEOUT_S * 1000))
        where = f"inproc://doorkeeper-{len(self._monitors)}"
        guarded.monitor(where, _EVENTS)
        monitor = self._context.socket(zmq.PAIR)
        monitor.linger = 0
        monitor.connect(where)
        self._monitors.append(monitor)
        self._poller.register(monitor, zmq.POLLIN)

    def start(self, endpoints: Sequence[str]) -> None:
        """Start: all sockets are bound to these endpoints; early connections are waiting."""
        self._ports = {int(endpoint.rpartition(":")[2]) for endpoint in endpoints}
        self._thread.start()

    def close(self) -> None:
        """End the thread. The guarded sockets must be closed, or never used. Idempotent."""
        # If it never was, it begins now: ZeroMQ waits until its last event is read.
        with contextlib.suppress(ServerBusy):
            self._thread.start_or(lambda: self._run(self._thread.stopping))
        self._thread.stop()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self, stopping: threading.Event) -> None:
        try:
            while self._monitors:
                try:
                    self._turn()
                except Exception:  # whatever the error was, the next connection is served
                    if self._log_limit.passes():
                        logger.exception("a connection could not be served")
                    if MONOTONIC.wait(stopping, MONOTONIC.now() + _PAUSE_S):
                        return
        finally:
            for mine in (self._requests, *self._monitors):
                mine.close(linger=0)

    def _turn(self) -> None:
        for readable, _ in self._poller.poll(_SWEEP_MS if self._unproven else None):
            if readable is self._requests:
                self._answer()
            else:
                self._read_events(cast("Socket", readable))
        if self._unproven and (now := MONOTONIC.now()) >= self._next_sweep:
            self._next_sweep = now + _SWEEP_MS / 1000
            for inode in list(self._unproven):
                self._look_at(inode)

    def _answer(self) -> None:
        """Answer whether a key is accepted, as https://rfc.zeromq.org/spec/27 specifies."""
        version, number, _, address, _, mechanism, *credentials = self._requests.recv_multipart()
        welcome = mechanism == b"CURVE" and len(credentials) == 1 and self._key.is_routers(credentials[0])
        if not welcome:
            self._refused(address.decode(errors="replace"), "it has a key that is not this deployment's")
        status = (b"200", b"OK") if welcome else (b"400", b"unknown key")
        self._requests.send_multipart((version, number, *status, b"", b""))

    def _read_events(self, monitor: Socket) -> None:
        for _ in range(_EVENTS_PER_TURN):
            try:
                event = recv_monitor_message(monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                self._poller.unregister(monitor)
                self._monitors.remove(monitor)
                monitor.close(linger=0)
                return
            self._take_in(event["value"])

    def _take_in(self, fd: int) -> None:
        """Track an accepted connection."""
        with _held(fd) as connection:
            if connection is None or _own_port(connection) not in self._ports:
                return  # it is gone, and its descriptor may belong to another connection
            source = _source_of(connection)
            inode = os.fstat(connection.fileno()).st_ino
        sources = {known: unproven.source for known, unproven in self._unproven.items()}
        if (crowd := who_makes_room(sources, source)) is not None:
            self._look_at(*crowd)
        self._unproven[inode] = _Unproven(fd, source)

    def _look_at(self, inode: int, why: str = "") -> None:
        """Forget a connection that is gone or authenticated; end it for a reason, or if it sent too much."""
        fd, source = self._unproven[inode]
        with _held(fd) as connection:
            if connection is not None and os.fstat(connection.fileno()).st_ino == inode:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                num_acknowledged, num_received = _TCP_INFO.unpack(info)
                if num_acknowledged <= _REFUSED_BYTES:
                    if num_received > MAX_HANDSHAKE_BYTES:
                        why = f"it sent {num_received} bytes before it was admitted"
                    if not why:
                        return
                    with contextlib.suppress(OSError):  # gone meanwhile
                        connection.shutdown(socket.SHUT_RDWR)  # ZeroMQ sees its end, and closes it
                    self._refused(source, why)
        del self._unproven[inode]

    def _refused(self, source: str, why: str) -> None:
        self.num_refused += 1
        if self._log_limit.passes():
            logger.warning("a connection from %s was refused: %s (%d so far)", source, why, self.num_refused)


@contextlib.contextmanager
def _held(fd: int) -> Iterator[socket.socket | None]:
    """The connection of a descriptor, held so that it is not closed meanwhile; None: there is none any more."""
    connection = None
    with contextlib.suppress(OSError):
        own = os.dup(fd)
        try:
            connection = socket.socket(fileno=own)
        except OSError:
            os.close(own)
    try:
        yield connection
    finally:
        if connection is not None:
            connection.close()


def _own_port(connection: socket.socket) -> int | None:
    """The connection's own port; None: it is not TCP."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    return int(connection.getsockname()[1])


def _source_of(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:  # it has gone
        return ""
