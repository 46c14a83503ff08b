"""Measures how fast a store is read: bytes, and the seconds during which a read was running."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pdkv.base.clock import MONOTONIC


class ReadTime(NamedTuple):
    """Totals since the start."""

    num_bytes: int = 0
    seconds: float = 0.0


class ReadMeter:
    """Threads may share it. Concurrent reads share their seconds, as they share the connection to the store."""

    def __init__(self, now: Callable[[], float] = MONOTONIC.now) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._num_reading = 0
        self._since = 0.0  # when the first of the current reads began
        self._total = ReadTime()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context around a read, whatever its result."""
        with self._lock:
            if not self._num_reading:
                self._since = self._now()
            self._num_reading += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_reading -= 1
                if not self._num_reading:
                    self._total = self._total._replace(seconds=self._total.seconds + self._now() - self._since)

    def add(self, num_bytes: int) -> None:
        """Count bytes that were found."""
        with self._lock:
            self._total = self._total._replace(num_bytes=self._total.num_bytes + num_bytes)

    @property
    def total(self) -> ReadTime:
        """The totals until now, including running reads; never blocks for longer than a moment."""
        with self._lock:
            running = self._now() - self._since if self._num_reading else 0.0
            return self._total._replace(seconds=self._total.seconds + running)
