"""Measurements that take turns, so that all of them see the same machine, and statistics of repeated ones."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import quantiles
from typing import TypeVar

import msgspec

from pdkv.base.clock import MONOTONIC

T = TypeVar("T")


class Spread(msgspec.Struct, frozen=True):
    """The median of one quantity over all rounds, and the quartiles around it."""

    low: float  # lower quartile
    median: float
    high: float  # upper quartile

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """The spread of at least one value; with a single one, all three numbers are equal."""
        found = list(values)
        if len(found) == 1:
            return cls(*found * 3)
        return cls(*quantiles(found, n=4, method="inclusive"))

    @classmethod
    def of_ratios(cls, ours: Sequence[float], theirs: Sequence[float]) -> "Spread":
        """The ratio of each round's first number to its second, which does not change if both are slowed down."""
        return cls.of(mine / other for mine, other in zip(ours, theirs, strict=True))

    def over(self, number: float) -> "Spread":
        """The spread divided by `number`."""
        return Spread(self.low / number, self.median / number, self.high / number)

    def figures(self, name: str) -> dict[str, float]:
        """The figures for a claim of a benchmark."""
        return {f"{name} ms": self.median, f"{name} from": self.low, f"{name} to": self.high}


def take_turns(work: Mapping[str, Callable[[], T]], rounds: int, *, warm: int = 1) -> dict[str, list[T]]:
    """The results of each function in `rounds` rounds, after `warm` rounds that do not count.

    Another function begins each round.
    """
    names, found = list(work), {name: list[T]() for name in work}
    for turn in range(warm + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            result = work[name]()
            if turn >= warm:
                found[name].append(result)
    return found


def times_in_turns(
    work: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = MONOTONIC.now
) -> dict[str, Spread]:
    """Milliseconds of each function, which take turns, by a clock of seconds."""

    def timed(function: Callable[[], object]) -> float:
        start = clock()
        function()
        return (clock() - start) * 1e3

    took = take_turns({name: (lambda f=f: timed(f)) for name, f in work.items()}, rounds)  # type: ignore[misc]
    return {name: Spread.of(each) for name, each in took.items()}
