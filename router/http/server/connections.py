"""How many connections the HTTP server may have, and which of them go when there are too many."""

import logging
import os
from typing import Protocol

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.router.generations.changes import Changes

logger = logging.getLogger(__name__)

_EVICTABLE_S = 1.0
"""A connection that has been idle for so long makes room for a new one."""

_SLOW_BODY_S = 5.0
"""Where no connection is idle, one whose body has been on its way for so long does."""

_RESERVED = 32
"""Descriptors for everything else: engines that come back, files, a pipe or two."""

_RESERVED_PER_ENGINE = 7
"""A socket, its monitor and a subscription: 6.2 were counted."""


class Connection(Protocol):
    """A connection that may have to go."""

    @property
    def num_unsent(self) -> int:
        """Bytes of answers that are still to be written, because the client has not read what is before them."""

    def shutdown(self) -> None:
        """End when what was written, and the answer under way, are out."""

    def evict(self) -> None:
        """Close now; nothing is answered."""


class Connections:
    """Admits connections up to a limit; an idle one makes room, else one whose body does not come.

    Those that are ending do not count: there is some room beside the limit for them to be read to their end.
    """

    def __init__(self, limit: int, clock: Clock = MONOTONIC) -> None:
        self._clock = clock
        self._limit = limit
        self._spare = max(4, limit // 16)
        self._idle: dict[Connection, float] = {}  # without a request in progress, and since when; the oldest first
        self._receiving: dict[Connection, float] = {}  # its headers are here, its body is not; the oldest first
        self._ending: dict[Connection, None] = {}  # answered for the last time; the oldest first
        self._open: set[Connection] = set()
        self._changes = Changes()

    @property
    def num_open(self) -> int:
        """Connections that there are, with those that are ending or still shake hands."""
        return len(self._open)

    def opened(self, connection: Connection) -> None:
        """There is one more, admitted or not."""
        self._open.add(connection)

    def lost(self, connection: Connection) -> None:
        """It is gone."""
        self.leave(connection)
        self._open.discard(connection)
        self._changes.notify()

    async def send_rest(self, timeout_s: float) -> int:
        """End all connections; return how many had not sent what was written to them within `timeout_s`.

        Those who do not read at all are evicted by their own timer before that.
        """
        for connection in list(self._open):
            connection.shutdown()
        unsent = {connection for connection in self._open if connection.num_unsent}
        if unsent:
            logger.info("stopping: %d clients still read their answers, at most %.1f s", len(unsent), timeout_s)
        await self._changes.wait_for(lambda: not unsent & self._open, timeout_s)
        return sum(connection.num_unsent > 0 for connection in unsent & self._open)

    def admit(self) -> bool:
        """Whether the connection that was opened last may stay; may evict an idle one."""
        if self.num_open - len(self._ending) <= self._limit:
            return True
        now = self._clock.now()
        oldest = _older(self._idle, now - _EVICTABLE_S) or _older(self._receiving, now - _SLOW_BODY_S)
        if oldest is None:
            return False
        self.leave(oldest)
        oldest.evict()
        return True

    def idle(self, connection: Connection) -> None:
        """It waits for a request."""
        self._idle.setdefault(connection, self._clock.now())

    def receiving(self, connection: Connection) -> None:
        """Its next request has begun, and a body may follow."""
        self.leave(connection)
        self._receiving[connection] = self._clock.now()

    def ending(self, connection: Connection) -> None:
        """It has its last answer, and is open only to be read; may evict the one that has been so for longest."""
        self._ending[connection] = None
        if len(self._ending) > self._spare:
            oldest = next(iter(self._ending))
            self.leave(oldest)
            oldest.evict()

    def leave(self, connection: Connection) -> None:
        """It is served, or gone."""
        self._idle.pop(connection, None)
        self._receiving.pop(connection, None)
        self._ending.pop(connection, None)


def _older(since: dict[Connection, float], than: float) -> Connection | None:
    """The first of what is oldest first, where it is that old."""
    oldest = next(iter(since), None)
    return None if oldest is None or since[oldest] > than else oldest


def connection_limit(asked: int, open_files_limit: int, num_engines: int) -> int:
    """`asked`, or as many as leave descriptors for the engines' sockets and for saying no."""
    free = open_files_limit - len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else open_files_limit
    for_clients = max(free - _RESERVED - _RESERVED_PER_ENGINE * num_engines, free // 2)
    return max(1, min(asked, for_clients * 16 // 17 - 4))
