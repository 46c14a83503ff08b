"""Limits the requests that begin in one turn of the event loop, and lets clients take turns.

A hundred requests that arrive at the same moment would all begin in the same turn. Reading, checking and tokenizing
each takes half a millisecond, and everything else would wait for all of it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

STARTS_PER_TURN = 8

Start = Callable[[], None]


def client_of(headers: Iterable[tuple[bytes, bytes]], address: tuple[str, int] | None) -> bytes:
    """The key of a request, however its header spells what is around it, or the host that it came from."""
    words = next((value for name, value in headers if name == b"authorization"), b"").split()
    host, _ = address or ("", 0)
    return words[-1] if words else host.encode()


class Turnstile:
    """Lets requests begin: some at once, the others in the next turns, where clients take turns.

    Between two turns the loop reads input and runs what is due. Belongs to one event loop.
    """

    def __init__(self, per_turn: int = STARTS_PER_TURN) -> None:
        self._per_turn = per_turn
        self._num_begun = 0  # in this turn
        self._waiting: dict[bytes, deque[Start]] = {}  # by client, the one whose turn is next first
        self._is_due = False  # the next turn is scheduled

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived but not begun."""
        return sum(map(len, self._waiting.values()))

    def enter(self, start: Start, client: bytes = b"") -> None:
        """Call `start`, in this turn of the loop or in a later one. It must not raise."""
        if self._waiting or self._num_begun >= self._per_turn:
            self._waiting.setdefault(client, deque()).append(start)
        else:
            self._begin(start)

    def _begin(self, start: Start) -> None:
        self._num_begun += 1
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)
        start()

    def _turn(self) -> None:
        """Begin the next turn."""
        self._num_begun, self._is_due = 0, False
        while self._waiting and self._num_begun < self._per_turn:
            client, starts = next(iter(self._waiting.items()))
            start = starts.popleft()
            del self._waiting[client]
            if starts:
                self._waiting[client] = starts  # behind the others
            self._begin(start)
