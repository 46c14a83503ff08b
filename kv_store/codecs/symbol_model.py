"""Expected frequencies of deltas: static tables, from the narrowest to the widest.

A table is a logistic distribution, whose tails lie between those of a normal and a Laplace distribution; its width
depends on the mean |delta|. A coded value names a table only by its number. The tables are made in decimal arithmetic,
which gives the same digits everywhere: with other tables, values would decode to other numbers.
"""

from decimal import Decimal, localcontext
from functools import cache
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from pdkv.kernels.cachegen import Model
from pdkv.kernels.rans import MAX_TABLES, SLOTS, Tables

LARGEST: Final = 127
ZERO: Final = 128
"""The symbol of no delta."""

_NARROWEST, _RATIO = Decimal("0.06"), Decimal("1.55")  # scales of the distributions
_LIMIT = 12  # scales: what lies beyond comes once in 80,000 numbers
_DIGITS = 28


@cache
def symbol_model() -> Model:
    """The tables, and which channels they are for."""
    scales = [_NARROWEST * _RATIO**i for i in range(MAX_TABLES)]
    limits = [min(int(scale * _LIMIT) + 2, LARGEST) for scale in scales[:-1]] + [LARGEST]
    counts = [_frequencies(scale, limit) for scale, limit in zip(scales, limits, strict=True)]
    means = [_mean(row) for row in counts]
    between = [int((a * b) ** 0.5 * 256) for a, b in pairwise(means)]
    return Model(Tables(np.stack(counts)), np.array([*between, LARGEST * 256], np.int32), np.array(limits, np.int32))


def _frequencies(scale: Decimal, limit: int) -> npt.NDArray[np.uint32]:
    """(256,), of deltas from -limit to limit; each has one at least, the rest of the slots goes by the distribution."""
    counts = np.zeros(256, np.uint32)
    with localcontext(prec=_DIGITS):
        edges = [1 / (1 + (-(Decimal(2 * delta + 1) / 2) / scale).exp()) for delta in range(-limit - 1, limit + 1)]
        spare = SLOTS - (2 * limit + 1)
        for delta, (below, above) in zip(range(-limit, limit + 1), pairwise(edges), strict=True):
            counts[ZERO + delta] = 1 + int((above - below) * spare)
    counts[ZERO] += SLOTS - counts.sum()
    return counts


def _mean(frequencies: npt.NDArray[np.uint32]) -> float:
    """The average |delta| of a table."""
    return float((frequencies * np.abs(np.arange(256) - ZERO)).sum()) / SLOTS
