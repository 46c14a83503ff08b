"""The deadlines of one request."""

import math

from pdkv.base.clock import MONOTONIC


class Deadline:
    """Starts when it is created; every stage of the request gets the time that is left."""

    __slots__ = ("_begins_by", "_ends", "stall_timeout_s", "timeout_s")

    def __init__(self, timeout_s: float, stall_timeout_s: float = math.inf) -> None:
        """`timeout_s`: from the headers to the last token; `stall_timeout_s`: until anything happens. One may be
        infinite.
        """
        self.stall_timeout_s = stall_timeout_s
        self.timeout_s = min(timeout_s, stall_timeout_s)
        """Seconds at the start until the request must be ready for the engines."""
        now = MONOTONIC.now()
        self._begins_by = now + self.timeout_s
        self._ends = now + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until the request must be ready for the engines; 0 if they have passed."""
        return max(self._begins_by - MONOTONIC.now(), 0.0)

    @property
    def whole_left_s(self) -> float:
        """Seconds until its last token is due; 0 if they have passed, infinite if there is no total limit."""
        return max(self._ends - MONOTONIC.now(), 0.0)
