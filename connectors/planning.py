"""Transfer planning: pure functions from block ids and token ranges to few, large pieces. Nothing here moves a byte."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.block_keys import HASH_BLOCK_SIZE

Ids = npt.NDArray[np.int64]


class Run(NamedTuple):
    """Blocks [source, source + num_blocks) go to [destination, destination + num_blocks)."""

    source: int
    destination: int
    num_blocks: int


class Segment(NamedTuple):
    """`num_tokens` tokens inside one source and one destination block; indices count from the range's first blocks."""

    source_index: int
    source_offset: int  # tokens into that block
    destination_index: int
    destination_offset: int  # tokens into that block
    num_tokens: int


def as_ids(ids: Sequence[int] | Ids) -> Ids:
    """Block ids as an int64 vector."""
    return np.asarray(ids, dtype=np.int64)


def run_starts(*ids: Ids) -> Ids:
    """Positions at which a new run begins: there at least one of the vectors does not go on by one.

    Args:
        ids: vectors of one common length n.

    Returns:
        Ascending positions, the first of them 0; empty where n is 0.
    """
    if ids[0].size == 0:
        return as_ids([])
    breaks = np.zeros(ids[0].size, dtype=np.bool_)
    breaks[0] = True
    for vector in ids:
        breaks[1:] |= np.diff(vector) != 1
    return np.flatnonzero(breaks).astype(np.int64)


def merge_runs(source: Sequence[int] | Ids, destination: Sequence[int] | Ids) -> list[Run]:
    """Merge pairs of blocks (source[i] → destination[i]) that are adjacent on both sides, in the order given.

    Raises:
        ValueError: the two sides differ in length.
    """
    sources, destinations = as_ids(source), as_ids(destination)
    if sources.size != destinations.size:
        raise ValueError(f"{sources.size} source blocks for {destinations.size} destination blocks")
    starts = run_starts(sources, destinations)
    counts = np.diff(starts, append=sources.size)
    return [
        Run(int(sources[start]), int(destinations[start]), int(count))
        for start, count in zip(starts, counts, strict=True)
    ]


def token_segments(start: int, stop: int, source_size: int, destination_size: int) -> list[Segment]:
    """Cut tokens [start, stop) at the block borders of both sides, whose blocks hold different numbers of tokens.

    Index 0 on each side is the block that holds token `start`. Every segment lies within one block of each side.

    Raises:
        ValueError: an empty block or a range that runs backwards.
    """
    if source_size < 1 or destination_size < 1 or not 0 <= start <= stop:
        raise ValueError(f"no such transfer: tokens [{start}, {stop}), blocks of {source_size} and {destination_size}")
    segments: list[Segment] = []
    first_source, first_destination = start // source_size, start // destination_size
    position = start
    while position < stop:
        source, source_offset = divmod(position, source_size)
        destination, destination_offset = divmod(position, destination_size)
        length = min(source_size - source_offset, destination_size - destination_offset, stop - position)
        segments.append(
            Segment(source - first_source, source_offset, destination - first_destination, destination_offset, length)
        )
        position += length
    return segments


def whole_blocks(units: Sequence[int], units_per_block: int) -> list[int] | None:
    """The blocks that `units` (block * units_per_block + position) fill one after the other from their first unit on.

    The last block may lack units at its end. None: some block is not taken in order and from its beginning.
    """
    blocks = [unit // units_per_block for unit in units[::units_per_block]]
    for i, unit in enumerate(units):
        if unit != blocks[i // units_per_block] * units_per_block + i % units_per_block:
            return None
    return blocks


def unit_index(block_ids: Sequence[int] | Ids, block_size: int, start: int, stop: int) -> Ids:
    """Units that hold tokens [start, stop): block * units_per_block + position in the block, one per hash block.

    Args:
        block_ids: the first one holds token 0.
        block_size: a multiple of the hash block size, as `start` is; the last unit may be wanted in part.

    Raises:
        ValueError: a range that is not cut at hash blocks, or longer than the blocks.
    """
    if block_size % HASH_BLOCK_SIZE or start % HASH_BLOCK_SIZE or not 0 <= start <= stop:
        raise ValueError(f"tokens [{start}, {stop}) in blocks of {block_size} are no units of {HASH_BLOCK_SIZE}")
    if stop > len(block_ids) * block_size:
        raise ValueError(f"token {stop} lies behind {len(block_ids)} blocks of {block_size}")
    units_per_block = block_size // HASH_BLOCK_SIZE
    positions = np.arange(start // HASH_BLOCK_SIZE, -(-stop // HASH_BLOCK_SIZE), dtype=np.int64)
    return as_ids(block_ids)[positions // units_per_block] * units_per_block + positions % units_per_block
