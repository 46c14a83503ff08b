"""Measures how much of the time of loads and saves was hidden, because the step thread computed instead of waiting for
them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from pdkv.base.clock import MONOTONIC
from pdkv.wire.reports import ConnectorStats


class ComputeClock:
    """Seconds for which the step thread has computed. That thread starts and stops the clock; others read it at any
    time.

    With an asynchronous device this is the time in which steps are launched, which is less than the device's own time.
    """

    def __init__(self, now: Callable[[], float] = MONOTONIC.now) -> None:
        self.now = now
        self._state: tuple[float, float | None] = (0.0, None)  # seconds up to its last start, and the time of that

    def start(self) -> None:
        """Start: a step begins, or continues after a wait."""
        self._state = (self.at(now := self.now()), now)

    def stop(self) -> None:
        """Stop: the step has ended, or waits."""
        self._state = (self.at(self.now()), None)

    @property
    def is_running(self) -> bool:
        """Whether something is being computed now."""
        return self._state[1] is not None

    def at(self, now: float) -> float:
        """The clock's reading at a time not before the last start or stop."""
        seconds, since = self._state
        return seconds if since is None else seconds + max(now - since, 0.0)


class HiddenTime:
    """Times of the jobs of one rank's loads and saves, by the clock of its step thread. Threads may share it."""

    def __init__(self, clock: ComputeClock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._stats = ConnectorStats()

    @contextmanager
    def measure(self, direction: Literal["load", "save"]) -> Iterator[None]:
        """Measure a job of a load or a save, on its thread."""
        began = self._clock.now()
        computed = self._clock.at(began)
        try:
            yield
        finally:
            ended = self._clock.now()
            seconds = ended - began
            hidden = min(max(self._clock.at(ended) - computed, 0.0), seconds)
            is_load = direction == "load"
            with self._lock:
                self._stats += ConnectorStats(
                    load_seconds=seconds if is_load else 0.0,
                    hidden_load_seconds=hidden if is_load else 0.0,
                    save_seconds=0.0 if is_load else seconds,
                    hidden_save_seconds=0.0 if is_load else hidden,
                )

    @property
    def stats(self) -> ConnectorStats:
        """Counts since the start."""
        with self._lock:
            return self._stats
