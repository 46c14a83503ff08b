"""`paged_attention` in Triton: one program per (tile of queries of one sequence, KV head), online softmax over its KV.

A tile holds some queries times all query heads that share the KV head, so that a decode row fills the matrix unit's
rows too. Latent rows are values as well as keys, and all heads share them: a program takes some of the heads. If there
are fewer programs than a GPU can run, each takes a part of the KV, and the parts' results are combined.
Sources: online softmax, Dao et al., "FlashAttention", 2022; parts, Dao et al., "Flash-Decoding", 2023; tiles, vLLM's
unified attention.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pdkv.kernels.triton_jit import LAUNCH_OPTIONS, jit

_MIN_DOT_SIZE = 16  # the matrix unit's smallest operand
_PART = 128  # the fewest tokens of KV in a part
_MAX_PART = 4096
_PROGRAMS = 512  # four for each processor of an H100, which read KV at 0.9 of its bandwidth: parts grow for no more
_MAX_PARTS_BYTES = 32 << 20  # for which parts grow: more than that would be read and written beside the KV
_COMBINED = 16  # parts at once
_NOT_SPECIALIZED = ["num_seqs", "window", "stride_table", "part_tokens", "num_parts"]  # they change with every step


@jit()
def _find_sequence(
    cu_seqlens_q: tl.tensor, tile: tl.tensor, num_seqs: tl.tensor, TILE_QUERIES: tl.constexpr, SPARE: tl.constexpr
) -> tl.tensor:
    """The sequence of a tile: the last one whose first tile, cu[i] // TILE_QUERIES + SPARE * i, is not behind it."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first_tile = tl.load(cu_seqlens_q + middle) // TILE_QUERIES + SPARE * middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


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
    out: tl.tensor,  # (tokens, heads, head size); with parts float32 (tokens, parts, heads, head size), not divided yet
    bests: tl.tensor,  # with parts (tokens, parts, heads): each row's largest logit, in powers of two
    totals: tl.tensor,  # and the sum of its weights
    q: tl.tensor,
    keys: tl.tensor,  # the layer's K of block 0
    values: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    cu_seqlens_q: tl.tensor,
    scale: tl.tensor,
    v_scale: tl.tensor,
    softcap: tl.tensor,  # in powers of two, as scale
    num_seqs: tl.tensor,
    window: tl.tensor,  # tokens that a query sees, its own included; of any size without HAS_WINDOW
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_out_token: tl.tensor,
    stride_out_part: tl.tensor,
    stride_out_head: tl.tensor,
    stride_kv_block: tl.tensor,
    stride_kv_head: tl.tensor,
    stride_kv_token: tl.tensor,
    stride_table: tl.tensor,
    part_tokens: tl.tensor,  # of KV
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
) -> None:
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a prompt's last tiles see the most: they begin first
    kv_head = tl.program_id(1)
    seq = _find_sequence(cu_seqlens_q, tile, num_seqs, TILE_QUERIES, 1)
    query_start = tl.load(cu_seqlens_q + seq)
    num_queries = tl.load(cu_seqlens_q + seq + 1) - query_start
    first_query = (tile - (query_start // TILE_QUERIES + seq)) * TILE_QUERIES
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
    part = tl.program_id(2)
    if IN_PARTS:
        kv_begin = tl.maximum(kv_begin, part * part_tokens)
        kv_stop = tl.minimum(kv_stop, (part + 1) * part_tokens)
        if kv_begin >= kv_stop:
            return
    keys += kv_head * stride_kv_head.to(tl.int64)
    values += kv_head * stride_kv_head.to(tl.int64)
    table = block_tables + seq.to(tl.int64) * stride_table
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
    target = tokens * stride_out_token + part * stride_out_part + heads * stride_out_head
    if IN_PARTS:
        tl.store(bests + target // HEAD_SIZE, best, mask=row_mask)
        tl.store(totals + target // HEAD_SIZE, total, mask=row_mask)
    else:
        if HAS_WINDOW:
            total = tl.where(total == 0.0, 1.0, total)  # rows of the tile behind the last query, which nobody stores
        result = result / total[:, None]
    result = tl.where(spoiled[:, None] > 0.0, float("nan"), result * v_scale)
    tl.store(out + target[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=_NOT_SPECIALIZED)
def _combine_kernel(
    out: tl.tensor,  # (tokens, heads, head size)
    parts: tl.tensor,
    bests: tl.tensor,
    totals: tl.tensor,
    seq_lens: tl.tensor,
    cu_seqlens_q: tl.tensor,
    num_seqs: tl.tensor,
    window: tl.tensor,
    num_parts: tl.tensor,  # for which there is room
    part_tokens: tl.tensor,
    TILE_PARTS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> None:
    """The parts of one token's head that it may see, of which each has seen something; zeros for padding."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    dims = tl.arange(0, HEAD_SIZE_PADDED)
    mask = dims < HEAD_SIZE
    target = out + (token.to(tl.int64) * num_heads + head) * HEAD_SIZE + dims
    if token >= tl.load(cu_seqlens_q + num_seqs):
        tl.store(target, tl.zeros([HEAD_SIZE_PADDED], out.dtype.element_ty), mask=mask)
        return
    seq = _find_sequence(cu_seqlens_q, token, num_seqs, 1, 0)
    position = tl.load(seq_lens + seq) - tl.load(cu_seqlens_q + seq + 1) + token
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(position + 1 - window, 0) // part_tokens
    best = float("-inf")
    total = 0.0
    result = tl.zeros([HEAD_SIZE_PADDED], tl.float32)
    for start in range(first, position // part_tokens + 1, TILE_PARTS):
        some = start + tl.arange(0, TILE_PARTS)
        seen = some <= position // part_tokens
        at = (token.to(tl.int64) * num_parts + some) * num_heads + head
        part_bests = tl.load(bests + at, mask=seen, other=float("-inf"))
        new_best = tl.maximum(best, tl.max(part_bests, axis=0))
        correction = tl.exp2(best - new_best)
        weights = tl.exp2(part_bests - new_best)
        total = total * correction + tl.sum(tl.load(totals + at, mask=seen, other=0.0) * weights, axis=0)
        in_part = parts + at[:, None] * HEAD_SIZE + dims[None, :]
        some_results = tl.load(in_part, mask=seen[:, None] & mask[None, :], other=0.0)
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


class _Parts(NamedTuple):
    """How the KV of every sequence is divided."""

    num: int  # 1: it is not
    tokens: int  # of each part

    @classmethod
    def of(cls, num_elements: int, max_tokens: int, num_programs: int) -> "_Parts":
        """The parts for an output of `num_elements` and sequences of at most `max_tokens`, which `num_programs`
        programs would compute undivided: parts are small if there are few programs.

        If there is memory for the results of one part only, the queries are enough work without division.
        """
        most = _MAX_PARTS_BYTES // (4 * num_elements)
        if most <= 1:
            return cls(1, max_tokens)
        wanted = min(max(_PART, triton.next_power_of_2(triton.cdiv(max_tokens * num_programs, _PROGRAMS))), _MAX_PART)
        tokens = max(wanted, _PART * triton.cdiv(max_tokens, _PART * most))
        return cls(triton.cdiv(max_tokens, tokens), tokens)


class _Results(NamedTuple):
    """What the attention kernel writes. Without parts it is the output, and the other two are empty."""

    out: torch.Tensor  # (tokens, parts, heads, head size), with parts in float32 and not divided by the totals yet
    bests: torch.Tensor  # (tokens, parts, heads) float32: each row's largest logit
    totals: torch.Tensor  # (tokens, parts, heads) float32: the sum of its weights

    @classmethod
    def of(cls, out: torch.Tensor, num_parts: int) -> "_Results":
        """Memory for the results of the parts; `out` (tokens, heads, head size) is their combined output."""
        num_tokens, num_heads, head_size = out.shape
        in_parts = num_parts > 1
        shape = num_tokens, num_parts, num_heads
        partial = out.new_empty((*shape, head_size), dtype=torch.float32) if in_parts else out.unsqueeze(1)
        # Each by itself: a place within other memory might not be aligned, which would compile other kernels.
        return cls(partial, *(out.new_empty(shape if in_parts else 0, dtype=torch.float32) for _ in range(2)))


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
) -> torch.Tensor:
    """Launch the kernels; arguments as `paged_attention` has checked them. The innermost dimensions are contiguous."""
    if q.stride(2) != 1 or kv_pool.stride(5) != 1 or block_tables.stride(1) != 1:
        raise ValueError("the innermost dimension of q, kv_pool and block_tables must be contiguous")
    if q.shape[0] == 0 or seq_lens.shape[0] == 0:
        return q.new_zeros((*q.shape[:2], q.shape[2] if value_size is None else value_size))
    size = q.shape[2] if value_size is None else value_size
    group_size = _group_size(q.shape[1], kv_pool)
    num_programs = seq_lens.shape[0] * q.shape[1] // group_size
    parts = _Parts.of(q.shape[0] * q.shape[1] * size, max(block_tables.shape[1] * kv_pool.shape[4], 1), num_programs)
    make = q.new_zeros if parts.num == 1 else q.new_empty  # what combines parts writes padding, too
    out = make((*q.shape[:2], size))
    results = _Results.of(out, parts.num)
    index = block_tables, seq_lens, cu_seqlens_q
    scale *= kv_scales[0] * math.log2(math.e)  # powers of two are what a GPU computes
    softcap *= math.log2(math.e)
    _launch_attention(
        results, q, kv_pool, layer, *index, scale, kv_scales[kv_pool.shape[2] - 1], softcap, window, parts, group_size
    )
    if parts.num > 1:
        _launch_combine(out, results, seq_lens, cu_seqlens_q, window, parts)
    return out


def _launch_attention(
    results: _Results,
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    v_scale: float,
    softcap: float,
    window: int | None,
    parts: _Parts,
    group_size: int,
) -> None:
    num_tokens, num_heads, row_size = q.shape
    num_seqs, block_size, head_size = len(seq_lens), kv_pool.shape[4], results.out.shape[-1]
    tiles = _Tiles.of(q, num_seqs, group_size)
    stride_kv_head = kv_pool.stride(3) if kv_pool.shape[2] == 2 else 0  # all groups of heads have one latent row
    turned = row_size - head_size
    # Upper bounds that need no look at the lengths: programs behind a sequence's last tile, or KV, return at once.
    _paged_attention_kernel[(num_tokens // tiles.queries + num_seqs, num_heads // group_size, parts.num)](
        *results,
        q,
        kv_pool[0, layer, 0],
        kv_pool[0, layer, -1],
        block_tables,
        seq_lens,
        cu_seqlens_q,
        scale,
        v_scale,
        softcap,
        num_seqs,
        window or 0,
        *q.stride()[:2],
        *results.out.stride()[:3],
        kv_pool.stride(0),
        stride_kv_head,
        kv_pool.stride(4),
        block_tables.stride(0),
        parts.tokens,
        BLOCK_SIZE=block_size,
        TURNED=turned,
        TURNED_PADDED=max(_MIN_DOT_SIZE, triton.next_power_of_2(turned)) if turned else _MIN_DOT_SIZE,
        GROUP_SIZE=group_size,
        TILE_QUERIES=tiles.queries,
        TILE_ROWS=tiles.rows,
        TILE_KV=tiles.kv,
        HAS_SOFTCAP=softcap > 0.0,
        IN_PARTS=parts.num > 1,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **_sizes(head_size, window),
        **LAUNCH_OPTIONS,
    )


def _group_size(num_heads: int, kv_pool: torch.Tensor) -> int:
    """The query heads of a program: those of a KV head, or as many as a tile has rows for whose results are latents."""
    if kv_pool.shape[2] == 2:
        return num_heads // kv_pool.shape[3]
    return next(size for size in range(min(num_heads, _MIN_DOT_SIZE), 0, -1) if num_heads % size == 0)


def _launch_combine(
    out: torch.Tensor,
    results: _Results,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    window: int | None,
    parts: _Parts,
) -> None:
    num_tokens, num_heads, head_size = out.shape
    _combine_kernel[(num_tokens, num_heads)](
        out,
        *results,
        seq_lens,
        cu_seqlens_q,
        seq_lens.shape[0],
        window or 0,
        parts.num,
        parts.tokens,
        TILE_PARTS=_COMBINED,
        num_warps=4,
        **_sizes(head_size, window),
        **LAUNCH_OPTIONS,
    )


def _sizes(head_size: int, window: int | None) -> dict[str, int | bool]:
    """What both kernels are compiled for."""
    padded = max(_MIN_DOT_SIZE, triton.next_power_of_2(head_size))
    return {"HEAD_SIZE": head_size, "HEAD_SIZE_PADDED": padded, "HAS_WINDOW": window is not None}
