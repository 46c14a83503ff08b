"""A bound on the bytes that many requests hold together."""

import threading
from types import TracebackType

from pdkv.errors import ServerBusy


class ByteBudget:
    """Bytes that are held now, over all requests. Safe to use from several threads."""

    def __init__(self, limit: int, what: str) -> None:
        """`what` the bytes are, for the error."""
        self._limit = limit
        self._what = what
        self._held = 0
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Bytes that are held now; 0 when nothing is under way."""
        return self._held

    def take(self, size: int) -> None:
        """Hold `size` bytes more. What is alone may exceed the limit: else it could never run.

        Raises:
            ServerBusy: together they would be more than the limit.
        """
        with self._lock:
            if self._held and self._held + size > self._limit:
                raise ServerBusy(f"{self._what} of all requests together exceed {self._limit} bytes: try again")
            self._held += size

    def give(self, size: int) -> None:
        """Let go of what was taken."""
        with self._lock:
            self._held -= size
            assert self._held >= 0, "more was given back than taken"


class Share:
    """What one request holds of a budget, given back on exit."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._size = 0

    def take(self, size: int) -> None:
        """Hold `size` bytes more. Raises ServerBusy."""
        self._budget.take(size)
        self._size += size

    def __enter__(self) -> "Share":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._budget.give(self._size)
        self._size = 0
