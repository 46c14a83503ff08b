"""Paged attention on CUDA: the Triton kernels over the whole step, in one launch per layer for decodes and one for
prompts; on a CPU, their references for FP8 pools.
"""

from collections.abc import Sequence

import torch

from pdkv.engine.worker.attention import backend
from pdkv.engine.worker.attention.backend import USUAL, AttentionBackend, Layer, ModelInputs, Padding, Scores
from pdkv.engine.worker.batch import IntArray, StepInputs
from pdkv.engine.worker.step_buffers import MOST_PROMPTS, MOST_TOKENS, DeviceTables, StepBuffers, StepTensors
from pdkv.kernels.kv_copy import PagedSlots
from pdkv.kernels.paged_attention import paged_attention
from pdkv.models.heads import Heads


class CudaAttention(AttentionBackend):
    """The backend for pools in device memory. A step's input is copied to the device once, not per layer."""

    def __init__(self, kv_pool: torch.Tensor, num_heads: int, layers: Sequence[Layer], scores: Scores = USUAL) -> None:
        """Arguments as in `make_backend`."""
        self._layers = list(layers)
        self._pool = kv_pool
        self._num_heads = num_heads
        self._kv_heads = kv_pool.shape[3]
        self._scale, self._softcap = scores.scale_of(kv_pool.shape[5]), scores.softcap
        self._buffers: StepBuffers | None = None
        self._padded_buffers: StepBuffers | None = None  # of padded steps: these keep their addresses
        self._step: StepTensors | None = None
        self._first_prompt: tuple[int, int] | None = None
        self._is_bound = False  # of which: the step has so many requests of few tokens at most

    def prepare(
        self, inputs: StepInputs, block_tables: IntArray, rows: IntArray | None, *, size: Padding | None = None
    ) -> ModelInputs:
        if self._buffers is None or self._padded_buffers is None:
            where = DeviceTables(self._pool.device, block_tables.shape), self._pool.shape[4]
            self._buffers = StepBuffers(*where)
            num_tokens = max(block_tables.shape[1], MOST_TOKENS)
            self._padded_buffers = StepBuffers(*where, num_tokens=num_tokens, num_prompts=MOST_PROMPTS)
        buffers = self._buffers if size is None else self._padded_buffers
        step = self._step = buffers.load(inputs, block_tables, rows, size=size)
        self._is_bound = size is not None and size.prompts > 0
        self._first_prompt = backend.first_prompt(inputs)
        if size is not None:
            self._first_prompt = (size.decodes, size.decodes) if self._is_bound else None
        return ModelInputs(step.token_ids, step.positions, step.rows)

    @property
    def pads_decodes(self) -> bool:
        return True

    @property
    def pads_prompts(self) -> bool:
        return True

    def attend(self, layer: int, qkv: torch.Tensor, heads: Heads | None = None) -> torch.Tensor:
        step = self._step
        assert step is not None, "prepare must be called first"
        place = self._layers[layer]
        slots = PagedSlots(self._pool, place.layer, step.slot_mapping[place.group], place.kv_scales)
        if heads is None:
            slots.put(qkv[:, self._num_heads :])
        else:
            heads.apply_and_write(qkv, slots)
        out = self._attention(layer, qkv[:, : self._num_heads]).flatten(1)
        if layer == len(self._layers) - 1 and step.rows is not None:
            return out.index_select(0, step.rows)
        return out

    def _attention(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of queries (n, heads, head_size) to the pool, which already has the step's keys and values."""
        step, place = self._step, self._layers[layer]
        assert step is not None, "prepare must be called first"
        return paged_attention(
            q,
            self._pool,
            place.layer,
            step.block_tables[place.group],
            step.seq_lens,
            step.cu_seqlens_q,
            self._scale,
            window=place.window,
            kv_scales=place.kv_scales,
            softcap=self._softcap,
            value_size=place.value_size,
            decodes=self._first_prompt,
            at_most=self._is_bound,
        )
