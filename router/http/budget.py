"""A bound on the bytes that many requests hold together: what finds no room waits for its turn."""

import asyncio
import contextlib
import threading
from collections import deque
from dataclasses import dataclass, field

from pdkv.errors import ServerBusy

SMALL_BYTES = 64 * 1024
"""Whoever has more waits behind others that have more; some room is kept for the rest."""


@dataclass(slots=True)
class Held:
    """What one request holds of a budget."""

    expected: int = 0  # what it will come to at least, as far as that is known
    size: int = 0
    exempt: int = 0  # of that: held by the one that is exempt from the bound
    is_exempt: bool = False


@dataclass(slots=True, eq=False)
class _Waiter:
    """Bytes for which there was no room."""

    holder: Held
    size: int
    turn: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ByteBudget:
    """Bytes that are held now, over all requests. Safe to use from several threads.

    A request may take more while it holds some. So that requests which wait for each other's bytes get on, one at a
    time is *exempt*: the first that waited, until it lets go of all it has. Room for the largest is kept for it.
    """

    def __init__(self, limit: int, what: str, *, largest: int = 0, unread: int = 0) -> None:
        """`what` the bytes are, for the error.

        Args:
            largest: what one request may come to, and be exempt with.
            unread: what may be here already of those that wait.
        """
        self._limit = limit
        self._what = what
        self._max_unread = unread
        spared = limit // 8
        self._bound_of_small = max(limit - largest - unread, spared)
        self._bound = self._bound_of_small - spared
        self._held = 0  # but for what is exempt
        self._exempt: Held | None = None
        self._unread = 0  # what is here already of those that wait
        self._waiting: deque[_Waiter] = deque()
        self._small_waiting: deque[_Waiter] = deque()
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Bytes that are held now; 0 when nothing is under way."""
        exempt = self._exempt
        return self._held + self._unread + (0 if exempt is None else exempt.exempt)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting) + len(self._small_waiting)

    def take(self, holder: Held, size: int) -> None:
        """Hold `size` bytes more, now or not at all.

        Raises:
            ServerBusy: there is no room for them.
        """
        if not self.try_take(holder, size):
            raise self._busy()

    def try_take(self, holder: Held, size: int) -> bool:
        """Hold `size` bytes more if that can be now, and nobody is before it."""
        with self._lock:
            if holder.is_exempt:
                holder.exempt += size
            elif self._queue(holder, size) or not self._has_room(holder, size):
                return False
            else:
                self._held += size
            holder.size += size
            return True

    async def wait(self, holder: Held, size: int, *, unread: int = 0) -> None:
        """Hold `size` bytes more as soon as there is room, and it is its turn.

        Args:
            unread: as many bytes are here already; they count while they wait.

        Raises:
            ServerBusy: too many are here already.
        """
        with self._lock:
            if unread and self._unread + unread > self._max_unread:
                raise self._busy()
            waiter = _Waiter(holder, size)
            queue = self._queue(holder, size)
            queue.append(waiter)
            self._unread += unread
            self._let_in()
        try:
            await waiter.turn
        finally:
            with self._lock:
                self._unread -= unread
                if waiter in queue:
                    queue.remove(waiter)
                    self._let_in()  # it may have kept others waiting

    def give(self, holder: Held) -> None:
        """Let go of all that it holds. Idempotent."""
        with self._lock:
            self._held -= holder.size - holder.exempt
            assert self._held >= 0, "more was given back than taken"
            holder.size = holder.exempt = 0
            if holder.is_exempt:
                holder.is_exempt, self._exempt = False, None
            self._let_in()

    def _queue(self, holder: Held, size: int) -> deque[_Waiter]:
        return self._small_waiting if _is_small(holder, size) else self._waiting

    def _has_room(self, holder: Held, size: int) -> bool:
        return self._held + size <= (self._bound_of_small if _is_small(holder, size) else self._bound)

    def _let_in(self) -> None:
        """Whoever is next, while there is room."""
        for queue in (self._waiting, self._small_waiting):
            while queue:
                holder, size = queue[0].holder, queue[0].size
                if self._has_room(holder, size):
                    self._held += size
                elif self._exempt is None:
                    self._exempt, holder.is_exempt = holder, True
                    holder.exempt = size
                else:
                    break
                holder.size += size
                turn = queue.popleft().turn
                with contextlib.suppress(RuntimeError):  # its loop has ended, and so has it
                    turn.get_loop().call_soon_threadsafe(_begin, turn)

    def _busy(self) -> ServerBusy:
        return ServerBusy(f"{self._what} of all requests together exceed {self._limit} bytes: try again")


def _is_small(holder: Held, size: int) -> bool:
    return max(holder.expected, holder.size + size) <= SMALL_BYTES


def _begin(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)
