"""Block ids on the wire. They are sent as runs of adjacent blocks, packed to the bit: even a scattered prompt fits.

A list is three columns (first block, number of blocks, generation of each run), each of them a smallest value and, for
every run, what it has more, in as few bits as the largest one needs. Of a pool of 2^17 blocks in which nothing is
adjacent a block takes 17 bits, and as many again where generations differ by as much: 64 KiB name 246,000 tokens in
blocks of 16.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.connectors.transfer.planning import Ids, as_ids

MAX_BLOCKS = 1 << 20
"""Blocks that one message may name; more is no message of ours."""

MAX_BLOCK_ID = 1 << 40
"""No pool has so many: the address of a block is within 64 bits."""

_FORM = 1
_HEAD = struct.Struct("<BI")  # form, number of runs
_COLUMN = struct.Struct("<QB")  # smallest value, bits of each run's rest
_MAX_BITS = 63
_WORD_BYTES = 8


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
    versions = np.zeros_like(ids) if generations is None else as_ids(generations)
    if ids.shape != versions.shape:
        raise ValueError(f"{versions.size} generations for {ids.size} blocks")
    begins = np.ones(ids.size, dtype=np.bool_)
    begins[1:] = (np.diff(ids) != 1) | (np.diff(versions) != 0)
    starts = np.flatnonzero(begins)
    counts = np.diff(starts, append=ids.size)
    columns = (ids[starts], counts, versions[starts])
    return _HEAD.pack(_FORM, starts.size) + b"".join(_pack_column(column) for column in columns)


def unpack_blocks(data: bytes, most: int = MAX_BLOCKS) -> Blocks | None:
    """The inverse; None: no blocks could be meant by that, or more than `most`."""
    if len(data) < _HEAD.size:
        return None
    form, num_runs = _HEAD.unpack_from(data)
    if form != _FORM or num_runs > most:
        return None
    columns: list[Ids] = []
    offset = _HEAD.size
    for _ in range(3):
        column = _unpack_column(data, offset, num_runs)
        if column is None:
            return None
        columns.append(column[0])
        offset = column[1]
    firsts, counts, generations = columns
    if offset != len(data) or (num_runs and (counts.min() < 1 or counts.max() > most or counts.sum() > most)):
        return None
    if num_runs and int(firsts.max()) > MAX_BLOCK_ID:
        return None
    before = np.cumsum(counts) - counts  # blocks of earlier runs
    ids = np.repeat(firsts - before, counts) + np.arange(int(counts.sum()), dtype=np.int64)
    return Blocks(ids, np.repeat(generations, counts))


def _pack_column(values: Ids) -> bytes:
    smallest = int(values.min(initial=values[0])) if values.size else 0
    if smallest < 0:
        raise ValueError(f"a block list cannot name {smallest}")
    rest = (values - smallest).astype(np.uint64)
    bits = int(rest.max(initial=0)).bit_length()
    return _COLUMN.pack(smallest, bits) + _to_bits(rest, bits)


def _unpack_column(data: bytes, offset: int, count: int) -> tuple[Ids, int] | None:
    """(the column, where the next one begins)."""
    if len(data) < offset + _COLUMN.size:
        return None
    smallest, bits = _COLUMN.unpack_from(data, offset)
    offset += _COLUMN.size
    stop = offset + (count * bits + 7) // 8
    if bits > _MAX_BITS or smallest > np.iinfo(np.int64).max or stop > len(data):
        return None
    rest = _from_bits(data[offset:stop], count, bits)
    if count and smallest > np.iinfo(np.int64).max - int(rest.max()):
        return None
    return rest + np.int64(smallest), stop


def _to_bits(values: npt.NDArray[np.uint64], bits: int) -> bytes:
    """The lowest `bits` bits of each value, the lowest one first."""
    octets = values.astype("<u8").view(np.uint8).reshape(-1, 8)[:, : (bits + 7) // 8]
    unpacked = np.unpackbits(octets, axis=1, count=bits, bitorder="little") if bits else octets[:, :0]
    return np.packbits(unpacked.ravel(), bitorder="little").tobytes()


def _from_bits(data: bytes, count: int, bits: int) -> Ids:
    """The inverse of `_to_bits`."""
    if not count or not bits:
        return np.zeros(count, dtype=np.int64)
    starts = np.arange(count, dtype=np.int64) * bits
    padded = data + bytes(2 * _WORD_BYTES)
    # A word from every byte on: a value begins within one, and what is not in that is in the next.
    words = np.ndarray(len(data) + _WORD_BYTES, dtype="<u8", buffer=padded, strides=(1,))
    first, shift = starts >> 3, (starts & 7).astype(np.uint64)
    values = words[first] >> shift
    if bits > 8 * _WORD_BYTES - 7:
        values |= words[first + _WORD_BYTES] << (np.uint64(63) - shift) << np.uint64(1)
    rest: Ids = (values & np.uint64((1 << bits) - 1)).astype(np.int64)
    return rest
