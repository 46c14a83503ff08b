"""The digest of KV: a 64-bit hash of each row, seeded with the row's layer, head and side, summed over rows.

A row is the K or the V of one KV head in one layer for the tokens of a hash block: contiguous in a pool, and the same
bytes wherever it lies. `hash_rows` defines the hash; `digest.c` computes the same bits, alone or while it copies, and
`digest_triton.py` does so for device memory.
"""

import ctypes
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from pdkv.kernels.compiled import NUMBER, POINTER, load_library
from pdkv.kernels.host import Rows

Bytes = npt.NDArray[np.uint8]
Digests = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]

STRIPE_WORDS: Final = 8
DELTA: Final = 0x9E3779B97F4A7C15  # from a stripe's keys to the next one's
LENGTH: Final = 0xD6E8FEB86659FD93  # of each byte of a row's length
MIX_1: Final = 0xFF51AFD7ED558CCD
MIX_2: Final = 0xC4CEB9FE1A85EC53
KEYS: Final = (
    0xB8FE6C3923A44BBE, 0x7C01812CF721AD1C, 0xDED46DE9839097DB, 0x7240A4A4B7B3671F,
    0xCB79E64ECCC0E578, 0x825AD07DCCFF7221, 0xB8084674F743248E, 0xE03590E6813A264C,
)  # fmt: skip
LANES: Final = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3,
)  # fmt: skip

_U32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@cache
def _library() -> ctypes.CDLL | None:
    return load_library("_host", {"pdkv_digest": (None, [*[POINTER] * 7, *[NUMBER] * 8])})


def available() -> bool:
    """Whether the compiled kernel is available; without it numpy is used."""
    return _library() is not None


def mix(values: Digests) -> Digests:
    """The last step of the hash, a bijection in which every bit of a value affects every bit of the result."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(MIX_1)
    values = (values ^ (values >> np.uint64(29))) * np.uint64(MIX_2)
    return values ^ (values >> _U32)


def seeds_of(layers: range, heads: range, sides: int = 2) -> Digests:
    """Seeds of rows, (layers * sides, heads): K and V of each layer. `heads` are numbered across all ranks of an
    engine.
    """
    outer = np.arange(sides * layers.start, sides * layers.stop, dtype=np.uint64)
    return mix((outer[:, None] << _U32) + np.arange(heads.start, heads.stop, dtype=np.uint64)[None, :] + np.uint64(1))


def hash_rows(rows: Bytes, seeds: Digests) -> Digests:
    """The hashes of rows of equal size.

    Args:
        rows: (..., bytes).
        seeds: broadcastable to (...).
    """
    size = rows.shape[-1]
    stripes = -(-size // (8 * STRIPE_WORDS))
    padded = np.zeros((*rows.shape[:-1], stripes * 8 * STRIPE_WORDS), dtype=np.uint8)
    padded[..., :size] = rows
    words = padded.view("<u8").reshape(*rows.shape[:-1], stripes, STRIPE_WORDS)
    keys = np.array(KEYS, dtype=np.uint64) + np.arange(stripes, dtype=np.uint64)[:, None] * np.uint64(DELTA)
    x = words ^ keys
    neighbours = words.reshape(*words.shape[:-1], 4, 2)[..., ::-1].reshape(words.shape)
    sums = ((x & _LOW) * (x >> _U32) + neighbours).sum(axis=-2, dtype=np.uint64)
    sums = (sums ^ (sums >> np.uint64(29))) * np.array(LANES, dtype=np.uint64)
    length = np.uint64(size * LENGTH % (1 << 64))
    return mix((sums.sum(axis=-1, dtype=np.uint64) + length) ^ seeds)


def add_digests(
    digests: Digests,
    seeds: Digests,
    source: Bytes,
    source_offsets: Offsets,
    rows: Rows,
    *,
    sizes: Offsets | None = None,
    target: Bytes | None = None,
    target_offsets: Offsets | None = None,
) -> None:
    """Add the hashes of units' rows to `digests`, and copy the units if a target is given. Releases the GIL.

    The caller has checked all bounds.

    Args:
        digests: (n, rows.inner), contiguous.
        seeds: (rows.outer, rows.inner), contiguous.
        source, target: flat; nothing overlaps.
        source_offsets, target_offsets: (n,) bytes, where each unit's first row begins.
        sizes: (n,) bytes of each of a unit's rows that are digested; None: all. All bytes are copied in any case.
    """
    assert digests.flags.c_contiguous
    assert digests.shape == (source_offsets.size, rows.inner)
    assert seeds.flags.c_contiguous
    assert seeds.shape == (rows.outer, rows.inner)
    if (library := _library()) is None:
        _add_digests_reference(digests, seeds, source, source_offsets, rows, sizes, target, target_offsets)
        return
    library.pdkv_digest(
        digests.ctypes.data,
        seeds.ctypes.data,
        None if sizes is None else sizes.ctypes.data,
        None if target is None else target.ctypes.data,
        source.ctypes.data,
        None if target_offsets is None else target_offsets.ctypes.data,
        source_offsets.ctypes.data,
        source_offsets.size,
        *rows,
    )


def _add_digests_reference(
    digests: Digests,
    seeds: Digests,
    source: Bytes,
    source_offsets: Offsets,
    rows: Rows,
    sizes: Offsets | None,
    target: Bytes | None,
    target_offsets: Offsets | None,
) -> None:
    """What the kernel does, in numpy."""
    for i, offset in enumerate(source_offsets.tolist()):
        unit = _rows_at(source, offset, rows, rows.source_outer_stride, rows.source_inner_stride)
        size = rows.row_bytes if sizes is None else int(sizes[i])
        if target is not None and target_offsets is not None:
            first = int(target_offsets[i])
            landed = _rows_at(target, first, rows, rows.target_outer_stride, rows.target_inner_stride)
            landed[:] = unit
            unit = landed
        digests[i] += hash_rows(unit[..., :size], seeds).sum(axis=0, dtype=np.uint64)


def _rows_at(buffer: Bytes, offset: int, rows: Rows, outer_stride: int, inner_stride: int) -> Bytes:
    """A unit's rows, (outer, inner, row_bytes)."""
    shape, strides = (rows.outer, rows.inner, rows.row_bytes), (outer_stride, inner_stride, 1)
    return np.lib.stride_tricks.as_strided(buffer[offset:], shape, strides)
