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
    """The blocks of lists that `pack_blocks` made, joined; None: one is invalid, or they name more than `most`."""
    lists: list[Ids] = []
    for packed in block_runs.split(data):
        rows = block_runs.unpack(packed, most)  # a few bytes may name a million
        if rows is None:
            return None
        lists.append(rows)
        most -= rows.shape[1]
    return Blocks(*(lists[0] if len(lists) == 1 else np.concatenate(lists, axis=1)))
