"""The copies and digests of KV in Triton against their references; run by test_triton.py, in a process of their own."""

import math

import numpy as np
import pytest
import torch
from kernel_inputs import randn

from pdkv.kernels.digest import hash_rows, seeds_of
from pdkv.kernels.digest_triton import digests_triton
from pdkv.kernels.host import Rows
from pdkv.kernels.kv_copy import FP8, Range, copy_units_reference, quantize, raw, write_kv_reference
from pdkv.kernels.kv_copy_triton import copy_units_triton, write_kv_triton
from pdkv.kernels.pool_copy import copy_pieces_reference
from pdkv.kernels.pool_copy_triton import copy_pieces_triton


@pytest.mark.parametrize(("num_heads", "head_size", "block_size"), [(2, 32, 16), (3, 80, 48), (8, 128, 16)], ids=str)
def test_write_kv(num_heads: int, head_size: int, block_size: int, device: torch.device) -> None:
    pool = randn(6, 3, 2, num_heads, block_size, head_size, dtype=torch.float16, device=device)
    fused = randn(9, 2 * num_heads, head_size, dtype=torch.float16, device=device)
    k, v = fused[:, :num_heads], fused[:, num_heads:]
    slots = torch.tensor([0, 1, -1, 6 * block_size - 1, 5, 2 * block_size, -(1 << 40), 17, -1], device=device)
    expected = pool.clone()
    write_kv_reference(expected, 2, k, v, slots)
    write_kv_triton(pool, 2, k, v, slots)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_write_kv_into_fp8(dtype: torch.dtype, device: torch.device) -> None:
    """To the last bit what torch rounds: saturated, subnormal, tied between two, and not finite."""
    pool = torch.zeros(4, 3, 2, 2, 16, 24, device=device).to(FP8)
    k, v = randn(2, 6, 2, 24, dtype=torch.float32, device=device).mul(300).to(dtype)
    k[0, 0, :10] = torch.tensor([math.nan, math.inf, -math.inf, 448, 1e6, -1e6, 1e-3, 2**-10, 17, 19]).to(device, dtype)
    slots = torch.tensor([3, -1, 17, 40, 63, -5], device=device)
    expected = pool.clone()
    for scales in ((1.0, 1.0), (0.7, 13.0)):
        write_kv_reference(expected, 1, k, v, slots, scales)
        write_kv_triton(pool, 1, k, v, slots, scales)
        assert torch.equal(raw(pool), raw(expected))
        assert pool[0, 1, 0, 0, 3, :3].isnan().all()
        assert pool[0, 1, 0, 0, 3, 4] == 448


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize(
    ("block_size", "tokens", "layers", "heads"),
    [(16, 16, (0, 5), (0, 3)), (48, 16, (1, 4), (1, 3)), (128, 128, (4, 5), (0, 3)), (32, 16, (0, 5), (2, 3))],
    ids=str,
)
def test_blocks_travel_both_ways(
    block_size: int, tokens: int, layers: Range, heads: Range, dtype: torch.dtype, device: torch.device
) -> None:
    """Parts of blocks, ranges of layers and heads, to the last bit; nothing else is written."""
    pool = randn(7, 5, 2, 3, block_size, 40, dtype=torch.float32, device=device) * 200
    pool = quantize(pool, 1.0) if dtype == FP8 else pool.to(dtype)
    ids = torch.tensor([5, 0, 6], device=device) * (block_size // tokens) + block_size // tokens - 1
    shape = (3, layers[1] - layers[0], 2, heads[1] - heads[0], tokens, 40)
    gathered, expected = torch.zeros(2, *shape, device=device).to(dtype)
    part = layers, heads
    copy_units_triton(pool, ids, gathered, *part, to_pool=False)
    copy_units_reference(pool, ids, expected, *part, to_pool=False)
    assert torch.equal(raw(gathered), raw(expected))
    target, expected_target = torch.zeros_like(pool), torch.zeros_like(pool)
    copy_units_triton(target, ids.flip(0), gathered, *part, to_pool=True)
    copy_units_reference(expected_target, ids.flip(0), gathered, *part, to_pool=True)
    assert torch.equal(raw(target), raw(expected_target))
    assert raw(expected_target).any()


@pytest.mark.parametrize("row_words", [2, 7, 8, 64, 100])
def test_digests(row_words: int, device: torch.device) -> None:
    """Of a part of heads and of tokens, with the bits that the kernels for host memory have."""
    units, sides, heads = 5, 4, 3
    pool = np.random.default_rng(row_words).integers(0, 256, (units, sides, heads, row_words * 8), dtype=np.uint8)
    taken, first_head, unit_words = [4, 0, 3], 1, sides * heads * row_words
    words = np.array([row_words, 1, row_words // 2 + 1], dtype=np.int64)
    seeds = seeds_of(range(sides // 2), range(7, 9))
    expected = np.stack(
        [hash_rows(pool[u, :, 1:, : 8 * w], seeds).sum(0) for u, w in zip(taken, words.tolist(), strict=True)]
    )
    result = digests_triton(
        torch.from_numpy(pool.reshape(-1).view(np.int64)).to(device),
        torch.tensor([u * unit_words + first_head * row_words for u in taken], device=device),
        torch.from_numpy(words).to(device),
        torch.from_numpy(seeds.view(np.int64)).to(device),
        (heads * row_words, row_words),
        row_words,
    )
    assert np.array_equal(result.cpu().numpy().view(np.uint64), expected)


@pytest.mark.parametrize(
    "rows",
    [
        Rows(1, 0, 0, 1, 0, 0, 16 * 2100),  # a block: more than a program's part
        Rows(3, 480, 960, 2, 96, 48, 48),  # heads of layers, with other strides on the other side
    ],
)
def test_pieces_go_from_pool_to_pool(rows: Rows, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(rows.row_bytes)
    unit = max(rows.row_bytes, rows.outer * rows.target_outer_stride)  # pieces do not overlap
    source = torch.randint(256, (15 * unit,), dtype=torch.uint8, generator=generator).to(device)
    target = torch.zeros(6 * unit, dtype=torch.uint8, device=device)
    to, start = (torch.tensor(ids, device=device) * unit for ids in ([5, 0, 2], [11, 7, 3]))
    expected = target.clone()
    copy_pieces_reference(expected, source, to, start, rows)
    copy_pieces_triton(target, source, to, start, rows)
    assert torch.equal(target, expected)
    assert target.any()
