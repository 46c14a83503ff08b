"""Causal attention over a paged KV pool: prefill chunks and decode rows of one step."""

from typing import Any

import torch

from pdkv.kernels.kv_copy import FP8, NO_SCALES, Scales, raw

FEW_QUERIES = 8
"""So many queries of a sequence, or fewer, are best computed as a decode's are: they wait for the KV to be read."""

_MAX_QUERIES = 128
"""Queries of the reference at a time, so that a chunk of a long prompt does not take memory for all its scores."""


def paged_attention(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    kv_scales: Scales = NO_SCALES,
    softcap: float = 0.0,
    value_size: int | None = None,
    decodes: tuple[int, int] | None = None,
    at_most: bool = False,
) -> torch.Tensor:
    """Causal attention for the last tokens of each sequence.

    Args:
        q: (T, num_heads, head_size), the sequences' queries one after another.
        kv_pool: (num_blocks, num_layers, sides, num_kv_heads, block_size, head_size), K and V of every token of the
            sequences, this step's included; with q's dtype, or in FP8.
        layer: which layer of the pool.
        block_tables: (R, max_blocks) int32; entries after a sequence's last block are not read. The launch depends only
            on max_blocks and the other shapes, never on the content of device memory, so a CUDA graph that contains it
            stays valid.
        seq_lens: (R,) int32, tokens of each sequence, this step's included.
        cu_seqlens_q: (R + 1,) int32, sequence i's queries are [cu_seqlens_q[i], cu_seqlens_q[i + 1]); may be empty.
        scale: factor of the logits.
        window: how many tokens each query attends to, including its own; None: all up to its own.
        kv_scales: the values that 1.0 in an FP8 pool represents, for K and for V.
        softcap: c, where logits x become c * tanh(x / c); 0: they stay.
        value_size: of a pool of latent rows, whose sides are one: so many of a row's first numbers are its value.
        decodes: so many first sequences, and queries of theirs, are launched apart from those behind them, as suits
            sequences of few queries beside prompts; None: all have one launch. The result is the same but for rounding.
        at_most: `decodes` has a bound for their queries, of which `cu_seqlens_q` knows the number: so a launch is valid
            for other steps.

    Returns:
        (T, num_heads, head_size or value_size) in q's dtype; zeros in rows from cu_seqlens_q[R] on (padding).
        Non-finite values in K and V affect only the queries that attend to them.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or a window that hides even a query's own token.
    """
    _check(q, kv_pool, layer, block_tables, seq_lens, cu_seqlens_q)
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if (kv_pool.shape[2] == 1) != (value_size is not None) or not 0 < (value_size or 1) <= q.shape[2]:
        raise ValueError(f"value_size {value_size} does not fit kv_pool {tuple(kv_pool.shape)}")
    tensors = q, kv_pool, layer, block_tables, seq_lens, cu_seqlens_q
    options: Any = {"window": window, "kv_scales": kv_scales, "softcap": softcap, "value_size": value_size}
    if q.is_cuda:
        from pdkv.kernels.paged_attention_triton import paged_attention_triton

        return paged_attention_triton(*tensors, scale, **options, decodes=decodes, at_most=at_most)
    return paged_attention_reference(*tensors, scale, **options)


def paged_attention_reference(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    kv_scales: Scales = NO_SCALES,
    softcap: float = 0.0,
    value_size: int | None = None,
) -> torch.Tensor:
    """What `paged_attention` computes, sequence by sequence in torch; in float32, or float64 for float64 inputs."""
    precision = torch.promote_types(q.dtype, torch.float32)
    kv_heads, block_size, head_size = kv_pool.shape[3:]
    size = head_size if value_size is None else value_size
    out = q.new_zeros((*q.shape[:2], size))
    starts = cu_seqlens_q.tolist()
    for i, (start, stop, seq_len) in enumerate(zip(starts[:-1], starts[1:], seq_lens.tolist(), strict=True)):
        if start == stop:
            continue
        blocks = block_tables[i, : -(-seq_len // block_size)].long()
        kv = raw(kv_pool)[blocks, layer].view(kv_pool.dtype)  # (blocks, sides, num_kv_heads, block_size, head_size)
        sides = kv.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len].to(precision)
        keys, values = sides[0], sides[-1, ..., :size]
        bad = ~values.isfinite()  # even a weight of 0 would bring them to queries that do not see them
        is_bad = bool(bad.any())
        values = values.masked_fill(bad, 0.0) if is_bad else values
        positions = torch.arange(seq_len, device=q.device)
        for first in range(start, stop, _MAX_QUERIES):
            queries = q[first : min(first + _MAX_QUERIES, stop)].to(precision)
            count = len(queries)
            seen = seq_len - (stop - first) + count
            own = positions[seen - count : seen, None]
            hidden = positions[:seen] > own  # (queries, tokens)
            if window is not None:
                hidden |= positions[:seen] <= own - window
            grouped = queries.reshape(count, kv_heads, -1, head_size).permute(1, 2, 0, 3).flatten(1, 2)
            logits = (grouped @ keys[:, :seen].transpose(1, 2)).view(kv_heads, -1, count, seen)
            logits = logits.mul_(scale * kv_scales[0])
            logits = logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits
            logits = logits.masked_fill_(hidden, -torch.inf)
            weights = logits.softmax(dim=-1).flatten(1, 2)
            result = (weights @ values[:, :seen]).view(kv_heads, -1, count, size)
            if is_bad:
                result.masked_fill_(((~hidden).to(precision) @ bad[:, :seen].to(precision) > 0)[:, None], torch.nan)
            result = (result * kv_scales[len(sides) - 1]).permute(2, 0, 1, 3).reshape(count, -1, size)
            out[first : first + count] = result.to(q.dtype)
    return out


def _check(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
) -> None:
    if q.dim() != 3 or kv_pool.dim() != 6 or kv_pool.shape[2] > 2:
        raise ValueError(f"q must be (T, heads, D) and kv_pool 6-d, got {tuple(q.shape)} and {tuple(kv_pool.shape)}")
    if q.shape[2] != kv_pool.shape[5] or q.shape[1] % kv_pool.shape[3]:
        raise ValueError(f"q {tuple(q.shape)} does not fit the heads of kv_pool {tuple(kv_pool.shape)}")
    if kv_pool.dtype not in (q.dtype, FP8):
        raise ValueError(f"q is {q.dtype}, kv_pool {kv_pool.dtype}")
    if not 0 <= layer < kv_pool.shape[1]:
        raise ValueError(f"layer {layer} is not in [0, {kv_pool.shape[1]})")
    num_seqs = seq_lens.shape[0]
    if seq_lens.dim() != 1 or block_tables.dim() != 2 or block_tables.shape[0] != num_seqs:
        raise ValueError(f"block_tables {tuple(block_tables.shape)} does not fit seq_lens {tuple(seq_lens.shape)}")
    if cu_seqlens_q.shape != (num_seqs + 1,):
        raise ValueError(f"cu_seqlens_q must be ({num_seqs + 1},), got {tuple(cu_seqlens_q.shape)}")
    for name, tensor in (("block_tables", block_tables), ("seq_lens", seq_lens), ("cu_seqlens_q", cu_seqlens_q)):
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, got {tensor.dtype}")
    if any(t.device != q.device for t in (kv_pool, block_tables, seq_lens, cu_seqlens_q)):
        raise ValueError("all tensors must be on one device")
