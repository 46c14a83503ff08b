"""Which attention serves a pool."""

import torch

from pdkv.engine.attention.backend import AttentionBackend
from pdkv.engine.attention.cpu import CpuAttention


def make_backend(kv_pool: torch.Tensor, num_heads: int) -> AttentionBackend:
    """The backend of the pool's device. `kv_pool` as in `pool_shape`; `num_heads` query heads of this rank."""
    if kv_pool.is_cuda:
        from pdkv.engine.attention.cuda import CudaAttention  # Triton, which a CPU need not have

        return CudaAttention(kv_pool, num_heads)
    return CpuAttention(kv_pool, num_heads)
