"""Paged attention on CUDA: the Triton kernels over the whole step, in one launch per layer for decodes and one for
prompts; on a CPU, their references for FP8 pools.
"""

from collections.abc import Sequence

import numpy as np
import torch

from pdkv.engine.worker.attention.backend import USUAL, AttentionBackend, Layer, ModelInputs, Scores
from pdkv.engine.worker.attention.plain_latents import expand, worth_plain
from pdkv.engine.worker.batch import IntArray, StepInputs
from pdkv.engine.worker.step_buffers import DeviceTables, Padding, StepBuffers, StepTensors, first_prompt
from pdkv.kernels.kv_copy import FP8, PagedSlots
from pdkv.kernels.paged_attention import paged_attention
from pdkv.models.heads import Heads
from pdkv.models.latent_heads import LatentHeads


class CudaAttention(AttentionBackend):
    """The backend for pools in device memory. A step's input is copied to the device once, not per layer."""

    pads_decodes = True

    def __init__(self, kv_pool: torch.Tensor, num_heads: int, layers: Sequence[Layer], scores: Scores = USUAL) -> None:
        """Arguments as in `make_backend`."""
        self._layers = list(layers)
        self._pool = kv_pool
        self._num_heads = num_heads
        self._scale, self._softcap = scores.scale_of(kv_pool.shape[5]), scores.softcap
        self._buffers: StepBuffers | None = None
        self._padded_buffers: StepBuffers | None = None  # of padded steps: these keep their addresses
        self._step: StepTensors | None = None
        self._first_prompt: tuple[int, int] | None = None
        self._inputs: StepInputs | None = None  # of a step that is not padded
        self._is_bound = False  # of which: the step has so many requests of few tokens at most

    def prepare(
        self, inputs: StepInputs, block_tables: IntArray, rows: IntArray | None, *, size: Padding | None = None
    ) -> ModelInputs:
        if self._buffers is None or self._padded_buffers is None:
            where = DeviceTables(self._pool.device, block_tables.shape), self._pool.shape[4]
            self._buffers = StepBuffers(*where)
            self._padded_buffers = StepBuffers(*where, pads=True)
        buffers = self._buffers if size is None else self._padded_buffers
        step = self._step = buffers.load(inputs, block_tables, rows, size=size)
        self._inputs = inputs if size is None else None
        self._is_bound = size is not None and size.prompts > 0
        self._first_prompt = first_prompt(inputs)
        if size is not None:
            self._first_prompt = (size.decodes, size.decodes) if self._is_bound else None
        return ModelInputs(step.token_ids, step.positions, step.rows)

    @property
    def pads_prompts(self) -> bool:
        return self._layers[0].value_size is None  # else keys and values are made of latents, of no fixed number

    def attend(self, layer: int, qkv: torch.Tensor, heads: Heads | LatentHeads | None = None) -> torch.Tensor:
        step = self._step
        assert step is not None, "prepare must be called first"
        place = self._layers[layer]
        slots = PagedSlots(self._pool, place.layer, step.slot_mapping[place.group], place.kv_scales)
        if heads is None or isinstance(heads, LatentHeads):
            slots.put(qkv[:, self._num_heads :])
        else:
            heads.apply_and_write(qkv, slots)
        if isinstance(heads, LatentHeads):
            out = self._attend_latents(layer, qkv, heads)
        else:
            out = self._attention(layer, qkv[:, : self._num_heads]).flatten(1)
        if layer == len(self._layers) - 1 and step.rows is not None:
            return out.index_select(0, step.rows)
        return out

    def _attend_latents(self, layer: int, rows: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
        """Attention of queries brought to the latents, and behind them of prompts whose keys and values are made."""
        num_seqs, num_tokens = self._first_plain(heads)
        parts = []
        if num_seqs:
            heads.absorb(rows, slice(0, num_tokens))
            parts.append(heads.results(self._attention(layer, rows[:num_tokens, : self._num_heads], num_seqs)))
        if num_tokens < len(rows):
            parts.append(self._attend_plain(layer, heads, num_seqs, num_tokens))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _first_plain(self, heads: LatentHeads) -> tuple[int, int]:
        """The first request, and token of it, of the prompts for which keys and values are made: all of them or none.

        Each is as long as the longest there, as their tables are.
        """
        step, first, inputs = self._step, self._first_prompt, self._inputs
        assert step is not None, "prepare must be called first"
        if first is not None and inputs is not None and first[0] < len(inputs.seq_lens) and self._pool.dtype != FP8:
            counts = np.diff(inputs.cu_seqlens_q)[first[0] :]
            lengths = np.full_like(counts, step.block_tables.shape[2] * self._pool.shape[4])
            if worth_plain(heads, counts, lengths).all():
                return first
        return len(step.seq_lens), len(step.token_ids)

    def _attend_plain(self, layer: int, heads: LatentHeads, num_seqs: int, num_tokens: int) -> torch.Tensor:
        step, place = self._step, self._layers[layer]
        assert step is not None, "prepare must be called first"
        blocks = step.block_tables[place.group, num_seqs:]
        tables = torch.arange(blocks.numel(), dtype=torch.int32, device=blocks.device).view_as(blocks)
        found = paged_attention(
            heads.queries[num_tokens:],
            expand(heads, self._pool[blocks.flatten().long(), place.layer, 0, 0]),
            0,
            tables,
            step.seq_lens[num_seqs:],
            step.cu_seqlens_q[num_seqs:] - num_tokens,
            self._scale,
            softcap=self._softcap,
        )
        return found[..., : heads.values.shape[2]].flatten(1)

    def _attention(self, layer: int, q: torch.Tensor, num_seqs: int | None = None) -> torch.Tensor:
        """Attention of queries (n, heads, head_size), of all or the first requests, to the pool, which already has the
        step's keys and values.
        """
        step, place = self._step, self._layers[layer]
        assert step is not None, "prepare must be called first"
        decodes = self._first_prompt
        return paged_attention(
            q,
            self._pool,
            place.layer,
            step.block_tables[place.group, :num_seqs],
            step.seq_lens[:num_seqs],
            step.cu_seqlens_q[: None if num_seqs is None else num_seqs + 1],
            self._scale,
            window=place.window,
            kv_scales=place.kv_scales,
            softcap=self._softcap,
            value_size=place.value_size,
            decodes=None if decodes is not None and decodes[0] == num_seqs else decodes,
            at_most=self._is_bound,
        )
