"""Passes over a step's rows by compiled kernels (passes.c), available together with those of linear layers: see
`linear.available()`. float32 and bfloat16.

Calls release the GIL. A row's result is bit-identical for any other rows in the call and any number of threads.
"""

import ctypes
from functools import cache

import torch

from pdkv.kernels.compiled import load_library
from pdkv.kernels.host import DTYPES
from pdkv.kernels.linear import NORMED, Norm


class _PassArgs(ctypes.Structure):
    """passes.c's `passes`: what its comments say."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out", "weight")),
        *((name, ctypes.c_int64) for name in ("what", "rows", "size", "stride", "dtype", "num_threads")),
        ("epsilon", ctypes.c_double),
    )


class HeadPassArgs(ctypes.Structure):
    """Arguments of `head_pass` in passes.c, described there."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "q_norm", "k_norm", "cosines", "sines", "positions", "kv")),
        *((name, ctypes.c_void_p) for name in ("block_ids", "offsets")),
        *((name, ctypes.c_int64) for name in ("rows", "written", "heads", "kv_heads", "head_size", "rotary_size")),
        *((name, ctypes.c_int64) for name in ("block_size", "block_stride", "dtype", "num_threads")),
        *((name, ctypes.c_float) for name in ("q_epsilon", "k_epsilon")),
    )


@cache
def _library() -> ctypes.CDLL:
    taken = {"pdkv_pass": _PassArgs, "pdkv_pass_heads": HeadPassArgs}
    functions = {name: (None, [ctypes.POINTER(args)]) for name, args in taken.items()}
    library = load_library("_linear", functions)
    assert library is not None, "ask linear.available() first"
    return library


def dtype_number(dtype: torch.dtype) -> int:
    """The number of a dtype in vectors.h."""
    return DTYPES[str(dtype).removeprefix("torch.")]


def rms_norm(x: torch.Tensor, norm: Norm, num_threads: int) -> torch.Tensor:
    """x / sqrt(mean(x * x) + epsilon) * weight of each row of x (rows, size), rounded once."""
    rows, size = x.shape
    assert norm.size == size, (norm.size, size)
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((rows, size), dtype=x.dtype)
    args = _PassArgs(
        x=x.data_ptr(), out=out.data_ptr(), weight=norm.address, what=NORMED, rows=rows, size=size,
        stride=x.stride(0), dtype=dtype_number(x.dtype), num_threads=num_threads,
        epsilon=norm.epsilon,
    )  # fmt: skip
    _library().pdkv_pass(ctypes.byref(args))
    return out


def pass_heads(args: HeadPassArgs) -> None:
    """Norm and rotate a step's queries and keys in place, and write KV; pointers must stay valid during the call.

    The caller has checked positions, blocks and offsets.
    """
    _library().pdkv_pass_heads(ctypes.byref(args))
