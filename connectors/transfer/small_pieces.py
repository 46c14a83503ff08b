"""Decides which small pieces of memory are sent directly, and which are gathered first. One decision for all
transports.

A piece sent directly has a fixed cost besides its bytes; gathered pieces are copied once more on each side. If one call
takes many pieces (the copy kernel from a mapped arena, vectors of a socket), pieces of 2 KiB
cost less than their copies, and nothing is gathered. If each piece is a separate operation, such as a descriptor of
NIXL, pieces below some size are gathered. The cost of an operation depends on the network between two hosts, which
cannot be measured at the start of one of them, so the size is an option.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.connectors.transfer.planning import Ids


class Gate(NamedTuple):
    """Pieces of less than `below` bytes are gathered if there are at least `at_least` of them."""

    below: int
    at_least: int

    def choose(self, sizes: Ids) -> npt.NDArray[np.bool_]:
        """Which pieces of these sizes in bytes are gathered, shape (len(sizes),)."""
        small = sizes < self.below
        return small if np.count_nonzero(small) >= self.at_least else np.zeros_like(small)
