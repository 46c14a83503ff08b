"""The time that one request has, from its headers to its last token."""

from time import monotonic


class Deadline:
    """Begins when it is made; every stage of the request gets what is left."""

    __slots__ = ("_ends", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        """What there was at the beginning."""
        self._ends = monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds; 0 when it has passed."""
        return max(self._ends - monotonic(), 0.0)
