"""What repeated measurements say: the median, and the quartiles around it."""

from collections.abc import Iterable
from statistics import quantiles

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """Of one quantity over all rounds."""

    low: float  # lower quartile
    median: float
    high: float  # upper quartile

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Of at least one value; of a single one all three are the same."""
        found = list(values)
        if len(found) == 1:
            return cls(*found * 3)
        return cls(*quantiles(found, n=4, method="inclusive"))
