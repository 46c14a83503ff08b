"""Observations by size: what is observed for every token costs next to nothing, and is exported when asked for."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate


def bounds(text: str) -> tuple[float, ...]:
    """Upper bounds, written with spaces between them."""
    return tuple(map(float, text.split()))


class Histogram:
    """Counts of values by upper bound, and their sum. One thread observes."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Iterable[float]) -> None:
        """`bounds`: upper bounds of all who will ask; what is above the last one counts, too."""
        self.bounds = tuple(sorted(set(bounds)))
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Values observed."""
        return sum(self.counts)

    def cumulative(self, bounds: Sequence[float]) -> list[int]:
        """By each of these bounds, which are some of its own: how many values are at most that."""
        totals = dict(zip(self.bounds, accumulate(self.counts), strict=False))
        return [totals[bound] for bound in bounds]
