"""Listening sockets: one thread authenticates all connections, and strangers cannot keep peers out.

Connections that are not authenticated yet are kept in a small pool, which bounds their number, their number per source
and their age; if it is full, the oldest is closed. A connection leaves the pool once it has proven that it knows the
secret (auth.py).
"""

import contextlib
import errno
import logging
import os
import selectors
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.base.service_thread import ServiceThread
from pdkv.connectors.peer.auth import Acceptor, Session
from pdkv.errors import Unauthenticated
from pdkv.host.strangers import who_makes_room

logger = logging.getLogger(__name__)

_ACCEPTS_PER_TURN = 32
_PAUSE_S = 0.1
"""Seconds without accepting, if there are no descriptors and no stranger to take one from."""

_CREDENTIALS = struct.Struct("3i")


@dataclass(eq=False)
class _Stranger:
    """A connection that is not authenticated yet."""

    connection: socket.socket
    source: str
    acceptor: Acceptor
    deadline: float


class AuthListener:
    """Accepts connections and authenticates them.

    Args:
        listeners: TCP or unix; owned from now on. On a unix socket only processes of this user are admitted.
        secret: of this rank.
        channel: the purpose of the connections.
        handshake_timeout_s: limit for each stranger.
        welcome: called on its thread with an authenticated connection (blocking), the session, and a name for logs. It
            owns the connection; it must not block.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        secret: bytes,
        channel: str,
        *,
        handshake_timeout_s: float,
        welcome: Callable[[socket.socket, Session, str], None],
        name: str,
        clock: Clock = MONOTONIC,
    ) -> None:
        self.num_refused = 0  # strangers that did not know the secret, were late, or made room
        self._listeners = listeners
        self._secret = secret
        self._channel = channel
        self._timeout_s = handshake_timeout_s
        self._welcome = welcome
        self._strangers: OrderedDict[int, _Stranger] = OrderedDict()  # by descriptor, oldest first
        self._paused_until = 0.0
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread = ServiceThread(self._run, self._wake, name)
        self._thread.start_or(lambda: self.close(0.0))

    def close(self, timeout_s: float) -> bool:
        """End the thread and all strangers; False: it did not end in time. Idempotent."""
        if not self._thread.stop(timeout_s):
            return False
        for stranger in list(self._strangers.values()):
            self._close(stranger)
        self._selector.close()
        for listener in self._listeners:  # closed here, since the thread may end before it is woken
            listener.close()
        return True

    def _wake(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):  # it was woken before
                listener.shutdown(socket.SHUT_RD)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self, stopping: Event) -> None:
        while not stopping.is_set():
            try:
                self._turn()
            except Exception:  # whatever the error was, the next connection is served
                logger.exception("a connection could not be served")
                self._clock.wait(stopping, self._clock.now() + _PAUSE_S)

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._wait_s()):
            if isinstance(key.fileobj, socket.socket) and key.fileobj in self._listeners:
                self._accept(key.fileobj)
            elif (stranger := self._strangers.get(key.fd)) is not None:
                self._hear(stranger)
        now = self._clock.now()
        while self._strangers and (oldest := next(iter(self._strangers.values()))).deadline <= now:
            self._refuse(oldest, "the handshake took too long")
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ)

    def _wait_s(self) -> float | None:
        """Seconds until the next deadline."""
        due = [next(iter(self._strangers.values())).deadline] if self._strangers else []
        due += [self._paused_until] if self._paused_until else []
        return max(min(due) - self._clock.now(), 0.0) if due else None

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._make_room_after(error)
                return  # or the connection is gone in the meantime
            source = self._source_of(connection, address)
            if source is None:
                self.num_refused += 1
                connection.close()
                continue
            sources = {fd: stranger.source for fd, stranger in self._strangers.items()}
            if (crowd := who_makes_room(sources, source)) is not None:
                self._refuse(self._strangers[crowd[0]], crowd[1])
            connection.setblocking(False)
            stranger = _Stranger(
                connection, source, Acceptor(self._secret, self._channel), self._clock.now() + self._timeout_s
            )
            self._strangers[connection.fileno()] = stranger
            self._selector.register(connection, selectors.EVENT_READ)

    def _source_of(self, connection: socket.socket, address: object) -> str | None:
        """The origin of a connection; None: another user of this host, which is refused."""
        if connection.family != socket.AF_UNIX:
            return str(address[0]) if isinstance(address, tuple) else str(address)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        return f"uid {uid}" if uid == os.geteuid() else None

    def _make_room_after(self, error: OSError) -> None:
        """Make room when there is no descriptor for a new connection: a stranger gives up its own, or the listener
        rests.
        """
        if self._strangers:
            self._refuse(next(iter(self._strangers.values())), "no file descriptors are left")
            return
        if self._paused_until:  # another listener has just said so
            return
        logger.warning("cannot accept connections: %s", error.strerror)
        for listener in self._listeners:
            self._selector.unregister(listener)
        self._paused_until = self._clock.now() + _PAUSE_S

    def _hear(self, stranger: _Stranger) -> None:
        try:
            data = stranger.connection.recv(4096)
            if not data:
                raise Unauthenticated("it left")
            reply = stranger.acceptor.feed(data)
            if reply and stranger.connection.send(reply) != len(reply):
                raise Unauthenticated("it does not read")
        except BlockingIOError:
            return  # a ready event for another connection, which had this descriptor before
        except (Unauthenticated, OSError) as error:
            self._refuse(stranger, str(error))
            return
        if stranger.acceptor.session is not None:
            self._forget(stranger)
            try:
                stranger.connection.setblocking(True)
                self._welcome(stranger.connection, stranger.acceptor.session, stranger.source)
            except Exception:  # one connection must not take the thread down with it
                logger.exception("a connection from %s could not be served", stranger.source)
                stranger.connection.close()

    def _refuse(self, stranger: _Stranger, why: str) -> None:
        self.num_refused += 1
        logger.debug("a connection from %s was refused: %s", stranger.source, why)
        self._close(stranger)

    def _close(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.connection.close()

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.connection.fileno()]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(stranger.connection)
