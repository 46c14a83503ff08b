"""`paged_attention` in Triton: one program per (tile of queries of one sequence, KV head), online softmax over its KV.

A tile holds some queries times all query heads that share the KV head, so that a decode row fills the matrix unit's
rows too. Source of the online softmax: Dao et al., "FlashAttention", 2022; of the tiles: vLLM's unified attention.
"""

import torch
import triton
import triton.language as tl

from pdkv.kernels.triton_jit import LAUNCH_OPTIONS, jit

_MIN_DOT_SIZE = 16  # the matrix unit's smallest operand


@jit()
def _find_sequence(
    cu_seqlens_q: tl.tensor, tile: tl.tensor, num_seqs: tl.tensor, TILE_QUERIES: tl.constexpr
) -> tl.tensor:
    """The sequence of a tile: the last one whose first tile, cu[i] // TILE_QUERIES + i, is not behind it."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first_tile = tl.load(cu_seqlens_q + middle) // TILE_QUERIES + middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@jit(do_not_specialize=["num_seqs", "window"])
def _paged_attention_kernel(
    out: tl.tensor,
    q: tl.tensor,
    keys: tl.tensor,  # the layer's K of block 0
    values: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    cu_seqlens_q: tl.tensor,
    scale: tl.tensor,
    num_seqs: tl.tensor,
    window: tl.tensor,  # tokens that a query sees, its own included; of any size without HAS_WINDOW
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_out_token: tl.tensor,
    stride_out_head: tl.tensor,
    stride_kv_block: tl.tensor,
    stride_kv_head: tl.tensor,
    stride_kv_token: tl.tensor,
    stride_table: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # at least TILE_QUERIES * GROUP_SIZE
    TILE_KV: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = _find_sequence(cu_seqlens_q, tile, num_seqs, TILE_QUERIES)
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
    positions = first_position + queries

    best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    result = tl.zeros([TILE_ROWS, HEAD_SIZE_PADDED], tl.float32)
    spoiled = tl.zeros([TILE_ROWS], tl.float32)  # above 0: the row sees a value that is not finite
    kv_stop = tl.minimum(first_position + first_query + TILE_QUERIES, seq_len)  # causal: nothing behind is seen
    kv_begin = 0
    if HAS_WINDOW:  # from the block on in which the first query's window begins: those before it may be given up
        kv_begin = tl.maximum(first_position + first_query + 1 - window, 0) // BLOCK_SIZE * BLOCK_SIZE
    for kv_start in range(kv_begin, kv_stop, TILE_KV):
        kv_positions = kv_start + tl.arange(0, TILE_KV)
        kv_mask = kv_positions < kv_stop
        blocks = tl.load(block_tables + seq.to(tl.int64) * stride_table + kv_positions // BLOCK_SIZE, kv_mask, other=0)
        offsets = (
            blocks.to(tl.int64) * stride_kv_block
            + kv_head * stride_kv_head
            + (kv_positions % BLOCK_SIZE) * stride_kv_token
        )
        load_mask = kv_mask[:, None] & dim_mask[None, :]
        key_tile = tl.load(keys + offsets[:, None] + dims[None, :], mask=load_mask, other=0.0)
        logits = tl.dot(query_tile, tl.trans(key_tile), input_precision="ieee") * scale
        seen = kv_mask[None, :] & (kv_positions[None, :] <= positions[:, None])
        if HAS_WINDOW:
            seen = seen & (kv_positions[None, :] > positions[:, None] - window)
        logits = tl.where(seen, logits, float("-inf"))
        # Without a window every row sees position 0 in its first tile, so `new_best` is finite from then on.
        new_best = tl.maximum(best, tl.max(logits, axis=1))
        top = new_best
        if HAS_WINDOW:  # a row whose window begins further on has seen nothing yet
            top = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp(logits - top[:, None])
        correction = tl.exp(best - top)
        value_tile = tl.load(values + offsets[:, None] + dims[None, :], mask=load_mask, other=0.0)
        # Whether some row may not see all of the tile.
        partial = kv_start + TILE_KV > first_position + first_query + 1
        if HAS_WINDOW:
            partial = partial | (kv_start + window < kv_stop)
        if partial:
            # A weight of 0 does not keep NaN or infinity from a row: they go to those that may see them by hand.
            finite = tl.abs(value_tile.to(tl.float32)) < float("inf")
            bad = tl.max(tl.where(finite, 0.0, 1.0), axis=1)
            spoiled = tl.maximum(spoiled, tl.max(tl.where(seen, bad[None, :], 0.0), axis=1))
            value_tile = tl.where(finite, value_tile, 0.0).to(value_tile.dtype)
        total = total * correction + tl.sum(weights, axis=1)
        result = result * correction[:, None]
        result += tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
        best = new_best
    if HAS_WINDOW:
        total = tl.where(total == 0.0, 1.0, total)  # rows of the tile behind the last query, which nobody stores
    result = tl.where(spoiled[:, None] > 0.0, float("nan"), result / total[:, None])
    tl.store(
        out + tokens[:, None] * stride_out_token + heads[:, None] * stride_out_head + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=mask,
    )


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
) -> torch.Tensor:
    """Launch the kernel; arguments as `paged_attention` has checked them. The innermost dimensions are contiguous."""
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads, block_size = kv_pool.shape[3:5]
    num_seqs = seq_lens.shape[0]
    if q.stride(2) != 1 or kv_pool.stride(5) != 1 or block_tables.stride(1) != 1:
        raise ValueError("the innermost dimension of q, kv_pool and block_tables must be contiguous")
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    if num_tokens == 0 or num_seqs == 0:
        return out
    group_size = num_heads // num_kv_heads
    tile_rows = max(_MIN_DOT_SIZE, triton.next_power_of_2(group_size))
    tile_queries = tile_rows // group_size
    # An upper bound that needs no look at the lengths: programs behind a sequence's last tile return at once.
    num_tiles = num_tokens // tile_queries + num_seqs
    keys, values = kv_pool[0, layer, 0], kv_pool[0, layer, 1]
    _paged_attention_kernel[(num_tiles, num_kv_heads)](
        out,
        q,
        keys,
        values,
        block_tables,
        seq_lens,
        cu_seqlens_q,
        scale,
        num_seqs,
        window or 0,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        kv_pool.stride(0),
        kv_pool.stride(3),
        kv_pool.stride(4),
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        HEAD_SIZE=head_size,
        HEAD_SIZE_PADDED=max(_MIN_DOT_SIZE, triton.next_power_of_2(head_size)),
        GROUP_SIZE=group_size,
        TILE_QUERIES=tile_queries,
        TILE_ROWS=tile_rows,
        TILE_KV=64 if head_size <= 128 else 32,
        HAS_WINDOW=window is not None,
        **LAUNCH_OPTIONS,
    )
    return out
