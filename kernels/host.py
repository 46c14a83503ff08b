"""The compiled kernels for host memory: KV (host.c) and the draw of tokens (sampler.c).

They exist if the package was built with a compiler: see `available()` and `can_draw()`; callers also have a torch or
numpy form. Calls release the GIL.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.kernels.compiled import NUMBER, POINTER, load_library

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Dtypes that the kernels take, by torch's name, with their numbers in vectors.h."""

MAX_HEAD_SIZE = 576


class AttentionArgs(ctypes.Structure):
    """Arguments of `attention` in host.c, described there."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "qkv", "out")),
        *((name, ctypes.c_void_p) for name in ("q_rows", "out_rows", "seq_lens", "hidden", "first_blocks")),
        ("block_tables", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("n", "heads", "kv_heads", "head_size", "block_size")),
        *((name, ctypes.c_int64) for name in ("block_stride", "row_stride", "dtype", "num_threads")),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
    )


class Rows(NamedTuple):
    """The shape of one piece of a copy, on both sides: `outer` x `inner` rows; strides and sizes in bytes."""

    outer: int
    target_outer_stride: int
    source_outer_stride: int
    inner: int
    target_inner_stride: int
    source_inner_stride: int
    row_bytes: int


@cache
def _library() -> ctypes.CDLL | None:
    attention = ctypes.POINTER(AttentionArgs)
    functions = {
        "pdkv_attend": (ctypes.c_int, [attention]),
        "pdkv_attend_pieces": (NUMBER, [attention]),
        "pdkv_copy": (None, [*[POINTER] * 4, *[NUMBER] * 8]),
    }
    return load_library("_host", functions)


@cache
def _sampler() -> ctypes.CDLL | None:
    functions = {
        "pdkv_race": (ctypes.c_int, [*[POINTER] * 3, *[NUMBER] * 5]),
        "pdkv_mask": (None, [*[POINTER] * 3, *[NUMBER] * 4]),
        "pdkv_penalize": (None, [*[POINTER] * 5, *[NUMBER] * 4]),
    }
    return load_library("_sampler", functions)


def available() -> bool:
    """Whether the kernels for KV are available. Import torch first: they share its OpenMP threads."""
    return _library() is not None


def can_draw() -> bool:
    """Whether the kernels for draws, masks and penalties are available. Import torch first: they share its OpenMP
    threads.
    """
    return _sampler() is not None


def call_sampler(function: str, *args: int) -> None:
    """Call a function of sampler.c with its arguments as described there; pointers must stay valid during the call.

    Raises:
        MemoryError: there is no memory for the rows being worked on.
    """
    library = _sampler()
    assert library is not None, "ask can_draw() first"
    if getattr(library, function)(*args):
        raise MemoryError("no memory to draw tokens")


def attend(args: AttentionArgs) -> None:
    """Attention of single queries over paged KV, softmax(q K^T * scale) V; pointers must stay valid during the call.

    Head sizes are multiples of 16 up to MAX_HEAD_SIZE, block sizes multiples of 4. The result is bit-identical for any
    number of threads.

    Raises:
        MemoryError: no room for the scores.
    """
    library = _library()
    assert library is not None, "ask available() first"
    status = library.pdkv_attend(ctypes.byref(args))
    if status:
        raise MemoryError("no memory for attention scores") if status == 1 else ValueError("head size")


def copy_pieces(
    target: int,
    source: int,
    target_offsets: npt.NDArray[np.int64],
    source_offsets: npt.NDArray[np.int64],
    rows: Rows | Sequence[int],
) -> None:
    """Copy equal pieces between two buffers that do not overlap. The caller has checked all bounds.

    Args:
        target, source: addresses.
        target_offsets, source_offsets: (n,) int64 offsets in bytes, contiguous.
        rows: the shape and strides of every piece.
    """
    library = _library()
    assert library is not None, "ask available() first"
    assert target_offsets.size == source_offsets.size
    library.pdkv_copy(
        target, source, target_offsets.ctypes.data, source_offsets.ctypes.data, target_offsets.size, *rows
    )
