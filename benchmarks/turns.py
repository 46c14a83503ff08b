"""Functions timed in turns, so that all of them see the same machine."""

import time
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import NamedTuple


class Times(NamedTuple):
    """Of one function, in milliseconds."""

    median: float
    lower: float  # the quartiles
    upper: float

    def figures(self, name: str) -> dict[str, float]:
        """For a claim."""
        return {f"{name} ms": self.median, f"{name} from": self.lower, f"{name} to": self.upper}


def in_turns(
    functions: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Times]:
    """Each function `rounds` times after one that does not count; the one that begins changes every round."""
    names, took = list(functions), {name: [0.0] * 0 for name in functions}
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = clock()
            functions[name]()
            if turn:
                took[name].append((clock() - start) * 1e3)
    return {name: _spread(each) for name, each in took.items()}


def _spread(numbers: list[float]) -> Times:
    lower, _, upper = quantiles(numbers, n=4) if len(numbers) > 1 else numbers * 3
    return Times(median(numbers), lower, upper)
