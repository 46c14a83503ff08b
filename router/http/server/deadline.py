"""The time that one request has."""

import math

from pdkv.base.clock import MONOTONIC


class Deadline:
    """Begins when it is made; every stage of the request gets what is left."""

    __slots__ = ("_begins_by", "_ends", "stall_timeout_s", "timeout_s")

    def __init__(self, timeout_s: float, stall_timeout_s: float = math.inf) -> None:
        """`timeout_s`: from the headers to the last token; `stall_timeout_s`: until anything happens. One of
        them may be infinite.
        """
        self.stall_timeout_s = stall_timeout_s
        self.timeout_s = min(timeout_s, stall_timeout_s)
        """What there was at the beginning, until the request is ready for the engines."""
        now = MONOTONIC.now()
        self._begins_by = now + self.timeout_s
        self._ends = now + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until the request must be ready for the engines; 0 when they have passed."""
        return max(self._begins_by - MONOTONIC.now(), 0.0)

    @property
    def whole_left_s(self) -> float:
        """Seconds until its last token must be there; 0 when they have passed, infinite if it may take as long as it
        gets on.
        """
        return max(self._ends - MONOTONIC.now(), 0.0)
