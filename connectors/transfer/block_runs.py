"""Block ids on the wire. They are sent as runs of adjacent blocks, packed to the byte: even a scattered prompt fits.

A list is three columns (first block, number of blocks, generation of each run), each of them a smallest value and, for
every run, what it has more, in as few bytes as the largest one needs. Of a pool of 2^17 blocks in which nothing is
adjacent a block takes 3 bytes, and as many again where generations differ by as much: 64 KiB name 174,000 tokens in
blocks of 16. (To the bit it would be 246,000, and cost the step thread three times as much.)
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pdkv.connectors.transfer.planning import NO_IDS, Ids, as_ids

MAX_BLOCKS = 1 << 20
"""Blocks that one message may name; more is no message of ours."""

MAX_BLOCK_ID = 1 << 40
"""No pool has so many: the address of a block is within 64 bits."""

_FORM = 2
_HEAD = struct.Struct("<BI")  # form, number of runs
_COLUMN = struct.Struct("<QB")  # smallest value, bytes of each run's rest
_WORD_BYTES = 8
_MOST = int(np.iinfo(np.int64).max)


class Blocks(NamedTuple):
    """Blocks in order, and the generation of each."""

    ids: Ids
    generations: Ids


class _Column(NamedTuple):
    """One number per run."""

    values: Ids
    smallest: int
    stop: int  # where the next one begins
    is_one: bool  # they are all the smallest


def pack_blocks(block_ids: Sequence[int] | Ids, generations: Sequence[int] | Ids | None = None) -> bytes:
    """Blocks, in order, and their generations (None: all 0), for `unpack_blocks`.

    Raises:
        ValueError: not one generation per block, or a number below 0.
    """
    ids = as_ids(block_ids)
    versions = np.zeros_like(ids) if generations is None else as_ids(generations)
    if ids.shape != versions.shape:
        raise ValueError(f"{versions.size} generations for {ids.size} blocks")
    begins = np.ones(ids.size, dtype=np.bool_)
    begins[1:] = (ids[1:] - ids[:-1] != 1) | (versions[1:] != versions[:-1])
    starts = begins.nonzero()[0]
    counts = np.empty_like(starts)
    counts[:-1] = starts[1:] - starts[:-1]
    counts[-1:] = ids.size - starts[-1:]
    columns = (ids[starts], counts, versions[starts])
    return _HEAD.pack(_FORM, starts.size) + b"".join([_pack_column(column) for column in columns])


def unpack_blocks(data: bytes, most: int = MAX_BLOCKS) -> Blocks | None:
    """The inverse; None: no blocks could be meant by that, or more than `most`."""
    if len(data) < _HEAD.size:
        return None
    form, num_runs = _HEAD.unpack_from(data)
    if form != _FORM or num_runs > most:
        return None
    columns: list[_Column] = []
    offset = _HEAD.size
    for _ in range(3):
        column = _unpack_column(data, offset, num_runs)
        if column is None:
            return None
        columns.append(column)
        offset = column.stop
    firsts, counts, generations = columns
    if offset != len(data):
        return None
    if not num_runs:
        return Blocks(NO_IDS, NO_IDS)
    if int(firsts.values.max()) > MAX_BLOCK_ID:
        return None
    if counts.is_one and counts.smallest == 1:
        return Blocks(firsts.values, generations.values)
    if counts.smallest < 1 or counts.values.max() > most or counts.values.sum() > most:
        return None
    before = np.cumsum(counts.values) - counts.values  # blocks of earlier runs
    num_blocks = int(counts.values.sum())
    ids = np.repeat(firsts.values - before, counts.values) + np.arange(num_blocks, dtype=np.int64)
    return Blocks(ids, np.repeat(generations.values, counts.values))


def _pack_column(values: Ids) -> bytes:
    if not values.size:
        return _COLUMN.pack(0, 0)
    smallest = int(values.min())
    if smallest < 0:
        raise ValueError(f"a block list cannot name {smallest}")
    width = ((int(values.max()) - smallest).bit_length() + 7) // 8
    rest = (values - smallest).astype("<i8", copy=False).view(np.uint8).reshape(-1, _WORD_BYTES)
    return _COLUMN.pack(smallest, width) + rest[:, :width].tobytes()


def _unpack_column(data: bytes, offset: int, count: int) -> _Column | None:
    if len(data) < offset + _COLUMN.size:
        return None
    smallest, width = _COLUMN.unpack_from(data, offset)
    offset += _COLUMN.size
    stop = offset + count * width
    if width > _WORD_BYTES or smallest > _MOST or stop > len(data):
        return None
    if not width:
        return _Column(np.full(count, smallest, dtype=np.int64), smallest, stop, is_one=True)
    octets = np.zeros((count, _WORD_BYTES), dtype=np.uint8)
    octets[:, :width] = np.frombuffer(data, np.uint8, count * width, offset).reshape(count, width)
    rest = octets.view("<i8").reshape(-1)
    if count and smallest + (1 << 8 * width) > _MOST and not 0 <= rest.min() <= rest.max() <= _MOST - smallest:
        return None
    return _Column(rest + np.int64(smallest), smallest, stop, is_one=False)
