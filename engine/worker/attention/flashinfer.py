"""Attention for steps with prompts by FlashInfer (github.com/flashinfer-ai/flashinfer), reading the pool in place."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pdkv.engine.worker.attention.backend import USUAL, Layer, ModelInputs, Scores
from pdkv.engine.worker.attention.cuda import CudaAttention
from pdkv.engine.worker.batch import IntArray, StepInputs
from pdkv.engine.worker.step_buffers import Padding
from pdkv.kernels.streams import Event, streams_of

_WORKSPACE_BYTES = 384 << 20
"""Workspace for the parts of the KV that FlashInfer attends to separately; it refuses a step that needs more."""


class _Kind(NamedTuple):
    """Layers that one plan serves."""

    group: int  # of the block tables
    window: int | None


class _Wrapper(NamedTuple):
    """One of FlashInfer's; and when the copy is done that its last plan has left in its pinned memory."""

    flashinfer: Any  # BatchPrefillWithPagedKVCacheWrapper
    planned: Event


class FlashInferAttention(CudaAttention):
    """FlashInfer computes the steps that are not padded, planned once for each kind of layer; pdkv's own kernels
    compute the padded ones.

    FlashInfer plans on the host, from lengths that a CUDA graph would freeze, so it is never part of a graph. So decode
    steps, which are padded, use the same kernels with and without graphs.
    """

    def __init__(
        self,
        kv_pool: torch.Tensor,
        num_heads: int,
        layers: Sequence[Layer],
        flashinfer: Any,
        scores: Scores = USUAL,
    ) -> None:
        """`flashinfer`: the module. Other arguments as in `make_backend`; the pool has the queries' dtype."""
        super().__init__(kv_pool, num_heads, layers, scores)
        self._module = flashinfer
        self._kinds = [_Kind(layer.group, layer.window) for layer in layers]
        self._streams = streams_of(kv_pool.device)
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=kv_pool.device)
        # Longest unused first. Two take turns; where the host is further ahead there are more.
        kinds = dict.fromkeys(self._kinds)
        self._wrappers = {kind: deque(self._make_wrapper() for _ in range(2)) for kind in kinds}
        self._planned: dict[_Kind, Any] = {}  # of the step, if it is FlashInfer's

    def prepare(
        self, inputs: StepInputs, block_tables: IntArray, rows: IntArray | None, *, size: Padding | None = None
    ) -> ModelInputs:
        step = super().prepare(inputs, block_tables, rows, size=size)
        self._planned = self._plan(inputs, block_tables) if size is None else {}
        return step

    @property
    def pads_prompts(self) -> bool:
        return False

    def _attention(self, layer: int, q: torch.Tensor, num_seqs: int | None = None) -> torch.Tensor:
        wrapper = self._planned.get(self._kinds[layer])
        if wrapper is None or num_seqs is not None:
            return super()._attention(layer, q, num_seqs)
        kv = self._pool[:, self._layers[layer].layer]  # (blocks, 2, kv_heads, block_size, head_size)
        out: torch.Tensor = wrapper.run(q, (kv[:, 0], kv[:, 1]))
        return out

    def _plan(self, inputs: StepInputs, block_tables: IntArray) -> dict[_Kind, Any]:
        block_size, head_size = self._pool.shape[4:]
        num_blocks = -(-inputs.seq_lens // block_size)
        is_block = np.arange(num_blocks.max()) < num_blocks[:, None]  # (requests, blocks of the longest)
        tables = block_tables[:, inputs.slots, : is_block.shape[1]]
        cu_seqlens_q = self._to_host_tensor(inputs.cu_seqlens_q)
        cu_blocks = self._to_host_tensor(np.concatenate([[0], num_blocks.cumsum()]))
        in_last_block = self._to_host_tensor(inputs.seq_lens - (num_blocks - 1) * block_size)
        planned = {}
        for kind in self._wrappers:
            wrapper = self._take_wrapper(kind)
            wrapper.flashinfer.plan(
                cu_seqlens_q,
                cu_blocks,
                self._to_host_tensor(tables[kind.group][is_block]),
                in_last_block,
                self._num_heads,
                self._kv_heads,
                head_size,
                block_size,
                causal=True,  # the last query sees the last key
                sm_scale=self._scale,
                window_left=-1 if kind.window is None else kind.window - 1,  # without the query's own key
                q_data_type=self._pool.dtype,
                kv_data_type=self._pool.dtype,
            )
            wrapper.planned.record()
            planned[kind] = wrapper.flashinfer
        return planned

    def _take_wrapper(self, kind: _Kind) -> _Wrapper:
        """One whose last plan is on the device: a plan goes there from pinned memory that the next one overwrites.

        What reads plans there runs in the stream's order, as does all that uses the workspace.
        """
        wrappers = self._wrappers[kind]
        wrapper = wrappers.popleft() if wrappers[0].planned.query() else self._make_wrapper()
        wrappers.append(wrapper)
        return wrapper

    def _make_wrapper(self) -> _Wrapper:
        made = self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="HND")
        return _Wrapper(made, self._streams.make_event())

    def _to_host_tensor(self, array: IntArray) -> torch.Tensor:
        """int32, pinned for a device: FlashInfer reads it and copies it there, which nothing waits for."""
        tensor = torch.from_numpy(array.astype(np.int32))
        return tensor if self._streams.is_host else tensor.pin_memory()
