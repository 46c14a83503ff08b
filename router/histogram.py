"""Histograms: observing a value for every token costs next to nothing; they are exported on demand."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate


def bounds(text: str) -> tuple[float, ...]:
    """Upper bounds from a text with spaces between them."""
    return tuple(map(float, text.split()))


class Histogram:
    """Counts of values by upper bound, and their sum. One thread observes."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Iterable[float]) -> None:
        """`bounds`: upper bounds of every reader; values above the last one count, too."""
        self.bounds = tuple(sorted(set(bounds)))
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Number of observed values."""
        return sum(self.counts)

    def cumulative(self, bounds: Sequence[float]) -> list[int]:
        """For each of these bounds, which must be among its own, the number of values at or below it."""
        totals = dict(zip(self.bounds, accumulate(self.counts), strict=False))
        return [totals[bound] for bound in bounds]
