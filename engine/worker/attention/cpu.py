"""Paged attention on CPU.

The compiled kernels read KV in place: one call for all of a step's prompts, one for all of its single queries.

If they are missing, or do not support the dtype or the sizes: gather a bucket of KV into warm scratch, then two batched
matrix products. Every request's tokens are cut into query tiles (a decode is a tile of one token), tiles of like size
form a bucket, and a bucket costs five calls per layer. Buckets are small enough that gathered KV is still in the cache
when it is read again; `bmm` over them beats `scaled_dot_product_attention` 2x for prompts and 7x for single queries
(oneDNN). float16 only has the kernel for single queries, which are then left out of the buckets.

Whole blocks are gathered, and a request's last one may end with an earlier owner's content: that is zeroed in the
scratch, so that no foreign value, finite or not, reaches a result. Non-finite values reach no earlier token, either.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pdkv.engine.worker.attention.backend import AttentionBackend, Layer, ModelInputs, pad
from pdkv.engine.worker.attention.compiled import PromptQueries, SingleQueries
from pdkv.engine.worker.attention.runs import Prompts, RunPlan, plan_runs
from pdkv.engine.worker.attention.shapes import round_rows
from pdkv.engine.worker.attention.tiles import AttentionLimits, Bucket, Singles, plan_tiles
from pdkv.engine.worker.batch import IntArray, StepInputs
from pdkv.models.heads import Heads, KVSlots


class _Work(NamedTuple):
    """A bucket's tensors: B tiles of Q queries over K blocks."""

    bucket: Bucket
    kv_index: torch.Tensor  # (2 * B * kv_heads * K,) rows of one block, one head, of layer 0
    unowned: (
        torch.Tensor | None
    )  # rows of one token, one head, of the gathered KV that hold nothing of the tile's request
    mask: (
        torch.Tensor | None
    )  # (B, 1, Q, masked columns), added to the scores' last columns; all columns if a window hides some


class _Plan(NamedTuple):
    """The attention plan of one kind of layer."""

    q_index: torch.Tensor  # (sum of B * heads * Q,) rows of one head of qkv, in the buckets' order
    out_index: torch.Tensor  # (rows * heads,) the position of each output head among the buckets' outputs
    work: list[_Work]
    prompts: Prompts | None  # instead of buckets; slots of these and of singles count through the tables of all groups
    singles: Singles
    num_real: int
    num_rows: int  # padding included


_NO_INDEX = torch.empty(0, dtype=torch.int64)


class CpuAttention(AttentionBackend):
    """The backend of pools in host memory."""

    def __init__(self, kv_pool: torch.Tensor, num_heads: int, layers: Sequence[Layer]) -> None:
        """Arguments as in `make_backend`."""
        _, block_layers, _, kv_heads, block_size, head_size = kv_pool.shape
        self._num_heads, self._kv_heads, self._head_size = num_heads, kv_heads, head_size
        self._block_layers, self._block_size = block_layers, block_size
        self._scale = head_size**-0.5
        self._limits = AttentionLimits(num_heads, kv_heads, head_size, kv_pool.element_size())
        # A row holds one head's K or V of one block. Index l's rows are index 0's plus l * 2 * kv_heads.
        rows = kv_pool.view(-1, block_size * head_size)
        self._block_rows = [rows[layer.layer * 2 * kv_heads :] for layer in layers]
        self._token_kv = [
            kv_pool[:, layer.layer].flatten(1, 2).transpose(1, 2) for layer in layers
        ]  # (num_blocks, block_size, 2 * kv_heads, head_size) each
        self._scratch = _Scratch(kv_pool.dtype)
        self._block_ids: list[torch.Tensor] = []  # by group, the blocks of a step's tokens
        self._offsets = torch.empty(0, dtype=torch.int64)  # and the places within them
        self._num_blocks = len(kv_pool)
        self._singles = SingleQueries.of(kv_pool, num_heads)
        self._prompts = None if self._singles is None else PromptQueries.of(kv_pool, num_heads)
        self._layers = list(layers)
        self._plans: list[_Plan] = []  # of this step, by layer

    def prepare(
        self, inputs: StepInputs, block_tables: IntArray, rows: IntArray | None, *, size: int | None = None
    ) -> ModelInputs:
        assert size is None
        if not 0 <= inputs.block_ids.min() <= inputs.block_ids.max() < self._num_blocks:
            raise IndexError(f"a step names a block that is not in [0, {self._num_blocks}), the pool")
        self._offsets = torch.from_numpy(np.ascontiguousarray(inputs.offsets))
        self._block_ids = list(torch.from_numpy(np.ascontiguousarray(inputs.block_ids)))
        if self._singles is not None:
            self._singles.prepare(block_tables)
        if self._prompts is not None:
            self._prompts.prepare(block_tables)
        longest = int(inputs.seq_lens.max())  # a window that hides nothing in this step is ignored
        kinds = [
            (layer.group, None if layer.window is None or layer.window >= longest else layer.window)
            for layer in self._layers
        ]
        plans = {kind: self._plan(inputs, None, block_tables, *kind) for kind in set(kinds[:-1])}
        self._plans = [plans[kind] for kind in kinds[:-1]]
        last = plans.get(kinds[-1]) if rows is None else None
        self._plans.append(last or self._plan(inputs, rows, block_tables, *kinds[-1]))
        num_tokens = round_rows(len(inputs.positions))
        return ModelInputs(
            torch.from_numpy(pad(inputs.token_ids, num_tokens)),
            torch.from_numpy(pad(inputs.positions, num_tokens)),
            None if rows is None else torch.from_numpy(pad(rows, round_rows(len(rows)))),
        )

    def padded(self, num_rows: int) -> int:
        return round_rows(num_rows)

    def attend(self, layer: int, qkv: torch.Tensor, heads: Heads | None = None) -> torch.Tensor:
        plan = self._plans[layer]
        slots = KVSlots(self._token_kv[layer], self._block_ids[self._layers[layer].group], self._offsets)
        if heads is None:
            slots.put(qkv[:, self._num_heads :])
        else:
            heads.apply_and_write(qkv, slots)
        result = self._attend_buckets(layer, qkv, plan)
        if self._singles is not None and len(plan.singles.slots):
            self._singles.attend(self._layers[layer].layer, qkv, plan.singles, result)
        if self._prompts is not None and plan.prompts is not None:
            self._prompts.attend(self._layers[layer].layer, qkv, plan.prompts, result)
        return result

    def _attend_buckets(self, layer: int, qkv: torch.Tensor, plan: _Plan) -> torch.Tensor:
        """Fill in the buckets' results, in place; the other rows hold any finite values."""
        heads, head_size = self._num_heads, self._head_size
        if not plan.work:
            result = torch.empty(plan.num_rows, heads * head_size, dtype=qkv.dtype)
            result[plan.num_real :].zero_()  # padding; the kernels write everything before it
            return result
        q = self._scratch.take("q", len(plan.q_index), head_size)
        torch.index_select(qkv.view(-1, head_size), 0, plan.q_index, out=q)
        q.mul_(self._scale)
        out = self._scratch.take("out", len(plan.q_index), head_size)
        start = 0
        for work in plan.work:
            stop = start + work.bucket.num_queries * heads
            self._attend_bucket(self._block_rows[layer], work, q[start:stop], out[start:stop])
            start = stop
        return out.index_select(0, plan.out_index).view(plan.num_rows, heads * head_size)

    def _attend_bucket(self, block_rows: torch.Tensor, work: _Work, q: torch.Tensor, out: torch.Tensor) -> None:
        """softmax(q K^T + mask) V of one bucket; q and out (B * heads * Q, head_size), q scaled."""
        bucket, head_size = work.bucket, self._head_size
        pairs = len(bucket.slots) * self._kv_heads  # (tile, KV head): one matrix each
        queries = bucket.tile_size * (self._num_heads // self._kv_heads)
        gathered = self._scratch.take("kv", len(work.kv_index), block_rows.shape[1])
        torch.index_select(block_rows, 0, work.kv_index, out=gathered)
        if work.unowned is not None:
            gathered.view(-1, head_size).index_fill_(0, work.unowned, 0.0)
        keys, values = gathered.view(2, pairs, -1, head_size)
        scores = self._scratch.take("scores", pairs * queries, keys.shape[1]).view(pairs, queries, -1)
        torch.bmm(q.view(pairs, queries, head_size), keys.transpose(1, 2), out=scores)
        if work.mask is not None:
            masked = scores.view(len(bucket.slots), self._num_heads, bucket.tile_size, -1)
            masked[..., -work.mask.shape[-1] :].add_(work.mask)
        torch.softmax(scores, -1, out=scores)  # in float32 inside, whatever the dtype; row by row, so in place
        torch.bmm(scores, values, out=out.view(pairs, queries, head_size))
        if work.mask is not None and not math.isfinite(out.sum(dtype=torch.float32)):
            lost = ~q.view(pairs, queries, head_size).isfinite().all(-1, keepdim=True)
            torch.bmm(q.view(pairs, queries, head_size).masked_fill(lost, 0.0), keys.transpose(1, 2), out=scores)
            self._attend_causally(work, work.mask, scores, values, lost, out.view(pairs, queries, head_size))

    def _attend_causally(
        self,
        work: _Work,
        mask: torch.Tensor,
        scores: torch.Tensor,
        values: torch.Tensor,
        lost: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """softmax(scores + mask) V for input that is not all finite: non-finite values reach the queries that may see
        them, and no others, although NaN passes a mask of -inf, passes a weight of 0 as a value, and, in bfloat16 on
        AMX, spreads from one row of a product's left side to others. `lost`: queries that are not finite themselves,
        with scores of 0.

        Otherwise the KV of a prompt's first tokens would depend on later ones, and be found by prompts without them.
        """
        by_query = (len(work.bucket.slots), self._num_heads, work.bucket.tile_size, -1)
        hidden = torch.zeros_like(scores, dtype=torch.bool)
        hidden.view(by_query)[..., -mask.shape[-1] :] = mask.isinf()
        weights = torch.softmax(scores.masked_fill_(hidden, float("-inf")), -1)
        lost = lost | ~weights.isfinite().all(-1, keepdim=True)
        bad = ~values.isfinite()
        torch.bmm(weights.masked_fill_(lost, 0.0), values.masked_fill(bad, 0.0), out=out)
        out.masked_fill_((torch.bmm((~hidden).float(), bad.float()) > 0) | lost, float("nan"))

    def _plan(
        self, inputs: StepInputs, rows: IntArray | None, block_tables: IntArray, group: int, window: int | None
    ) -> _Plan:
        """The tensors of a tile plan, shared by a group's layers with the same window: a layer only shifts the start of
        rows.
        """
        if self._prompts is not None:
            runs = plan_runs(inputs, rows, self._block_size, window=window)
            return self._compiled_plan(runs, group * block_tables.shape[1])
        apart = self._singles is not None
        tiles = plan_tiles(inputs, rows, self._block_size, self._limits, window=window, singles_apart=apart)
        num_rows = self.padded(tiles.num_rows)
        singles = tiles.singles._replace(slots=tiles.singles.slots + group * block_tables.shape[1])
        if not tiles.buckets:
            return _Plan(_NO_INDEX, _NO_INDEX, [], None, singles, tiles.num_rows, num_rows)
        heads, kv_heads = self._num_heads, self._kv_heads
        head = np.arange(heads)[None, :, None]
        q_parts, work, start = [], [], 0
        out_index = np.zeros((num_rows, heads), dtype=np.int64)  # padding rows repeat an output that is not read
        for bucket in tiles.buckets:
            q_parts.append((bucket.qkv_rows[:, None, :] * (heads + 2 * kv_heads) + head).ravel())
            stop = start + bucket.num_queries * heads
            places = np.arange(start, stop).reshape(len(bucket.slots), heads, bucket.tile_size).transpose(0, 2, 1)
            out_index[bucket.out_rows[bucket.real]] = places[bucket.real]
            kv_index, mask = self._kv_index(bucket, block_tables[group]), self._mask(bucket, window)
            work.append(_Work(bucket, kv_index, None if mask is None else self._unowned(bucket), mask))
            start = stop
        q_index, out = torch.from_numpy(np.concatenate(q_parts)), torch.from_numpy(out_index.ravel())
        return _Plan(q_index, out, work, None, singles, tiles.num_rows, num_rows)

    def _compiled_plan(self, runs: RunPlan, first_slot: int) -> _Plan:
        """`first_slot`: the first slot of the layers' KV group among those of all groups."""
        singles = runs.singles._replace(slots=runs.singles.slots + first_slot)
        prompts = runs.prompts._replace(slots=runs.prompts.slots + first_slot) if len(runs.prompts.slots) else None
        return _Plan(_NO_INDEX, _NO_INDEX, [], prompts, singles, runs.num_rows, self.padded(runs.num_rows))

    def _kv_index(self, bucket: Bucket, block_tables: IntArray) -> torch.Tensor:
        """(2, B, kv_heads, K) flattened: rows of `_block_rows`.

        Beyond its end, a shorter tile reads its own first block again, which is full unless it is also its last.
        """
        blocks = np.arange(bucket.num_blocks)
        own = blocks * self._block_size < bucket.seq_lens[:, None]
        tables = block_tables[bucket.slots[:, None], bucket.first_blocks[:, None] + np.where(own, blocks, 0)]
        sides = np.arange(2)[:, None, None, None] * self._kv_heads + np.arange(self._kv_heads)[None, None, :, None]
        rows: IntArray = tables[None, :, None, :] * (self._block_layers * 2 * self._kv_heads) + sides
        return torch.from_numpy(rows.ravel())

    def _unowned(self, bucket: Bucket) -> torch.Tensor | None:
        """The gathered tokens that do not belong to the tile's request, or not yet.

        A block's previous owner may have left NaN or infinity there. These get past a mask of -inf, and as values even
        past a weight of 0, so they are replaced.
        """
        size, width = self._block_size, bucket.num_blocks * self._block_size
        seq_lens = bucket.seq_lens[:, None]
        # Up to the end of the last block, and everything after it if only the last block could be repeated.
        stops = np.where(seq_lens < size, width, -(-seq_lens // size) * size)
        columns = np.arange(width)
        tile, column = np.nonzero((columns >= seq_lens) & (columns < stops))
        if not len(tile):
            return None
        heads = np.arange(2)[:, None, None] * (len(bucket.slots) * self._kv_heads) + np.arange(self._kv_heads)[:, None]
        rows: IntArray = (heads + tile * self._kv_heads) * width + column
        return torch.from_numpy(rows.ravel())

    def _mask(self, bucket: Bucket, window: int | None) -> torch.Tensor | None:
        """0 where a query may look, -inf elsewhere, for the columns from the first that some query may not see."""
        first_masked = int(bucket.positions.min()) + 1
        if window is not None and int(bucket.positions.max()) >= window:
            first_masked = 0
        if first_masked == bucket.num_blocks * self._block_size:
            return None
        # Starts at a block's boundary: unaligned columns add 3x slower.
        columns = np.arange(first_masked - first_masked % self._block_size, bucket.num_blocks * self._block_size)
        positions = bucket.positions[:, None, :, None]
        unseen = columns > positions
        if window is not None:
            unseen |= columns <= positions - window
        hidden = torch.from_numpy(unseen)
        mask = torch.zeros(hidden.shape, dtype=self._scratch.dtype)
        return mask.masked_fill_(hidden, float("-inf"))


class _Scratch:
    """Buffers by name that grow to the largest use and are then reused: warm pages, no allocation in the hot path."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """(rows, columns), contiguous, holding anything; valid until the name is taken again."""
        size = rows * columns
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=self.dtype)
        return buffer[:size].view(rows, columns)
