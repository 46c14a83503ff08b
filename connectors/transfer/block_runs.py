"""Block ids on the wire: see kernels/block_runs.py."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pdkv.connectors.transfer.planning import Ids, as_ids
from pdkv.kernels import block_runs
from pdkv.kernels.block_runs import MAX_BLOCK_ID as MAX_BLOCK_ID

MAX_BLOCKS = 1 << 20
"""The most blocks named by one message; more are invalid."""


class Blocks(NamedTuple):
    """Blocks in order, and the generation of each."""

    ids: Ids
    generations: Ids


def pack_blocks(block_ids: Sequence[int] | Ids, generations: Sequence[int] | Ids | None = None) -> bytes:
    """Blocks, in order, and their generations (None: all 0), for `unpack_blocks`.

    Raises:
        ValueError: there is not one generation per block, or a number is below 0.
    """
    ids = as_ids(block_ids)
    versions = np.zeros(ids.size, np.int64) if generations is None else as_ids(generations)
    if ids.shape != versions.shape:
        raise ValueError(f"{versions.size} generations for {ids.size} blocks")
    return block_runs.pack(np.ascontiguousarray(ids), np.ascontiguousarray(versions))


def unpack_blocks(data: bytes, most: int = MAX_BLOCKS) -> Blocks | None:
    """The inverse of `pack_blocks`; None: the bytes are invalid, or name more than `most` blocks."""
    rows = block_runs.unpack(data, most)
    return None if rows is None else Blocks(*rows)
