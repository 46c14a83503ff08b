"""One wrapper per kernel: Triton on GPU, a torch reference of the same signature everywhere."""

from pdkv.kernels.kv_copy import gather_blocks, scatter_blocks, write_kv
from pdkv.kernels.paged_attention import paged_attention

__all__ = ["gather_blocks", "paged_attention", "scatter_blocks", "write_kv"]
