"""Selects the attention backend of a pool."""

import logging
from collections.abc import Sequence
from typing import Literal

import torch

from pdkv.engine.worker.attention.backend import USUAL, AttentionBackend, Layer, Scores
from pdkv.engine.worker.attention.cpu import CpuAttention
from pdkv.engine.worker.attention.cuda import CudaAttention
from pdkv.errors import ConfigError
from pdkv.kernels.kv_copy import FP8

logger = logging.getLogger(__name__)

AttentionName = Literal["auto", "triton", "flashinfer"]


def on_device(kv_pool: torch.Tensor) -> bool:
    """Whether attention over the pool is computed by kernels on a GPU."""
    return kv_pool.is_cuda


def make_backend(
    kv_pool: torch.Tensor,
    num_heads: int,
    layers: Sequence[Layer],
    name: AttentionName = "auto",
    scores: Scores = USUAL,
) -> AttentionBackend:
    """The backend of the pool's device, and dtype.

    Args:
        kv_pool: as in `KVLayout.pool_shape`.
        num_heads: query heads of this rank.
        layers: the model's layers, in order.
        scores: what the model makes of products of queries and keys.
        name: "auto": on a GPU, FlashInfer if it is installed and correct, else pdkv's kernels.

    Raises:
        ConfigError: the requested backend cannot serve the pool.
    """
    if not on_device(kv_pool):
        if name != "auto":
            raise ConfigError(f"attention_backend {name!r} is for GPUs, but this engine computes on the CPU")
        if kv_pool.dtype == FP8:  # which the kernels' references read
            return CudaAttention(kv_pool, num_heads, layers, scores)
        return CpuAttention(kv_pool, num_heads, layers, scores)
    from pdkv.engine.worker.attention.flashinfer_check import make_flashinfer

    if name != "triton":
        backend, remark = make_flashinfer(kv_pool, num_heads, layers, scores)
        if backend is not None:
            logger.info("attention of steps with prompts by FlashInfer %s", remark)
            return backend
        if name == "flashinfer":
            raise ConfigError(f"attention_backend 'flashinfer' is not possible: {remark}")
        logger.info("attention by pdkv's Triton kernels, not by FlashInfer: %s", remark)
    return CudaAttention(kv_pool, num_heads, layers, scores)
