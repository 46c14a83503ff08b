"""Limits how often a log line is written: misbehaving peers must not fill a disk."""

from math import inf

from pdkv.base.clock import MONOTONIC


class LogLimit:
    """Lets one line pass per interval. One thread at a time."""

    def __init__(self, interval_s: float = 1.0) -> None:
        self._interval_s = interval_s
        self._next = -inf

    def passes(self, now: float | None = None) -> bool:
        """Whether a line may be logged now, which then counts. `now`: None means the monotonic clock's time."""
        now = MONOTONIC.now() if now is None else now
        if now < self._next:
            return False
        self._next = now + self._interval_s
        return True
