"""Small pieces of memory: which of them go as they lie, and which are gathered first. One decision for all transports.

What goes as it lies costs something for each piece beside its bytes; what is gathered is copied once more on each
side. Where one call takes many pieces (the copy kernel out of a mapped arena, vectors of a socket or of
process_vm_readv), those of 2 KiB cost less than their copies: there nothing is gathered, and nobody asks. Where each
piece is an operation of its own, as a descriptor of NIXL is, pieces below some size are gathered. How dear an
operation is depends on the wire between two hosts, which no measurement at the start of one of them shows: the size
is an option.
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
