"""Attention of prompts over paged KV in host memory (prompts.c), where linear layers' kernels are: `linear.level()`.

float32 and bfloat16. Calls release the GIL. What a query gets depends on the keys that it sees alone, to the bit: not
on queries beside it, on where its prompt is cut into chunks, or on the number of threads.
"""

import ctypes
from functools import cache

import numpy as np
import torch

from pdkv.kernels.compiled import load_library
from pdkv.kernels.host import DTYPES, MAX_HEAD_SIZE
from pdkv.kernels.linear import Scratch, level

MAX_GROUP = 252
"""Heads that share a KV head, at most."""


class PromptArgs(ctypes.Structure):
    """prompts.c's `prompts`: what its comments say."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "qkv", "out")),
        *((name, ctypes.c_void_p) for name in ("q_rows", "out_rows", "positions", "counts", "tables")),
        ("block_tables", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("n", "heads", "kv_heads", "head_size", "block_size")),
        *((name, ctypes.c_int64) for name in ("block_stride", "row_stride", "window", "dtype")),
        *((name, ctypes.c_int64) for name in ("num_threads", "level")),
        ("rooms", ctypes.c_void_p),
        ("scale", ctypes.c_double),
    )


@cache
def _library() -> ctypes.CDLL | None:
    library = load_library("_linear", needs="pdkv_attend_prompts")
    if library is None or level() == 0:
        return None
    library.pdkv_attend_prompts.argtypes = [ctypes.POINTER(PromptArgs)]
    library.pdkv_attend_prompts.restype = None
    library.pdkv_prompt_room_bytes.restype = ctypes.c_int64
    return library


def takes(dtype: torch.dtype, num_heads: int, kv_heads: int, head_size: int) -> bool:
    """Whether the kernel is there, and takes these."""
    fits = head_size % 16 == 0 and head_size <= MAX_HEAD_SIZE and num_heads // kv_heads <= MAX_GROUP
    return fits and dtype in (torch.float32, torch.bfloat16) and _library() is not None


_rooms = Scratch()


def attend_prompts(args: PromptArgs) -> None:
    """Causal attention of runs of queries, softmax(q K^T * scale) V; pointers must stay valid meanwhile."""
    library = _library()
    assert library is not None, "ask takes() first"
    args.rooms = _rooms.address(args.num_threads * library.pdkv_prompt_room_bytes())
    library.pdkv_attend_prompts(ctypes.byref(args))


def prompt_attention(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    num_threads: int | None = None,
    use_level: int | None = None,
) -> torch.Tensor:
    """What `paged_attention` says, with the arguments of `paged_attention_reference`, in host memory.

    Args:
        num_threads: torch's by default.
        use_level: as for `linear.PackedWeight`.
    """
    _, num_layers, _, kv_heads, block_size, head_size = kv_pool.shape
    assert takes(kv_pool.dtype, q.shape[1], kv_heads, head_size), kv_pool.shape
    assert (kv_pool.is_contiguous(), q.stride()[1:]) == (True, (head_size, 1)), q.stride()
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = cu_seqlens_q.numpy().astype(np.int64)
    counts = np.diff(starts)
    [runs] = np.nonzero(counts)
    tables = np.ascontiguousarray(block_tables.numpy(), dtype=np.int64)
    first_rows, num_queries = starts[:-1][runs], counts[runs]
    positions = seq_lens.numpy().astype(np.int64)[runs] - num_queries
    first_blocks = runs * tables.shape[1]
    side = kv_heads * block_size * head_size
    first = kv_pool.data_ptr() + 2 * layer * side * kv_pool.element_size()
    attend_prompts(
        PromptArgs(
            keys=first,
            values=first + side * kv_pool.element_size(),
            qkv=q.data_ptr(),
            out=out.data_ptr(),
            q_rows=first_rows.ctypes.data,
            out_rows=first_rows.ctypes.data,
            positions=positions.ctypes.data,
            counts=num_queries.ctypes.data,
            tables=first_blocks.ctypes.data,
            block_tables=tables.ctypes.data,
            n=len(runs),
            heads=q.shape[1],
            kv_heads=kv_heads,
            head_size=head_size,
            block_size=block_size,
            block_stride=num_layers * 2 * side,
            row_stride=q.stride(0),
            window=window or 0,
            dtype=DTYPES[str(kv_pool.dtype).removeprefix("torch.")],
            num_threads=num_threads or torch.get_num_threads(),
            level=level() if use_level is None else use_level,
            scale=scale,
        )
    )
    return out
