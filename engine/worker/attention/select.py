"""Selects the attention backend of a pool."""

from collections.abc import Sequence

import torch

from pdkv.engine.worker.attention.backend import USUAL, AttentionBackend, Layer, Scores
from pdkv.engine.worker.attention.cpu import CpuAttention
from pdkv.engine.worker.attention.cuda import CudaAttention
from pdkv.kernels.kv_copy import FP8


def on_device(kv_pool: torch.Tensor) -> bool:
    """Whether attention over the pool is computed by kernels on a GPU."""
    return kv_pool.is_cuda


def make_backend(
    kv_pool: torch.Tensor, num_heads: int, layers: Sequence[Layer], scores: Scores = USUAL
) -> AttentionBackend:
    """The backend of the pool's device, and dtype.

    Args:
        kv_pool: as in `KVLayout.pool_shape`.
        num_heads: query heads of this rank.
        layers: the model's layers, in order.
        scores: what the model makes of products of queries and keys.
    """
    if on_device(kv_pool) or kv_pool.dtype == FP8:  # which on a CPU the kernels' references read
        return CudaAttention(kv_pool, num_heads, layers, scores)
    return CpuAttention(kv_pool, num_heads, layers, scores)
