"""Posts of whole blocks over NIXL between engines of equal layout: which go directly, and in what pieces."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pdkv.connectors.transfer.planning import Ids

POST_BYTES = 8 * 1024 * 1024
"""Bytes of one post: between two of them a cancel, the deadline and a shutdown are noticed."""

DEVICE_POST_BYTES = 256 * 1024 * 1024
"""Bytes of one post into a GPU's memory, which blocks no thread: the GPU would idle between two posts."""

PIECE_BYTES = 24 * 1024
"""Cost of a piece besides its bytes, in bytes: a call of the kernel."""

Post = tuple[Ids, Ids, Ids]
"""Byte offsets at the source and at the destination, and sizes, of the pieces posted at once."""


def are_gathered(sizes: Ids, below: int, at_least: int) -> npt.NDArray[np.bool_]:
    """Which pieces of these sizes in bytes are gathered: those of less than `below`, if there are `at_least` of them,
    since each piece that is sent directly is an operation of its own.
    """
    small = sizes < below
    return small if np.count_nonzero(small) >= at_least else np.zeros_like(small)


def cut_pieces(table: Ids, limit: int = POST_BYTES) -> list[Post]:
    """Pieces as posts that take about equally long, of at most about `limit` bytes.

    Args:
        table: (n, 3): source, destination and size of each, in bytes.
    """
    if not table.size:
        return []
    parts = -(-table[:, 2] // limit)  # of each piece
    pieces = np.repeat(table, parts, axis=0)
    offsets = (np.arange(len(pieces)) - np.repeat(np.cumsum(parts) - parts, parts)) * limit
    sources, destinations, sizes = pieces[:, 0] + offsets, pieces[:, 1] + offsets, pieces[:, 2] - offsets
    sizes = np.minimum(sizes, limit)
    posts = (np.cumsum(sizes + PIECE_BYTES) - 1) // limit
    cuts = [0, *(np.flatnonzero(np.diff(posts)) + 1).tolist(), len(posts)]
    return [(sources[a:b], destinations[a:b], sizes[a:b]) for a, b in pairwise(cuts)]


def expand_blocks(block_ids: Ids, units_per_block: int) -> Ids:
    """The units of whole blocks."""
    units: Ids = (block_ids[:, None] * units_per_block + np.arange(units_per_block)).ravel()
    return units
