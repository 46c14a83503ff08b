"""Block ids on the wire: see kernels/block_runs.py."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pdkv.connectors.transfer.planning import Ids, as_ids
from pdkv.kernels import block_runs
from pdkv.kernels.block_runs import MAX_BLOCK_ID as MAX_BLOCK_ID

MAX_BLOCKS = 1 << 20
"""Blocks that one message may name; more is no message of ours."""


class Blocks(NamedTuple):
    """Blocks in order, and the generation of each."""

    ids: Ids
    generations: Ids


def pack_blocks(block_ids: Sequence[int] | Ids, generations: Sequence[int] | Ids | None = None) -> bytes:
    """Blocks, in order, and their generations (None: all 0), for `unpack_blocks`.

    Raises:
        ValueError: not one generation per block, or a number below 0.
    """
    ids = as_ids(block_ids)
    versions = np.zeros(ids.size, np.int64) if generations is None else as_ids(generations)
    if ids.shape != versions.shape:
        raise ValueError(f"{versions.size} generations for {ids.size} blocks")
    return block_runs.pack(np.ascontiguousarray(ids), np.ascontiguousarray(versions))


def unpack_blocks(data: bytes, most: int = MAX_BLOCKS) -> Blocks | None:
    """The inverse; None: no blocks could be meant by that, or more than `most`."""
    rows = block_runs.unpack(data, most)
    return None if rows is None else Blocks(*rows)
