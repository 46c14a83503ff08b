"""Attention of prompts over paged KV in host memory (prompts.c), available together with linear layers' kernels: see
`linear.available()`. float32 and bfloat16.

Calls release the GIL. A query's result is bit-identical for the same keys: it does not depend on other queries in the
call, on where its prompt is cut into chunks, or on the number of threads.
"""

import ctypes
from functools import cache

import torch

from pdkv.kernels.compiled import NUMBER, load_library
from pdkv.kernels.host import MAX_HEAD_SIZE
from pdkv.kernels.linear import Scratch

MAX_GROUP = 252
"""Heads that share a KV head, at most."""


class PromptArgs(ctypes.Structure):
    """Arguments of `prompts` in prompts.c, described there."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "qkv", "out")),
        *((name, ctypes.c_void_p) for name in ("q_rows", "out_rows", "positions", "counts", "tables")),
        ("block_tables", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("n", "heads", "kv_heads", "head_size", "block_size")),
        *((name, ctypes.c_int64) for name in ("block_stride", "row_stride", "window", "dtype")),
        ("num_threads", ctypes.c_int64),
        ("rooms", ctypes.c_void_p),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
    )


@cache
def _library() -> ctypes.CDLL | None:
    functions = {"pdkv_attend_prompts": (None, [ctypes.POINTER(PromptArgs)]), "pdkv_prompt_room_bytes": (NUMBER, ())}
    return load_library("_linear", functions)


def takes(dtype: torch.dtype, num_heads: int, kv_heads: int, head_size: int) -> bool:
    """Whether the kernel is available, and supports this dtype and these sizes."""
    fits = head_size % 16 == 0 and head_size <= MAX_HEAD_SIZE and num_heads // kv_heads <= MAX_GROUP
    return fits and dtype in (torch.float32, torch.bfloat16) and _library() is not None


_rooms = Scratch()


def attend_prompts(args: PromptArgs) -> None:
    """Causal attention of runs of queries, softmax(q K^T * scale) V; pointers must stay valid during the call."""
    library = _library()
    assert library is not None, "ask takes() first"
    args.rooms = _rooms.address(args.num_threads * library.pdkv_prompt_room_bytes())
    library.pdkv_attend_prompts(ctypes.byref(args))
