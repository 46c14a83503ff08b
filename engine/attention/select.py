"""Which attention serves a pool."""

from collections.abc import Sequence

import torch

from pdkv.engine.attention.backend import AttentionBackend, Layer
from pdkv.engine.attention.cpu import CpuAttention
from pdkv.kernels.kv_copy import FP8


def make_backend(kv_pool: torch.Tensor, num_heads: int, layers: Sequence[Layer]) -> AttentionBackend:
    """The backend of the pool's device, and dtype: what computes from FP8 does so on any device.

    Args:
        kv_pool: as in `pool_shape`.
        num_heads: query heads of this rank.
        layers: of the model, in order.
    """
    if kv_pool.is_cuda or kv_pool.dtype == FP8:
        from pdkv.engine.attention.cuda import CudaAttention

        return CudaAttention(kv_pool, num_heads, layers)
    return CpuAttention(kv_pool, num_heads, layers)
