"""Limits the connections of the HTTP server, and chooses which to close when there are too many."""

import logging
import os
from typing import Protocol

from pdkv.base.clock import MONOTONIC
from pdkv.router.generations.changes import Changes

logger = logging.getLogger(__name__)

_EVICTABLE_S = 1.0
"""Seconds after which an idle connection makes room for a new one."""

_SLOW_BODY_S = 5.0
"""If no connection is idle: seconds after which one whose body is still arriving makes room."""

_RESERVED = 32
"""Descriptors for everything else: engines that return, files, a pipe or two."""

_RESERVED_PER_ENGINE = 7
"""Descriptors per engine: a socket, its monitor and a subscription; 6.2 were measured."""


class Connection(Protocol):
    """A connection that may be closed to make room."""

    @property
    def num_unsent(self) -> int:
        """Bytes of answers still to be written because the client has not read the previous ones."""

    def shutdown(self) -> None:
        """End once the current answer and everything already written have been sent."""

    def evict(self) -> None:
        """Close now, without an answer."""


class Connections:
    """Admits connections up to a limit. To make room, an idle connection is closed, or else one whose body does not
    arrive.

    Ending connections do not count: there is some room above the limit for clients to read their last answers.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spare = max(4, limit // 16)
        self._idle: dict[Connection, float] = {}  # without a request in progress, and since when; oldest first
        self._receiving: dict[Connection, float] = {}  # its headers have arrived, its body has not; oldest first
        self._ending: dict[Connection, None] = {}  # its last answer was sent; oldest first
        self._open: set[Connection] = set()
        self._changes = Changes()

    @property
    def num_open(self) -> int:
        """Open connections, including those that are ending or still in a handshake."""
        return len(self._open)

    def opened(self, connection: Connection) -> None:
        """Count a connection, admitted or not."""
        self._open.add(connection)

    def lost(self, connection: Connection) -> None:
        """Forget a closed connection."""
        self.leave(connection)
        self._open.discard(connection)
        self._changes.notify()

    async def send_rest(self, timeout_s: float) -> int:
        """End all connections; returns how many had not sent everything within `timeout_s`.

        Clients that do not read at all are evicted earlier by their own timer.
        """
        for connection in list(self._open):
            connection.shutdown()
        unsent = {connection for connection in self._open if connection.num_unsent}
        if unsent:
            logger.info("stopping: %d clients are still reading their answers, at most %.1f s", len(unsent), timeout_s)
        await self._changes.wait_for(lambda: not unsent & self._open, timeout_s)
        return sum(connection.num_unsent > 0 for connection in unsent & self._open)

    def admit(self) -> bool:
        """Whether the newest connection may stay; may evict an idle one."""
        if self.num_open - len(self._ending) <= self._limit:
            return True
        now = MONOTONIC.now()
        oldest = _older(self._idle, now - _EVICTABLE_S) or _older(self._receiving, now - _SLOW_BODY_S)
        if oldest is None:
            return False
        self.leave(oldest)
        oldest.evict()
        return True

    def idle(self, connection: Connection) -> None:
        """Note that the connection waits for a request."""
        self._idle.setdefault(connection, MONOTONIC.now())

    def receiving(self, connection: Connection) -> None:
        """Note that the connection's next request has begun, and a body may follow."""
        self.leave(connection)
        self._receiving[connection] = MONOTONIC.now()

    def ending(self, connection: Connection) -> None:
        """Note that the connection has sent its last answer and stays open only until the client has read it; may evict
        the connection that has been in this state longest.
        """
        self._ending[connection] = None
        if len(self._ending) > self._spare:
            oldest = next(iter(self._ending))
            self.leave(oldest)
            oldest.evict()

    def leave(self, connection: Connection) -> None:
        """Note that the connection is being served, or is gone."""
        self._idle.pop(connection, None)
        self._receiving.pop(connection, None)
        self._ending.pop(connection, None)


def _older(since: dict[Connection, float], than: float) -> Connection | None:
    """The oldest entry, if it is that old."""
    oldest = next(iter(since), None)
    return None if oldest is None or since[oldest] > than else oldest


def connection_limit(asked: int, open_files_limit: int, num_engines: int) -> int:
    """The limit: `asked`, or what leaves descriptors for the engines' sockets and for refusals."""
    free = open_files_limit - len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else open_files_limit
    for_clients = max(free - _RESERVED - _RESERVED_PER_ENGINE * num_engines, free // 2)
    return max(1, min(asked, for_clients * 16 // 17 - 4))
