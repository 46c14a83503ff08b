"""`paged_attention` in Triton: one program per (tile of queries of one sequence, KV head), online softmax over its KV.

A tile holds some queries times all query heads that share the KV head, so that a decode row fills the matrix unit's
rows too. Latent rows are values as well as keys, and all heads share them: a program takes some of the heads. If there
are fewer programs than a GPU can run, each takes a part of a sequence's KV, of which there are as many as its own
length asks for beside the others', and the parts' results are combined. Sequences of few queries and prompts are
launched apart.
Sources: online softmax, Dao et al., "FlashAttention", 2022; parts, Dao et al., "Flash-Decoding", 2023; tiles, vLLM's
unified attention.
"""

import math
from itertools import pairwise
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl

from pdkv.kernels.triton_jit import LAUNCH_OPTIONS, jit

_MIN_DOT_SIZE = 16  # the matrix unit's smallest operand
_PART = 128  # the fewest tokens of KV in a part
_PROGRAMS = 512  # four for each processor of an H100, which read KV at 0.9 of its bandwidth: KV is divided for no more
_MAX_PARTS_BYTES = 32 << 20  # for which there are fewer parts: more than that would be read and written beside the KV
_COMBINED = 16  # parts at once
_SEQS = 512  # whose lengths a program looks at together
_NOT_SPECIALIZED = ["first_seq", "num_seqs", "first_token", "window", "stride_table", "num_shares", "least"]
"""Arguments that change with every step."""


@jit()
def _find_sequence(
    cu_seqlens_q: tl.tensor, tile: tl.tensor, num_seqs: tl.tensor, TILE_QUERIES: tl.constexpr
) -> tl.tensor:
    """The sequence of a tile: the last one whose first tile, cu[i] // TILE_QUERIES + i, is not behind it."""
    start = tl.load(cu_seqlens_q)
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first_tile = (tl.load(cu_seqlens_q + middle) - start) // TILE_QUERIES + middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@jit()
def _tiles_and_seen(
    seqs: tl.tensor,
    seq_lens: tl.tensor,
    cu_seqlens_q: tl.tensor,
    num_seqs: tl.tensor,
    window: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The tiles of queries of some sequences, and the tokens of KV from the first block on that their queries see."""
    mask = seqs < num_seqs
    start = tl.load(cu_seqlens_q + seqs, mask, other=0)
    num_queries = tl.load(cu_seqlens_q + seqs + 1, mask, other=0) - start
    seen = tl.load(seq_lens + seqs, mask, other=0)
    if HAS_WINDOW:
        seen -= tl.maximum(seen - num_queries + 1 - window, 0) // BLOCK_SIZE * BLOCK_SIZE
    return tl.cdiv(num_queries, TILE_QUERIES), seen


@jit()
def _find_part(
    index: tl.tensor,
    seq_lens: tl.tensor,
    cu_seqlens_q: tl.tensor,
    num_seqs: tl.tensor,
    window: tl.tensor,
    num_shares: tl.tensor,
    least: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SEQS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A program's sequence, its number among the parts of that sequence's tiles, the parts of each tile (0: there is no
    work), and the first slot of the sequence's results.

    A part has at most a share of all KV that tiles see, so each sequence has parts by its own length: as many programs
    have work as there are tiles, and at most `num_shares` more. Tiles of more than one part need at most twice as many
    slots as there are shares: each of them sees more than a share.
    """
    total = tl.zeros([], tl.int64)
    for start in range(0, num_seqs, SEQS):
        tiles, seen = _tiles_and_seen(
            start + tl.arange(0, SEQS), seq_lens, cu_seqlens_q, num_seqs, window, BLOCK_SIZE, TILE_QUERIES, HAS_WINDOW
        )
        total += tl.sum(tiles.to(tl.int64) * seen)
    share = tl.maximum(tl.cdiv(total, num_shares), least).to(tl.int32)
    seq, within, num_parts, slot = 0, 0, 0, 0
    before, slots_before = 0, 0
    for start in range(0, num_seqs, SEQS):
        seqs = start + tl.arange(0, SEQS)
        tiles, seen = _tiles_and_seen(
            seqs, seq_lens, cu_seqlens_q, num_seqs, window, BLOCK_SIZE, TILE_QUERIES, HAS_WINDOW
        )
        parts = tl.cdiv(seen, share)
        programs = tiles * parts
        slots = tl.where(parts > 1, programs, 0)
        first = before + tl.cumsum(programs) - programs
        is_own = (first <= index) & (index < first + programs)
        seq += tl.sum(tl.where(is_own, seqs, 0))
        within += tl.sum(tl.where(is_own, index - first, 0))
        num_parts += tl.sum(tl.where(is_own, parts, 0))
        slot += tl.sum(tl.where(is_own, slots_before + tl.cumsum(slots) - slots, 0))
        before += tl.sum(programs)
        slots_before += tl.sum(slots)
    return seq, within, num_parts, slot


@jit()
def _attend_tile(
    best: tl.tensor,  # (TILE_ROWS,) each row's largest logit so far, in powers of two
    total: tl.tensor,
    result: tl.tensor,
    spoiled: tl.tensor,
    kv_start: tl.tensor,
    kv_stop: tl.tensor,
    query_tile: tl.tensor,
    turned_tile: tl.tensor,  # the queries' numbers behind HEAD_SIZE, if TURNED
    positions: tl.tensor,  # (TILE_ROWS,)
    keys: tl.tensor,  # of the KV head
    values: tl.tensor,
    table: tl.tensor,  # the sequence's row
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    stride_kv_block: tl.tensor,
    stride_kv_token: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    TURNED: tl.constexpr,
    TURNED_PADDED: tl.constexpr,
    TILE_KV: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IN_PARTS: tl.constexpr,
    WHOLE: tl.constexpr,  # every row sees all of the tile
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """What the rows have after one more tile of KV."""
    kv_positions = kv_start + tl.arange(0, TILE_KV)
    dims = tl.arange(0, HEAD_SIZE_PADDED)
    # FP8 becomes the queries' dtype, which holds all of its numbers; other KV has that dtype already.
    dtype = query_tile.dtype
    if WHOLE:
        blocks = tl.load(table + kv_positions // BLOCK_SIZE)
    else:
        kv_mask = kv_positions < kv_stop
        blocks = tl.load(table + kv_positions // BLOCK_SIZE, kv_mask, other=0)
    rows = blocks.to(tl.int64) * stride_kv_block + (kv_positions % BLOCK_SIZE) * stride_kv_token
    offsets = rows[:, None] + dims[None, :]
    if WHOLE and HEAD_SIZE == HEAD_SIZE_PADDED:
        key_tile = tl.load(keys + offsets).to(dtype)
        value_tile = key_tile if TURNED else tl.load(values + offsets).to(dtype)
    else:
        load_mask = dims[None, :] < HEAD_SIZE
        if not WHOLE:
            load_mask = load_mask & kv_mask[:, None]
        key_tile = tl.load(keys + offsets, mask=load_mask, other=0.0).to(dtype)
        value_tile = key_tile if TURNED else tl.load(values + offsets, mask=load_mask, other=0.0).to(dtype)
    logits = tl.dot(query_tile, tl.trans(key_tile), input_precision="ieee")
    if TURNED:
        behind = tl.arange(0, TURNED_PADDED)
        turned_mask = (kv_positions < kv_stop)[:, None] & (behind[None, :] < TURNED)
        turned = tl.load(keys + HEAD_SIZE + rows[:, None] + behind[None, :], mask=turned_mask, other=0.0).to(dtype)
        logits = tl.dot(turned_tile, tl.trans(turned), logits, input_precision="ieee")
    logits *= scale
    if HAS_SOFTCAP:  # tanh by the logistic function, which neither overflows
        logits = softcap * (2.0 * tl.sigmoid(logits * (2.0 / softcap)) - 1.0)
    if not WHOLE:
        seen = kv_mask[None, :] & (kv_positions[None, :] <= positions[:, None])
        if HAS_WINDOW:
            seen = seen & (kv_positions[None, :] > positions[:, None] - window)
        logits = tl.where(seen, logits, float("-inf"))
        # A weight of 0 does not keep NaN or infinity from a row: they go to those that may see them by hand.
        finite = tl.abs(value_tile.to(tl.float32)) < float("inf")
        bad = tl.max(tl.where(finite, 0.0, 1.0), axis=1)
        spoiled = tl.maximum(spoiled, tl.max(tl.where(seen, bad[None, :], 0.0), axis=1))
        value_tile = tl.where(finite, value_tile, 0.0).to(value_tile.dtype)
    # Without window and parts every row sees position 0 in its first tile: `new_best` is finite from then on.
    new_best = tl.maximum(best, tl.max(logits, axis=1))
    top = new_best
    if not WHOLE and (HAS_WINDOW or IN_PARTS):  # a row may have seen nothing: its window begins further on, or it ended
        top = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(logits - top[:, None])
    correction = tl.exp2(best - top)
    total = total * correction + tl.sum(weights, axis=1)
    result = tl.dot(weights.to(dtype), value_tile, result * correction[:, None], input_precision="ieee")
    return new_best, total, result, spoiled


@jit(do_not_specialize=_NOT_SPECIALIZED)
def _paged_attention_kernel(
    out: tl.tensor,  # (tokens, heads, head size)
    parts: tl.tensor,  # with parts float32 (slots * TILE_QUERIES, heads, head size), not divided yet
    bests: tl.tensor,  # (slots * TILE_QUERIES, heads): each row's largest logit, in powers of two
    totals: tl.tensor,  # and the sum of its weights
    plans: tl.tensor,  # (tokens of the launch, 2) the number of parts, and the row of the first one's result
    q: tl.tensor,
    keys: tl.tensor,  # the layer's K of block 0
    values: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    cu_seqlens_q: tl.tensor,
    scale: tl.tensor,
    v_scale: tl.tensor,
    softcap: tl.tensor,  # in powers of two, as scale
    first_seq: tl.tensor,  # of the launch
    num_seqs: tl.tensor,
    first_token: tl.tensor,
    window: tl.tensor,  # tokens that a query sees, its own included; of any size without HAS_WINDOW
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_out_token: tl.tensor,
    stride_out_head: tl.tensor,
    stride_kv_block: tl.tensor,
    stride_kv_head: tl.tensor,
    stride_kv_token: tl.tensor,
    stride_table: tl.tensor,
    num_shares: tl.tensor,
    least: tl.tensor,  # tokens of a part
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    TURNED: tl.constexpr,  # numbers of latent rows behind HEAD_SIZE; 0: KV is keys and values
    TURNED_PADDED: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # at least TILE_QUERIES * GROUP_SIZE
    TILE_KV: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IN_PARTS: tl.constexpr,  # or one program sees all of the KV
    SEQS: tl.constexpr,
) -> None:
    index = tl.num_programs(0) - 1 - tl.program_id(0)  # a prompt's last tiles see the most: they begin first
    kv_head = tl.program_id(1)
    seq_lens += first_seq
    cu_seqlens_q += first_seq
    if IN_PARTS:
        seq, within, num_parts, slot = _find_part(
            index, seq_lens, cu_seqlens_q, num_seqs, window, num_shares, least, BLOCK_SIZE, TILE_QUERIES, HAS_WINDOW,
            SEQS,
        )  # fmt: skip
        if num_parts == 0:
            return
        part = within % num_parts
        slot += within - part
        first_query = within // num_parts * TILE_QUERIES
    else:
        seq = _find_sequence(cu_seqlens_q, index, num_seqs, TILE_QUERIES)
        before = (tl.load(cu_seqlens_q + seq) - tl.load(cu_seqlens_q)) // TILE_QUERIES + seq  # tiles
        first_query = (index - before) * TILE_QUERIES
    query_start = tl.load(cu_seqlens_q + seq)
    num_queries = tl.load(cu_seqlens_q + seq + 1) - query_start
    if first_query >= num_queries:
        return
    seq_len = tl.load(seq_lens + seq)
    first_position = seq_len - num_queries  # of the sequence's first query

    rows = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, HEAD_SIZE_PADDED)
    queries = first_query + rows // GROUP_SIZE
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    row_mask = (rows < TILE_QUERIES * GROUP_SIZE) & (queries < num_queries)
    dim_mask = dims < HEAD_SIZE
    tokens = (query_start + queries).to(tl.int64)
    mask = row_mask[:, None] & dim_mask[None, :]
    query_tile = tl.load(
        q + tokens[:, None] * stride_q_token + heads[:, None] * stride_q_head + dims[None, :], mask=mask, other=0.0
    )
    turned_tile = query_tile
    if TURNED:
        behind = tl.arange(0, TURNED_PADDED)
        places = tokens[:, None] * stride_q_token + heads[:, None] * stride_q_head + HEAD_SIZE + behind[None, :]
        turned_tile = tl.load(q + places, mask=row_mask[:, None] & (behind[None, :] < TURNED), other=0.0)
    positions = first_position + queries

    best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    result = tl.zeros([TILE_ROWS, HEAD_SIZE_PADDED], tl.float32)
    spoiled = tl.zeros([TILE_ROWS], tl.float32)  # above 0: the row sees a value that is not finite
    kv_stop = tl.minimum(first_position + first_query + TILE_QUERIES, seq_len)  # causal: nothing behind is seen
    kv_begin = 0
    if HAS_WINDOW:  # from the block on in which the first query's window begins: those before it may be given up
        kv_begin = tl.maximum(first_position + first_query + 1 - window, 0) // BLOCK_SIZE * BLOCK_SIZE
    if IN_PARTS:  # of the sequence; one that these queries do not see counts for nothing
        part_begin = 0
        if HAS_WINDOW:
            part_begin = tl.maximum(first_position + 1 - window, 0) // BLOCK_SIZE * BLOCK_SIZE
        part_tokens = tl.cdiv(tl.cdiv(seq_len - part_begin, num_parts), TILE_KV) * TILE_KV
        part_begin += part * part_tokens
        kv_begin = tl.maximum(kv_begin, part_begin)
        kv_stop = tl.maximum(tl.minimum(kv_stop, part_begin + part_tokens), kv_begin)
    keys += kv_head * stride_kv_head.to(tl.int64)
    values += kv_head * stride_kv_head.to(tl.int64)
    table = block_tables + (first_seq + seq).to(tl.int64) * stride_table
    # Most tiles are seen whole by every row, and are computed without masks; some at either end of the KV are not.
    whole_begin = kv_begin
    if HAS_WINDOW:
        unseen = first_position + first_query + TILE_QUERIES - window - kv_begin  # by the last query
        whole_begin = tl.minimum(kv_begin + tl.cdiv(tl.maximum(unseen, 0), TILE_KV) * TILE_KV, kv_stop)
    seen_by_all = tl.minimum(first_position + first_query + 1, kv_stop) - whole_begin
    whole_stop = whole_begin + tl.maximum(seen_by_all, 0) // TILE_KV * TILE_KV
    bounds = kv_begin, whole_begin, whole_stop, kv_stop
    for phase in tl.static_range(0 if HAS_WINDOW else 1, 3):
        for kv_start in range(bounds[phase], bounds[phase + 1], TILE_KV):
            best, total, result, spoiled = _attend_tile(
                best, total, result, spoiled, kv_start, kv_stop, query_tile, turned_tile, positions, keys, values,
                table, scale, softcap, window, stride_kv_block, stride_kv_token, BLOCK_SIZE, HEAD_SIZE,
                HEAD_SIZE_PADDED, TURNED, TURNED_PADDED, TILE_KV, HAS_WINDOW, HAS_SOFTCAP, IN_PARTS, phase == 1,
            )  # fmt: skip
    result = tl.where(spoiled[:, None] > 0.0, float("nan"), result * v_scale)
    if IN_PARTS:
        result_rows = (slot * TILE_QUERIES + rows // GROUP_SIZE).to(tl.int64)  # of the first part
        if (part == 0) & (kv_head == 0):
            plan = plans + (tokens - first_token) * 2
            is_first = row_mask & (rows % GROUP_SIZE == 0)
            tl.store(plan, tl.zeros([TILE_ROWS], tl.int32) + num_parts, mask=is_first)
            tl.store(plan + 1, result_rows.to(tl.int32), mask=is_first)
        if num_parts > 1:
            target = (result_rows + part * TILE_QUERIES) * (tl.num_programs(1) * GROUP_SIZE) + heads
            tl.store(bests + target, best, mask=row_mask)
            tl.store(totals + target, total, mask=row_mask)
            tl.store(parts + target[:, None] * HEAD_SIZE + dims[None, :], result, mask=mask)
            return
    if HAS_WINDOW:
        total = tl.where(total == 0.0, 1.0, total)  # rows of the tile behind the last query, which nobody stores
    target = tokens * stride_out_token + heads * stride_out_head
    tl.store(out + target[:, None] + dims[None, :], (result / total[:, None]).to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["first_seq", "end_seq", "first_token"])
def _combine_kernel(
    out: tl.tensor,  # (tokens, heads, head size)
    parts: tl.tensor,
    bests: tl.tensor,
    totals: tl.tensor,
    plans: tl.tensor,
    cu_seqlens_q: tl.tensor,
    first_seq: tl.tensor,  # of the launch
    end_seq: tl.tensor,  # behind its last one
    first_token: tl.tensor,
    TILE_PARTS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
) -> None:
    """The parts of one token's head, some of which it has seen; zeros for padding. One part is the result already, and
    tokens before the launch's sequences have theirs.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    dims = tl.arange(0, HEAD_SIZE_PADDED)
    mask = dims < HEAD_SIZE
    target = out + ((first_token + token).to(tl.int64) * num_heads + head) * HEAD_SIZE + dims
    if first_token + token >= tl.load(cu_seqlens_q + end_seq):
        tl.store(target, tl.zeros([HEAD_SIZE_PADDED], out.dtype.element_ty), mask=mask)
        return
    if first_token + token < tl.load(cu_seqlens_q + first_seq):
        return
    num_parts = tl.load(plans + 2 * token)
    if num_parts == 1:
        return
    row = tl.load(plans + 2 * token + 1)
    best = float("-inf")
    total = 0.0
    result = tl.zeros([HEAD_SIZE_PADDED], tl.float32)
    for start in range(0, num_parts, TILE_PARTS):
        some = start + tl.arange(0, TILE_PARTS)
        is_part = some < num_parts
        at = (row + some * TILE_QUERIES).to(tl.int64) * num_heads + head
        part_bests = tl.load(bests + at, mask=is_part, other=float("-inf"))
        new_best = tl.maximum(best, tl.max(part_bests, axis=0))
        top = tl.where(new_best == float("-inf"), 0.0, new_best)  # none of the parts so far has been seen
        correction = tl.exp2(best - top)
        weights = tl.exp2(part_bests - top)
        total = total * correction + tl.sum(tl.load(totals + at, mask=is_part, other=0.0) * weights, axis=0)
        in_part = parts + at[:, None] * HEAD_SIZE + dims[None, :]
        some_results = tl.load(in_part, mask=is_part[:, None] & mask[None, :], other=0.0)
        result = result * correction + tl.sum(some_results * weights[:, None], axis=0)
        best = new_best
    tl.store(target, (result / total).to(out.dtype.element_ty), mask=mask)


class _Tiles(NamedTuple):
    """How the queries of a step are divided."""

    rows: int  # of the matrix unit's operand: queries times the query heads of a KV head
    queries: int
    kv: int  # tokens
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, q: torch.Tensor, num_seqs: int, group_size: int) -> "_Tiles":
        """The tile sizes: small for decodes, which are memory-bound; large for prompts, which read the KV once per
        tile.

        Two warp groups multiply 128 rows at once; with larger heads only 64 fit into registers. In float32 the matrix
        unit is not used: large tiles gain little there, and take half a minute to compile. Sizes of KV tiles and
        numbers of stages (one of which the block table's loads take) are the fastest of those tried on an H100.
        """
        rows = max(_MIN_DOT_SIZE, triton.next_power_of_2(group_size))
        if q.shape[2] > 256:  # a latent row, of which a tile of keys is a tile of values, too
            return cls(rows, rows // group_size, 32, 8, 2)
        if q.dtype != torch.float32 and q.shape[0] * group_size > 2 * rows * num_seqs:
            if q.shape[2] > 128:
                return cls(64, 64 // group_size, 32, 4, 4)
            rows = max(rows, 128)
            return cls(rows, rows // group_size, 64, 8, 5)
        return cls(rows, rows // group_size, 32, 8 if rows >= 128 else 4, 4)


class _Launch(NamedTuple):
    """Sequences that are computed by one launch, and how they are divided."""

    first_seq: int
    num_seqs: int
    first_token: int
    num_tokens: int
    tiles: _Tiles
    num_shares: int  # of all their KV, of which no part has more than one; 0: it is not divided

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        first: tuple[int, int],
        stop: tuple[int, int],
        max_tokens: int,
        group_size: int,
        value_size: int,
    ) -> Self:
        """The launch of the sequences, and queries of q, from `first` to `stop`, of at most `max_tokens` each.

        Where tiles alone are enough programs, their KV is divided only if there are few tiles for each sequence: so
        one long sequence among many is divided.
        """
        num_seqs, num_tokens = stop[0] - first[0], stop[1] - first[1]
        tiles = _Tiles.of(q[first[1] : stop[1]], num_seqs, group_size)
        groups = q.shape[1] // group_size
        room = _MAX_PARTS_BYTES // (2 * tiles.queries * q.shape[1] * value_size * 4)
        num_tiles, most = num_tokens // tiles.queries + num_seqs, triton.cdiv(max_tokens, _PART)
        num_shares = min(max(_PROGRAMS // groups, 1), room, most * num_tiles)
        is_work_enough = num_tiles * groups >= _PROGRAMS and num_tokens > 2 * tiles.queries * num_seqs
        if num_shares <= 1 or most == 1 or is_work_enough:
            num_shares = 0
        return cls(first[0], num_seqs, first[1], num_tokens, tiles, num_shares)

    @property
    def num_programs(self) -> int:
        """For each group of heads: an upper bound, which needs no look at the lengths; the rest return at once."""
        return self.num_tokens // self.tiles.queries + self.num_seqs + self.num_shares


class _Results(NamedTuple):
    """What a launch writes beside the output; empty without parts."""

    parts: torch.Tensor  # (rows, heads, head size) float32, not divided by the totals yet
    bests: torch.Tensor  # (rows, heads) float32: each row's largest logit
    totals: torch.Tensor  # (rows, heads) float32: the sum of its weights
    plans: torch.Tensor  # (tokens, 2) int32

    @classmethod
    def of(cls, out: torch.Tensor, launch: _Launch) -> Self:
        """Memory for the results of the parts; `out` (tokens, heads, head size) is their combined output."""
        rows = 2 * launch.num_shares * launch.tiles.queries
        # Each by itself: a place within other memory might not be aligned, which would compile other kernels.
        bests, totals = (out.new_empty((rows, out.shape[1]), dtype=torch.float32) for _ in range(2))
        plans = out.new_empty((launch.num_tokens if rows else 0, 2), dtype=torch.int32)
        return cls(out.new_empty((rows, *out.shape[1:]), dtype=torch.float32), bests, totals, plans)


def paged_attention_triton(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    softcap: float = 0.0,
    value_size: int | None = None,
    decodes: tuple[int, int] | None = None,
    at_most: bool = False,
) -> torch.Tensor:
    """Launch the kernels; arguments as `paged_attention` has checked them. The innermost dimensions are contiguous."""
    if q.stride(2) != 1 or kv_pool.stride(5) != 1 or block_tables.stride(1) != 1:
        raise ValueError("the innermost dimension of q, kv_pool and block_tables must be contiguous")
    size = q.shape[2] if value_size is None else value_size
    if q.shape[0] == 0 or seq_lens.shape[0] == 0:
        return q.new_zeros((*q.shape[:2], size))
    group_size = _group_size(q.shape[1], kv_pool)
    end = seq_lens.shape[0], q.shape[0]
    places = sorted({(0, 0), decodes or end, end})
    bounds = block_tables.shape[1] * kv_pool.shape[4], group_size, size
    pairs = [pair for pair in pairwise(places) if pair[0][0] < pair[1][0]]
    if at_most:  # prompts begin somewhere behind the first token
        pairs[-1] = (pairs[-1][0][0], 0), end
    launches = [_Launch.of(q, *pair, *bounds) for pair in pairs]
    make = q.new_empty if launches[-1].num_shares else q.new_zeros  # what combines parts writes padding, too
    out = make((*q.shape[:2], size))
    scale *= kv_scales[0] * math.log2(math.e)  # powers of two are what a GPU computes
    numbers = scale, kv_scales[kv_pool.shape[2] - 1], softcap * math.log2(math.e)
    sizes = {"HEAD_SIZE": size, "HEAD_SIZE_PADDED": max(_MIN_DOT_SIZE, triton.next_power_of_2(size))}
    turned = q.shape[2] - size
    stride_kv_head = kv_pool.stride(3) if kv_pool.shape[2] == 2 else 0  # all groups of heads have one latent row
    for launch in launches:
        results, tiles = _Results.of(out, launch), launch.tiles
        _paged_attention_kernel[(launch.num_programs, q.shape[1] // group_size)](
            out, *results, q, kv_pool[0, layer, 0], kv_pool[0, layer, -1], block_tables, seq_lens, cu_seqlens_q,
            *numbers, *launch[:3], window or 0, *q.stride()[:2], *out.stride()[:2],
            kv_pool.stride(0), stride_kv_head, kv_pool.stride(4), block_tables.stride(0), launch.num_shares, _PART,
            BLOCK_SIZE=kv_pool.shape[4], TURNED=turned,
            TURNED_PADDED=max(_MIN_DOT_SIZE, triton.next_power_of_2(turned)) if turned else _MIN_DOT_SIZE,
            GROUP_SIZE=group_size, TILE_QUERIES=tiles.queries, TILE_ROWS=tiles.rows, TILE_KV=tiles.kv,
            HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap > 0.0, IN_PARTS=launch.num_shares > 0, SEQS=_SEQS,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **sizes, **LAUNCH_OPTIONS,
        )  # fmt: skip
        if launch.num_shares:
            _combine_kernel[(launch.num_tokens, q.shape[1])](
                out, *results, cu_seqlens_q, launch.first_seq, launch.first_seq + launch.num_seqs, launch.first_token,
                TILE_PARTS=_COMBINED, TILE_QUERIES=tiles.queries, num_warps=4, **sizes, **LAUNCH_OPTIONS,
            )  # fmt: skip
    return out


def _group_size(num_heads: int, kv_pool: torch.Tensor) -> int:
    """The query heads of a program: those of a KV head, or as many as a tile has rows for whose results are latents."""
    if kv_pool.shape[2] == 2:
        return num_heads // kv_pool.shape[3]
    return next(size for size in range(min(num_heads, _MIN_DOT_SIZE), 0, -1) if num_heads % size == 0)
