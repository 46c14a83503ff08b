"""Paged attention on CPU.

The compiled kernels read KV in place: one call for all of a step's prompts, one for all of its single queries. If one
is missing, or does not support the dtype or the sizes, torch takes its queries, one request after the other.

A request's last block may end with an earlier owner's content: no foreign value, finite or not, reaches a result.
Non-finite values reach no earlier token, either.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from pdkv.engine.worker.attention.backend import USUAL, AttentionBackend, Layer, ModelInputs, Scores, pad
from pdkv.engine.worker.attention.compiled import PromptQueries, SingleQueries
from pdkv.engine.worker.attention.plain_latents import PlainPrompts, expand, rows_of, worth_plain
from pdkv.engine.worker.attention.runs import Prompts, RunPlan, Singles, plan_runs
from pdkv.engine.worker.attention.shapes import round_rows
from pdkv.engine.worker.batch import IntArray, StepInputs
from pdkv.engine.worker.step_buffers import Padding
from pdkv.kernels.paged_attention import paged_attention_reference
from pdkv.models.heads import Heads, KVSlots
from pdkv.models.latent_heads import LatentHeads


class _Divided(NamedTuple):
    """A step's queries over latent rows."""

    absorbed: RunPlan
    ins: torch.Tensor  # (m,) rows of the queries that are brought to the latents
    outs: torch.Tensor  # (m,) rows of their results
    plain: PlainPrompts | None


class CpuAttention(AttentionBackend):
    """The backend of pools in host memory."""

    def __init__(self, kv_pool: torch.Tensor, num_heads: int, layers: Sequence[Layer], scores: Scores = USUAL) -> None:
        """Arguments as in `make_backend`."""
        self._num_heads, self._num_blocks, self._block_size = num_heads, len(kv_pool), kv_pool.shape[4]
        self._token_kv = [
            kv_pool[:, layer.layer].flatten(1, 2).transpose(1, 2) for layer in layers
        ]  # (num_blocks, block_size, sides * kv_heads, head_size) each
        self._block_ids: list[torch.Tensor] = []  # by group, the blocks of a step's tokens
        self._offsets = torch.empty(0, dtype=torch.int64)  # and the places within them
        self._pool, self._scores = kv_pool, Scores(scores.scale_of(kv_pool.shape[5]), scores.softcap)
        self._tables: IntArray = np.empty((0, 0), dtype=np.int64)  # of a step, (slots of all groups, max_blocks)
        self._divided: dict[int, _Divided] = {}  # of this step, by the identity of the plan
        by_torch = TorchQueries(kv_pool, num_heads, scores)
        self._singles = SingleQueries.of(kv_pool, num_heads, scores) or by_torch
        self._prompts = PromptQueries.of(kv_pool, num_heads, scores) or by_torch
        self._layers = list(layers)
        self._plans: list[RunPlan] = []  # of this step, by layer; slots count through the tables of all groups

    def prepare(
        self, inputs: StepInputs, block_tables: IntArray, rows: IntArray | None, *, size: Padding | None = None
    ) -> ModelInputs:
        assert size is None
        if not 0 <= inputs.block_ids.min() <= inputs.block_ids.max() < self._num_blocks:
            raise IndexError(f"a step names a block that is not in [0, {self._num_blocks}), the pool")
        self._offsets = torch.from_numpy(np.ascontiguousarray(inputs.offsets))
        self._block_ids = list(torch.from_numpy(np.ascontiguousarray(inputs.block_ids)))
        self._tables = block_tables.reshape(-1, block_tables.shape[2])
        self._divided.clear()
        self._singles.prepare(block_tables)
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

    def attend(self, layer: int, qkv: torch.Tensor, heads: Heads | LatentHeads | None = None) -> torch.Tensor:
        plan, place = self._plans[layer], self._layers[layer]
        slots = KVSlots(self._token_kv[layer], self._block_ids[place.group], self._offsets)
        if heads is None or isinstance(heads, LatentHeads):
            slots.put(qkv[:, self._num_heads :])
        else:
            heads.apply_and_write(qkv, slots)
        if isinstance(heads, LatentHeads):
            return self._attend_latents(place, qkv, heads, plan)
        return self._attend(place, qkv, plan)

    def _attend(self, place: Layer, qkv: torch.Tensor, plan: RunPlan) -> torch.Tensor:
        padded = self.padded(plan.num_rows)
        result = torch.empty(padded, self._num_heads * qkv.shape[2], dtype=qkv.dtype)
        if padded > plan.num_rows:  # everything before that is written
            result[plan.num_rows :].zero_()
        if len(plan.singles.slots):
            self._singles.attend(place.layer, qkv, plan.singles, result)
        if len(plan.prompts.slots):
            self._prompts.attend(place.layer, qkv, plan.prompts, result)
        if place.value_size is None:
            return result
        return result.view(len(result), self._num_heads, qkv.shape[2])[..., : place.value_size].flatten(1)

    def _attend_latents(self, place: Layer, rows: torch.Tensor, heads: LatentHeads, plan: RunPlan) -> torch.Tensor:
        """Attention of queries that are brought to the latents, and of prompts for which keys and values are made."""
        if id(plan) not in self._divided:
            self._divided[id(plan)] = self._divide(plan, heads)
        absorbed, ins, outs, plain = self._divided[id(plan)]
        out = rows.new_zeros(self.padded(plan.num_rows), self._num_heads * heads.values.shape[2])
        if len(ins):
            heads.absorb(rows, ins)
            sums = self._attend(place, rows, absorbed)[outs]
            out[outs] = heads.results(sums.view(len(outs), self._num_heads, -1))
        if plain is not None:
            pool = expand(heads, self._pool[plain.blocks, place.layer, 0, 0])
            by_torch = TorchQueries(pool, self._num_heads, self._scores)
            queries = PromptQueries.of(pool, self._num_heads, self._scores, row_heads=self._num_heads) or by_torch
            queries.prepare(plain.tables)
            found = out.new_empty(len(out), *heads.queries.shape[1:])
            queries.attend(0, heads.queries, plain.prompts, found.view(len(out), -1))
            out[plain.outs] = found[plain.outs, :, : heads.values.shape[2]].flatten(1)
        return out

    def _divide(self, plan: RunPlan, heads: LatentHeads) -> _Divided:
        prompts = plan.prompts
        is_plain = worth_plain(heads, prompts.counts, prompts.positions + prompts.counts)
        rest = prompts.only(~is_plain)
        ins, outs = (
            torch.from_numpy(np.concatenate([rows_of(of_rest, rest.counts), of_singles]))
            for of_rest, of_singles in ((rest.qkv_rows, plan.singles.qkv_rows), (rest.out_rows, plan.singles.out_rows))
        )
        plain = PlainPrompts.of(prompts.only(is_plain), self._tables, self._block_size) if is_plain.any() else None
        return _Divided(plan._replace(prompts=rest), ins, outs, plain)

    def _plan(
        self, inputs: StepInputs, rows: IntArray | None, block_tables: IntArray, group: int, window: int | None
    ) -> RunPlan:
        """The queries of a step, shared by a group's layers with the same window."""
        plan = plan_runs(inputs, rows, self._block_size, window=window)
        first_slot = group * block_tables.shape[1]
        singles = plan.singles._replace(slots=plan.singles.slots + first_slot)
        return plan._replace(singles=singles, prompts=plan.prompts._replace(slots=plan.prompts.slots + first_slot))


class _Run(NamedTuple):
    """Tensors of some of a step's queries, for the reference."""

    rows: torch.Tensor  # (n,) in the step
    out_rows: torch.Tensor  # (n,)
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    window: int | None


class TorchQueries:
    """Attention to one pool by the reference of the GPU's kernel. Used like the compiled kernels' queries."""

    def __init__(self, kv_pool: torch.Tensor, num_heads: int, scores: Scores = USUAL) -> None:
        self._pool, self._num_heads, self._scores = kv_pool, num_heads, scores
        self._block_tables: IntArray = np.empty((0, 0), dtype=np.int64)
        self._taken: dict[int, tuple[object, _Run]] = {}  # of this step, by the identity of its work

    def prepare(self, block_tables: IntArray) -> None:
        """Take in a step's block tables, (groups, max_num_seqs, max_blocks); `slots` count through all groups."""
        self._block_tables = block_tables.reshape(-1, block_tables.shape[2])
        self._taken.clear()

    def attend(self, layer: int, qkv: torch.Tensor, work: Singles | Prompts, out: torch.Tensor) -> None:
        """Write each query's attention into its row of `out` (rows, heads * head_size); `layer`: index in a block."""
        if id(work) not in self._taken:
            self._taken[id(work)] = work, self._take(work)
        _, run = self._taken[id(work)]
        found = paged_attention_reference(
            qkv[:, : self._num_heads][run.rows], self._pool, layer, run.block_tables, run.seq_lens, run.cu_seqlens_q,
            self._scores.scale_of(self._pool.shape[5]), window=run.window, softcap=self._scores.softcap,
        )  # fmt: skip
        out[run.out_rows] = found.flatten(1)

    def _take(self, work: Singles | Prompts) -> _Run:
        size = self._pool.shape[4]
        if isinstance(work, Prompts):
            counts, window = work.counts, work.window or None
            skipped = 0 * counts if window is None else np.maximum(work.positions + 1 - window, 0) // size
            seq_lens = work.positions + counts - skipped * size
        else:
            counts, skipped, seq_lens = np.ones_like(work.slots), work.first_blocks, work.seq_lens
            window = int((seq_lens - work.hidden).max())
        ends = np.cumsum(counts)
        within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        columns = np.minimum(skipped[:, None] + np.arange(-(-seq_lens.max() // size)), self._block_tables.shape[1] - 1)
        return _Run(
            rows=torch.from_numpy(np.repeat(work.qkv_rows, counts) + within),
            out_rows=torch.from_numpy(np.repeat(work.out_rows, counts) + within),
            block_tables=torch.from_numpy(self._block_tables[work.slots[:, None], columns].astype(np.int32)),
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
            cu_seqlens_q=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
            window=window,
        )
