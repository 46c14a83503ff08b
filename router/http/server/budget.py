"""A limit on the bytes that many requests hold together; requests for which there is no room wait in turn."""

import asyncio
import contextlib
import threading
from collections import Counter, deque
from dataclasses import dataclass, field

from pdkv.errors import ServerBusy

SMALL_BYTES = 64 * 1024
"""Bytes above which a waiting request waits behind others of the same size; some room is kept for smaller ones."""


@dataclass(slots=True)
class Held:
    """The bytes that one request holds of a budget."""

    key: str = ""  # the owner, which may hold as much as it leaves free; "": no limit but the budget
    expected: int = 0  # its expected size, at least, as far as known
    size: int = 0
    exempt: int = 0  # the part held by the exempt request
    is_exempt: bool = False


@dataclass(slots=True, eq=False)
class _Waiter:
    """Bytes for which there was no room."""

    holder: Held
    size: int
    turn: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


_Queue = dict[str, deque[_Waiter]]
"""Waiters by key; the key whose turn is next is first."""


class ByteBudget:
    """A limit on the bytes held by all requests. Safe to use from several threads.

    A key may hold at most as much as remains free (dynamic thresholds; Choudhury and Hahne, 1998), so that there is
    room for the next key; waiting keys take turns, and requests of one key are in order. A request may take more while
    it holds some. To prevent requests from waiting for one another's bytes forever, one request at a time is *exempt*:
    the first that waited, until it gives everything back. Room for the largest request is kept for it.
    """

    def __init__(self, limit: int, what: str, *, largest: int = 0, unread: int = 0) -> None:
        """`what`: the kind of bytes, and the option that limits them, for errors.

        Args:
            largest: the largest size of one request, and so of the exempt one.
            unread: bytes that may already have arrived of waiting requests.
        """
        self.limit = limit
        self.what = what
        self._max_unread = unread
        spared = limit // 8
        self._bound_of_small = max(limit - largest - unread, spared)
        self._bound = self._bound_of_small - spared
        self._held = 0  # except for the exempt request
        self._of_key: Counter[str] = Counter()  # bytes by key, without keys that hold nothing
        self._exempt: Held | None = None
        self._unread = 0  # bytes that have arrived of waiting requests
        self._waiting: _Queue = {}
        self._small_waiting: _Queue = {}
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Bytes held now; 0 if no request is in progress."""
        exempt = self._exempt
        return self._held + self._unread + (0 if exempt is None else exempt.exempt)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return sum(len(waiting) for queue in (self._waiting, self._small_waiting) for waiting in queue.values())

    def try_take(self, holder: Held, size: int) -> bool:
        """Take `size` more bytes if there is room now, and nothing is ahead of it."""
        with self._lock:
            queue = self._queue(holder, size)
            if holder.is_exempt:
                holder.exempt += size
            elif holder.key in queue or not self._has_room(holder, size) or self._is_behind(queue):
                return False
            else:
                self._hold(holder, size)
            holder.size += size
            return True

    async def wait(self, holder: Held, size: int, *, unread: int = 0) -> None:
        """Take `size` more bytes as soon as there is room and it is the request's turn.

        Args:
            unread: bytes that have already arrived; they count while they wait.

        Raises:
            ServerBusy: too many have already arrived.
        """
        with self._lock:
            if unread and self._unread + unread > self._max_unread:
                raise self.busy()
            waiter = _Waiter(holder, size)
            queue = self._queue(holder, size)
            queue.setdefault(holder.key, deque()).append(waiter)
            self._unread += unread
            self._let_in()
        try:
            await waiter.turn
        finally:
            with self._lock:
                self._unread -= unread
                if waiter in queue.get(holder.key, ()):
                    queue[holder.key].remove(waiter)
                    if not queue[holder.key]:
                        del queue[holder.key]
                    self._let_in()  # it may have kept others waiting

    def give(self, holder: Held) -> None:
        """Give back everything that the holder has. Idempotent."""
        with self._lock:
            self._hold(holder, holder.exempt - holder.size)
            assert self._held >= 0, "more was given back than taken"
            holder.size = holder.exempt = 0
            if holder.is_exempt:
                holder.is_exempt, self._exempt = False, None
            self._let_in()

    def busy(self) -> ServerBusy:
        """The error for a full budget."""
        return ServerBusy(f"{self.what} of all requests together exceed {self.limit} bytes: try again")

    def _hold(self, holder: Held, size: int) -> None:
        self._held += size
        if holder.key:
            self._of_key[holder.key] += size
            if not self._of_key[holder.key]:
                del self._of_key[holder.key]

    def _queue(self, holder: Held, size: int) -> _Queue:
        return self._small_waiting if _is_small(holder, size) else self._waiting

    def _room(self, holder: Held, size: int) -> int:
        """Bytes that are free for such a request; negative if there are none."""
        return (self._bound_of_small if _is_small(holder, size) else self._bound) - self._held - size

    def _has_share(self, holder: Held, size: int) -> bool:
        """Whether its key may hold this much; a key that holds nothing may take all that is free."""
        own = self._of_key.get(holder.key, 0)
        return not own or own + size <= self._room(holder, size)

    def _has_room(self, holder: Held, size: int) -> bool:
        return self._room(holder, size) >= 0 and self._has_share(holder, size)

    def _is_behind(self, queue: _Queue) -> bool:
        """Whether another key waits for room, and not only for what it holds itself."""
        return any(self._has_share(waiting[0].holder, waiting[0].size) for waiting in queue.values())

    def _let_in(self) -> None:
        """Let in the next waiters while there is room."""
        for queue in (self._waiting, self._small_waiting):
            keys = list(queue)
            for key in keys:
                waiting = queue[key]
                holder, size = waiting[0].holder, waiting[0].size
                if self._has_room(holder, size):
                    self._hold(holder, size)
                elif self._exempt is None:
                    self._exempt, holder.is_exempt = holder, True
                    holder.exempt = size
                elif self._has_share(holder, size):
                    break  # later requests may be smaller: they must not overtake for ever
                else:
                    continue
                holder.size += size
                turn = waiting.popleft().turn
                del queue[key]
                if waiting:  # its next turn comes after the others'
                    queue[key] = waiting
                    keys.append(key)
                with contextlib.suppress(RuntimeError):  # its loop has ended, and its task with it
                    turn.get_loop().call_soon_threadsafe(_begin, turn)


def _is_small(holder: Held, size: int) -> bool:
    return max(holder.expected, holder.size + size) <= SMALL_BYTES


def _begin(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)
