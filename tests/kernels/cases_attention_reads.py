"""Paged attention reads nothing that a query may not see; run by test_triton.py, in a process of their own."""

import math
from collections.abc import Callable

import pytest
import torch
from kernel_inputs import FLOAT32_FIRST, MIXED, attention_inputs

from pdkv.connectors.transfer.planning import first_seen_block
from pdkv.kernels import paged_attention_triton as paged_attention_module
from pdkv.kernels.paged_attention import paged_attention_reference
from pdkv.kernels.paged_attention_triton import paged_attention_triton


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter computes in numpy
def test_what_is_not_finite_in_a_part_reaches_those_that_see_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention_module, "_PART", 64)
    q, pool, *index = attention_inputs([(4, 130), (1, 130)], (4, 2), 32, 16, padding=0)
    q, pool, *index = (t.to(device) for t in (q, pool, *index))
    clean = paged_attention_triton(q, pool, 0, *index, scale=0.2)
    pool[index[0][0, 128 // 16].item(), 0, :, :, 128 % 16] = math.nan
    result = paged_attention_triton(q, pool, 0, *index, scale=0.2)
    sees = torch.tensor([False, False, True, True, False])
    assert torch.equal(result[~sees], clean[~sees])
    assert result[sees].isnan().all()


@pytest.mark.parametrize("window", [65, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 7))])
@pytest.mark.parametrize("block_size", [16, pytest.param(48, marks=pytest.mark.slow)])
def test_blocks_before_the_window_are_not_even_loaded(window: int, block_size: int, device: torch.device) -> None:
    """A request has given them up: block numbers out of range stand for them here."""
    lengths = [(1, 33), (9, 120), (1, 200), (17, 250)]
    q, pool, tables, seq_lens, cu_seqlens_q = attention_inputs(lengths, (4, 2), 32, block_size, padding=0)
    q, pool, tables, *rest = (t.to(device) for t in (q, pool, tables, seq_lens, cu_seqlens_q))
    clean = paged_attention_triton(q, pool, 2, tables, *rest, scale=0.2, window=window)
    for row, (num_queries, seq_len) in zip(tables, lengths, strict=True):
        row[: first_seen_block(window, seq_len - num_queries, block_size)] = 1 << 20
    assert (tables == 1 << 20).sum() > 2
    assert torch.equal(paged_attention_triton(q, pool, 2, tables, *rest, scale=0.2, window=window), clean)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter computes in numpy
@pytest.mark.parametrize("attention", [paged_attention_triton, paged_attention_reference])
@pytest.mark.parametrize("poison", ["nan", "inf"])
@pytest.mark.parametrize(("window", "num_bad"), [(5, 40), (20, 64), (64, 3)])
@pytest.mark.parametrize("dtype", FLOAT32_FIRST, indirect=True, ids=str)
def test_what_is_not_finite_reaches_no_token_behind_its_window(
    attention: Callable[..., torch.Tensor],
    poison: str,
    window: int,
    num_bad: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    q, pool, *index = attention_inputs([(20, 80), (4, 70)], (4, 2), 32, 16, padding=0)
    q, pool, *index = (t.to(device) for t in (q.to(dtype), pool.to(dtype), *index))
    clean = attention(q, pool, 0, *index, scale=0.2, window=window)
    for position in range(num_bad):
        pool[index[0][0, position // 16].item(), 0, :, :, position % 16] = float(poison)
    result = attention(q, pool, 0, *index, scale=0.2, window=window)
    sees = torch.cat((torch.arange(60, 80) - window + 1 < num_bad, torch.zeros(4, dtype=torch.bool)))
    assert torch.equal(result[~sees], clean[~sees])
    assert result[sees].isnan().all()


@pytest.mark.parametrize(
    "poison", ["nan", *(pytest.param(poison, marks=pytest.mark.slow) for poison in ("largest", "inf", "-inf"))]
)
@pytest.mark.parametrize("dtype", FLOAT32_FIRST, indirect=True, ids=str)
def test_paged_attention_reads_nothing_behind_the_sequence(
    poison: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Poison in every slot that belongs to no token, and block numbers out of range behind the last block."""
    value = torch.finfo(dtype).max if poison == "largest" else float(poison)
    q, pool, tables, seq_lens, cu_seqlens_q = attention_inputs(MIXED, (4, 2), 32, 16, padding=0)
    q, pool = q.to(dtype), pool.to(dtype)
    tensors = [t.to(device) for t in (q, pool, tables, seq_lens, cu_seqlens_q)]
    clean = paged_attention_triton(tensors[0], tensors[1], 2, *tensors[2:], scale=0.2)
    for row, seq_len in zip(tables, seq_lens.tolist(), strict=True):
        slots = pool[row.long()].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)  # (layers, 2, heads, tokens, head_size)
        slots[..., seq_len:, :] = value
        pool[row.long()] = slots.unflatten(3, (len(row), 16)).permute(3, 0, 1, 2, 4, 5)
        row[-(-seq_len // 16) :] = 1 << 20
    tensors = [t.to(device) for t in (q, pool, tables, seq_lens, cu_seqlens_q)]
    result = paged_attention_triton(tensors[0], tensors[1], 2, *tensors[2:], scale=0.2)
    assert torch.equal(result, clean)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter computes in numpy
@pytest.mark.parametrize("attention", [paged_attention_triton, paged_attention_reference])
@pytest.mark.parametrize("poison", ["nan", "inf", pytest.param("-inf", marks=pytest.mark.slow)])
@pytest.mark.parametrize("first_bad", [7, 20, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 11, 19))])
@pytest.mark.parametrize("dtype", FLOAT32_FIRST, indirect=True, ids=str)
def test_what_is_not_finite_reaches_no_earlier_token(
    attention: Callable[..., torch.Tensor], poison: str, first_bad: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Else KV of a prompt's first tokens, which other prompts find by those tokens, depends on what came behind."""
    q, pool, *index = attention_inputs([(20, 20), (4, 70)], (4, 2), 32, 16, padding=0)
    q, pool, *index = (t.to(device) for t in (q.to(dtype), pool.to(dtype), *index))
    clean = attention(q, pool, 0, *index, scale=0.2)
    tables = index[0]
    for position in range(first_bad, 20):
        pool[tables[0, position // 16].item(), 0, :, :, position % 16] = float(poison)
    result = attention(q, pool, 0, *index, scale=0.2)
    assert torch.equal(result[:first_bad], clean[:first_bad])
    assert torch.equal(result[20:], clean[20:])
    assert result[first_bad:20].isnan().all()
