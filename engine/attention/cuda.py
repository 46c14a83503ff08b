"""Paged attention on CUDA: the Triton kernels over the whole step in one launch per layer."""

from collections.abc import Sequence

import numpy as np
import torch

from pdkv.engine.attention.backend import AttentionBackend, Layer, to_tensor
from pdkv.engine.batch import IntArray, StepInputs
from pdkv.kernels.kv_copy import write_kv
from pdkv.kernels.paged_attention import paged_attention
from pdkv.models.heads import Heads


class CudaAttention(AttentionBackend):
    """The backend of pools in device memory. What a step needs is copied to the device once, not per layer."""

    def __init__(self, kv_pool: torch.Tensor, num_heads: int, layers: Sequence[Layer]) -> None:
        """Arguments as those of `make_backend`."""
        self._layers = list(layers)
        self._pool = kv_pool
        self._num_heads = num_heads
        self._kv_heads = kv_pool.shape[3]
        self._scale = float(kv_pool.shape[5] ** -0.5)
        empty = torch.empty(0, dtype=torch.int32, device=kv_pool.device)
        self._slot_mapping = self._block_tables = self._seq_lens = self._cu_seqlens_q = empty
        self._rows: torch.Tensor | None = None

    def prepare(self, inputs: StepInputs, block_tables: IntArray, rows: IntArray | None) -> None:
        device, block_size = self._pool.device, self._pool.shape[4]
        num_blocks = -(-int(inputs.seq_lens.max()) // block_size)
        self._slot_mapping = to_tensor(inputs.slot_mapping(block_size), device)
        self._block_tables = to_tensor(block_tables[:, inputs.slots, :num_blocks].astype(np.int32), device)
        self._seq_lens = to_tensor(inputs.seq_lens.astype(np.int32), device)
        self._cu_seqlens_q = to_tensor(inputs.cu_seqlens_q.astype(np.int32), device)
        self._rows = None if rows is None else to_tensor(rows, device)

    def attend(self, layer: int, qkv: torch.Tensor, heads: Heads | None = None) -> torch.Tensor:
        if heads is not None:
            heads.apply(qkv)
        own, kv_heads = self._num_heads, self._kv_heads
        q, k, v = qkv[:, :own], qkv[:, own : own + kv_heads], qkv[:, own + kv_heads :]
        place = self._layers[layer]
        write_kv(self._pool, place.layer, k, v, self._slot_mapping[place.group])
        out = paged_attention(
            q,
            self._pool,
            place.layer,
            self._block_tables[place.group],
            self._seq_lens,
            self._cu_seqlens_q,
            self._scale,
            window=place.window,
        ).flatten(1)
        if layer == len(self._layers) - 1 and self._rows is not None:
            return out.index_select(0, self._rows)
        return out
