"""`paged_attention` as callers see it, against dense attention, and what it refuses."""

from typing import Any

import pytest
import torch

from pdkv.kernels.kv_copy import write_kv
from pdkv.kernels.paged_attention import paged_attention

BLOCK_SIZE = 16


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Causal attention of the last len(q) of len(k) tokens, one query and head at a time."""
    out = torch.empty_like(q)
    group_size = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        seen = len(k) - len(q) + i + 1
        first = 0 if window is None else max(0, seen - window)
        for head in range(q.shape[1]):
            weights = (k[first:seen, head // group_size] @ q[i, head] * scale).softmax(0)
            out[i, head] = weights @ v[first:seen, head // group_size]
    return out


@pytest.mark.parametrize("window", [None, 1, 18, 200])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=str)
def test_equals_dense_attention(heads: tuple[int, int], window: int | None) -> None:
    """A prefill from nothing, a later chunk, decode rows, a sequence without queries; write_kv fills the pool."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    lengths = [(20, 20), (5, 50), (1, 33), (0, 7), (1, 1)]
    pool = torch.randn(20, 2, 2, heads[1], BLOCK_SIZE, 24, generator=generator, dtype=torch.float64)
    free = iter(torch.randperm(20, generator=generator).tolist())
    tables = torch.full((len(lengths), 5), 12345, dtype=torch.int32)
    queries, expected = [], []
    for i, (num_queries, seq_len) in enumerate(lengths):
        k, v = torch.randn(2, seq_len, heads[1], 24, generator=generator, dtype=torch.float64)
        q = torch.randn(num_queries, heads[0], 24, generator=generator, dtype=torch.float64)
        blocks = torch.tensor([next(free) for _ in range(-(-seq_len // BLOCK_SIZE))])
        tables[i, : len(blocks)] = blocks
        positions = torch.arange(seq_len)
        write_kv(pool, 1, k, v, blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
        queries.append(q)
        expected.append(dense(q, k, v, 0.3, window))
    result = paged_attention(
        torch.cat(queries),
        pool,
        1,
        tables,
        torch.tensor([s for _, s in lengths], dtype=torch.int32),
        torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).int(),
        0.3,
        window=window,
    )
    torch.testing.assert_close(result, torch.cat(expected))


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("q", torch.zeros(2, 4, 8), "does not fit the heads"),
        ("q", torch.zeros(2, 3, 16), "does not fit the heads"),
        ("q", torch.zeros(2, 64), "q must be"),
        ("q", torch.zeros(2, 4, 16, dtype=torch.float16), "float16"),
        ("layer", 3, "layer 3"),
        ("block_tables", torch.zeros(2, 4, dtype=torch.int64), "int32"),
        ("block_tables", torch.zeros(3, 4, dtype=torch.int32), "does not fit seq_lens"),
        ("cu_seqlens_q", torch.zeros(2, dtype=torch.int32), r"\(3,\)"),
        ("window", 0, "window must be at least 1, got 0"),
    ],
)
def test_refuses_what_does_not_fit(argument: str, value: Any, message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 4, 16),
        "kv_pool": torch.zeros(4, 3, 2, 2, 16, 16),
        "layer": 0,
        "block_tables": torch.zeros(2, 4, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32),
        "scale": 1.0,
    }
    paged_attention(**arguments)
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**arguments, argument: value})
