"""Block ids on the wire. They are sent as runs of adjacent blocks, packed to the byte: even a scattered prompt fits.

A list is three columns (first block, number of blocks, generation of each run), each stored as its smallest value and,
for every run, the difference from it, in as few bytes as the largest difference needs. In a pool of 2^17 blocks without
adjacent ones, a block takes 3 bytes, and as many again if generations differ by as much: 64 KiB name 174,000 tokens in
blocks of 16. (To the bit it would be 246,000.) Compiled (block_runs.c) if the package was built with a compiler.
"""

import ctypes
import struct
from functools import cache
from itertools import repeat

import numpy as np
import numpy.typing as npt

from pdkv.kernels.compiled import NUMBER, load_library

Numbers = npt.NDArray[np.int64]

MAX_BLOCK_ID = 1 << 40
"""No pool has so many: the address of a block is within 64 bits."""

_FORM = 2
_HEAD = struct.Struct("<BI")  # form, number of runs
_COLUMN = struct.Struct("<QB")  # smallest value, bytes of each run's rest
_WORD_BYTES = 8
_MOST = int(np.iinfo(np.int64).max)


@cache
def _library() -> ctypes.CDLL | None:
    any_ = ctypes.py_object
    functions = {"pdkv_pack_blocks": (any_, [any_, any_]), "pdkv_unpack_blocks": (any_, [any_, NUMBER])}
    return load_library("_block_keys", functions, keeps_gil=True)


def available() -> bool:
    """Whether the compiled form is available."""
    return _library() is not None


def pack(ids: Numbers, generations: Numbers) -> bytes:
    """Blocks, in order, and their generations, for `unpack`. Both (n,), contiguous.

    Raises:
        ValueError: a number below 0.
    """
    if (library := _library()) is not None:
        packed: bytes = library.pdkv_pack_blocks(ids, generations)
        return packed
    runs: list[list[int]] = []
    for block_id, generation in zip(ids.tolist(), generations.tolist(), strict=True):
        if runs and block_id == runs[-1][0] + runs[-1][1] and generation == runs[-1][2]:
            runs[-1][1] += 1
        else:
            runs.append([block_id, 1, generation])
    columns = zip(*runs, strict=True) if runs else repeat((), 3)
    return _HEAD.pack(_FORM, len(runs)) + b"".join(map(_pack_column, columns))


def unpack(data: bytes, most: int) -> Numbers | None:
    """The inverse of `pack`: (2, n), block ids and generations. None: the bytes are invalid, or name more than `most`
    blocks.
    """
    if (library := _library()) is not None:
        rows = library.pdkv_unpack_blocks(data, most)
    else:
        rows = _unpack(data, most)
    return None if rows is None else np.frombuffer(rows, np.int64).reshape(2, -1)


def split(data: bytes) -> list[bytes]:
    """The packed lists of which `data` consists, as their heads say; whether each is valid, `unpack` says."""
    lists: list[bytes] = []
    begin = 0
    while not lists or begin < len(data):
        stop = begin + _HEAD.size
        num_runs = _HEAD.unpack_from(data, begin)[1] if stop <= len(data) else 0
        for _ in range(3):
            stop += _COLUMN.size
            stop += num_runs * data[stop - 1] if stop <= len(data) else 0
        lists.append(data[begin:stop])
        begin = stop
    return lists


def _pack_column(values: tuple[int, ...]) -> bytes:
    smallest = min(values, default=0)
    if smallest < 0:
        raise ValueError(f"a block list cannot name {smallest}")
    width = ((max(values, default=0) - smallest).bit_length() + 7) // 8
    return _COLUMN.pack(smallest, width) + b"".join((value - smallest).to_bytes(width, "little") for value in values)


def _unpack(data: bytes, most: int) -> bytes | None:
    if len(data) < _HEAD.size:
        return None
    form, num_runs = _HEAD.unpack_from(data)
    if form != _FORM or num_runs > most:
        return None
    columns: list[list[int]] = []
    offset = _HEAD.size
    for _ in range(3):
        if len(data) < offset + _COLUMN.size:
            return None
        smallest, width = _COLUMN.unpack_from(data, offset)
        begin, stop = offset + _COLUMN.size, offset + _COLUMN.size + num_runs * width
        if width > _WORD_BYTES or stop > len(data):
            return None
        starts = range(begin, stop, width or 1)
        column = [smallest + int.from_bytes(data[at : at + width], "little") for at in starts] or [smallest] * num_runs
        if max(column, default=smallest) > _MOST:
            return None
        columns.append(column)
        offset = stop
    firsts, counts, generations = columns
    if offset != len(data) or max(firsts, default=0) > MAX_BLOCK_ID or min(counts, default=1) < 1 or sum(counts) > most:
        return None
    ids = [first + i for first, count in zip(firsts, counts, strict=True) for i in range(count)]
    versions = [generation for generation, count in zip(generations, counts, strict=True) for _ in range(count)]
    return np.array([ids, versions], dtype=np.int64).tobytes()


_library()  # now: the first call may come from a step thread, which reads no files
