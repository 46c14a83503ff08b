"""Paged attention in Triton against its reference in higher precision; run by test_triton.py, in a process of their
own.
"""

import pytest
import torch
from kernel_inputs import FLOAT32_FIRST, MIXED, attention_inputs, randn

from pdkv.kernels import paged_attention_triton as paged_attention_module
from pdkv.kernels.paged_attention import paged_attention_reference
from pdkv.kernels.paged_attention_triton import paged_attention_triton

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("lengths", [MIXED, [(1, 50)]], ids=["mixed", "one"])
@pytest.mark.parametrize(
    ("heads", "head_size", "block_size"),
    [
        ((4, 2), 32, 16),
        pytest.param((8, 8), 64, 16, marks=pytest.mark.slow),
        pytest.param((6, 2), 80, 48, marks=pytest.mark.slow),
        pytest.param((8, 1), 16, 32, marks=pytest.mark.slow),
        pytest.param((32, 1), 16, 32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_paged_attention(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    q, pool, *index = attention_inputs(lengths, heads, head_size, block_size, padding=3)
    q, pool, *index = (t.to(device) for t in (q.to(dtype), pool.to(dtype), *index))
    result = paged_attention_triton(q, pool, 1, *index, scale=head_size**-0.5)
    expected = paged_attention_reference(q.double(), pool.double(), 1, *index, scale=head_size**-0.5)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("window", [65, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 100))])
@pytest.mark.parametrize(
    ("heads", "head_size", "block_size"),
    [((4, 2), 32, 16), pytest.param((6, 2), 80, 48, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("dtype", FLOAT32_FIRST, indirect=True, ids=str)
def test_windows(
    heads: tuple[int, int], head_size: int, block_size: int, window: int, dtype: torch.dtype, device: torch.device
) -> None:
    q, pool, *index = attention_inputs([*MIXED, (17, 200)], heads, head_size, block_size, padding=3)
    q, pool, *index = (t.to(device) for t in (q.to(dtype), pool.to(dtype), *index))
    result = paged_attention_triton(q, pool, 1, *index, scale=head_size**-0.5, window=window)
    expected = paged_attention_reference(q.double(), pool.double(), 1, *index, scale=head_size**-0.5, window=window)
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    whole = paged_attention_reference(q.double(), pool.double(), 1, *index, scale=head_size**-0.5)
    assert not torch.allclose(expected, whole)


@pytest.mark.parametrize("window", [None, 65])
def test_soft_caps(window: int | None, dtype: torch.dtype, device: torch.device) -> None:
    q, pool, *index = attention_inputs(MIXED, (4, 2), 32, 16, padding=3)
    q, pool, *index = (t.to(device) for t in (q.to(dtype), pool.to(dtype), *index))
    options = {"scale": 0.7, "window": window, "softcap": 1.5}
    result = paged_attention_triton(q, pool, 1, *index, **options)
    expected = paged_attention_reference(q.double(), pool.double(), 1, *index, **options)
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


IN_PARTS = [(1, 200), (3, 130), (1, 64), (0, 70), (1, 65), (2, 2), (9, 110)]  # of 64 tokens


@pytest.mark.parametrize(
    ("heads", "head_size", "block_size", "window"), [((4, 2), 32, 16, None), ((6, 2), 24, 48, 90)], ids=str
)
def test_parts_of_the_kv_are_combined(
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_attention_module, "_PART", 64)
    monkeypatch.setattr(paged_attention_module, "_COMBINED", 2)
    q, pool, *index = attention_inputs(IN_PARTS, heads, head_size, block_size, padding=3)
    q, pool, *index = (t.to(device) for t in (q.to(dtype), pool.to(dtype), *index))
    result = paged_attention_triton(q, pool, 1, *index, scale=head_size**-0.5, window=window)
    expected = paged_attention_reference(q.double(), pool.double(), 1, *index, scale=head_size**-0.5, window=window)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("num_parts", [2, 0])  # for which there is room: larger ones; not divided
def test_where_many_parts_have_no_room_few_give_the_same(
    num_parts: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, pool, *index = (t.to(device) for t in attention_inputs(IN_PARTS, (4, 2), 32, 16, padding=3))
    monkeypatch.setattr(paged_attention_module, "_PART", 64)
    monkeypatch.setattr(paged_attention_module, "_MAX_PARTS_BYTES", num_parts * 4 * q.numel())
    result = paged_attention_triton(q, pool, 1, *index, scale=0.2)
    expected = paged_attention_reference(q.double(), pool.double(), 1, *index, scale=0.2)
    torch.testing.assert_close(result.double(), expected, atol=2e-6, rtol=2e-6)


def test_parts_are_small_where_programs_are_few_and_grow_where_there_is_no_room_for_many() -> None:
    """By 32 MiB of float32 for all parts together, in tokens of 32 heads of 128, 8 of which have KV."""
    cases = ((1, 1024), (1, 131072), (31, 131072), (64, 4096), (512, 131072), (512, 500), (1025, 131072))
    parts = {
        (num_tokens, longest): tuple(
            paged_attention_module._Parts.of(num_tokens * 32 * 128, longest, num_programs=num_tokens * 8)
        )
        for num_tokens, longest in cases
    }
    assert parts == {
        (1, 1024): (8, 128),
        (1, 131072): (64, 2048),
        (31, 131072): (32, 4096),
        (64, 4096): (1, 4096),
        (512, 131072): (4, 32768),
        (512, 500): (1, 4096),
        (1025, 131072): (1, 131072),
    }


@pytest.mark.parametrize("window", [70, pytest.param(None, marks=pytest.mark.slow)])
def test_prompts_are_computed_in_large_tiles(window: int | None, dtype: torch.dtype, device: torch.device) -> None:
    q, pool, *index = attention_inputs([(70, 130), (1, 20), (9, 9)], (4, 2), 32, 16, padding=3)
    q, pool, *index = (t.to(device) for t in (q.to(dtype), pool.to(dtype), *index))
    assert paged_attention_module._Tiles.of(q, num_seqs=3, group_size=2).rows == (16 if dtype == torch.float32 else 128)
    if dtype == torch.float32:
        return
    result = paged_attention_triton(q, pool, 1, *index, scale=32**-0.5, window=window)
    expected = paged_attention_reference(q.double(), pool.double(), 1, *index, scale=32**-0.5, window=window)
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_paged_attention_takes_strided_queries(device: torch.device) -> None:
    """Queries as a slice of a fused projection."""
    q, pool, *index = (t.to(device) for t in attention_inputs(MIXED, (4, 2), 32, 16, padding=0))
    fused = randn(len(q), 8, 32, dtype=torch.float32, device=device)
    strided = fused[:, 2:6]
    result = paged_attention_triton(strided, pool, 0, *index, scale=0.2)
    expected = paged_attention_reference(strided.double(), pool.double(), 0, *index, scale=0.2)
    torch.testing.assert_close(result.double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("heads", "row", "value", "lengths"),
    [
        (6, 48, 32, [(1, 33), (3, 60), (0, 9)]),
        pytest.param(32, 576, 512, MIXED, marks=pytest.mark.slow),
        pytest.param(24, 40, 24, [*MIXED, (2, 300)], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype", FLOAT32_FIRST, indirect=True, ids=str)
def test_latent_rows(
    heads: int,
    row: int,
    value: int,
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One program takes some of the heads; the KV is divided, and undivided."""
    q, pool, *index = attention_inputs(lengths, (heads, 1), row, 16, padding=3)
    q, pool, *index = (t.to(device) for t in (q.to(dtype), pool[:, :, :1].contiguous().to(dtype), *index))
    expected = paged_attention_reference(q.double(), pool.double(), 1, *index, scale=0.1, value_size=value)
    for most in (32 << 20, 0):
        monkeypatch.setattr(paged_attention_module, "_MAX_PARTS_BYTES", most)
        result = paged_attention_triton(q, pool, 1, *index, scale=0.1, value_size=value)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
