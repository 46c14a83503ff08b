"""Paged attention in Triton against its reference in higher precision; run by test_triton.py, in a process of their
own.
"""

from typing import Any

import pytest
import torch
from kernel_inputs import BFLOAT16_FIRST, FLOAT32_FIRST, MIXED, attention_inputs, randn

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
@pytest.mark.parametrize("dtype", BFLOAT16_FIRST, indirect=True, ids=str)
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
@pytest.mark.parametrize("dtype", BFLOAT16_FIRST, indirect=True, ids=str)
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


@pytest.mark.parametrize("num_shares", [2, 0])  # for which there is room: larger parts; not divided
def test_where_many_parts_have_no_room_few_give_the_same(
    num_shares: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, pool, *index = (t.to(device) for t in attention_inputs(IN_PARTS, (4, 2), 32, 16, padding=3))
    monkeypatch.setattr(paged_attention_module, "_PART", 64)
    monkeypatch.setattr(paged_attention_module, "_MAX_PARTS_BYTES", num_shares * 2 * 8 * 4 * 32 * 4)
    result = paged_attention_triton(q, pool, 1, *index, scale=0.2)
    expected = paged_attention_reference(q.double(), pool.double(), 1, *index, scale=0.2)
    torch.testing.assert_close(result.double(), expected, atol=2e-6, rtol=2e-6)


def parts_of(
    seq_lens: list[int], device: torch.device, patch: pytest.MonkeyPatch, window: int | None = None, size: int = 0
) -> list[int]:
    """The parts in which the KV of sequences of one query is computed, of 64 shares as with Llama 3.1's 8 heads of KV,
    whose block tables are wide enough for 131,072 tokens; padded to `size` sequences.
    """
    patch.setattr(paged_attention_module, "_PROGRAMS", 64)
    noted: list[torch.Tensor] = []
    make = paged_attention_module._Results.of

    def note(*arguments: Any) -> Any:
        results = make(*arguments)
        results.plans.fill_(0)
        noted.append(results.plans)
        return results

    patch.setattr(paged_attention_module._Results, "of", note)
    padding = max(size - len(seq_lens), 0)
    q, pool, tables, lengths, cu = attention_inputs([(1, n) for n in seq_lens], (1, 1), 16, 16, padding=padding)
    wide = torch.zeros(len(seq_lens) + padding, 131_072 // 16, dtype=torch.int32)
    wide[: len(seq_lens), : tables.shape[1]] = tables
    lengths, cu = torch.nn.functional.pad(lengths, (0, padding)), torch.cat((cu, cu[-1:].expand(padding)))
    on_device = [t.to(device) for t in (q, pool, wide, lengths, cu)]
    result = paged_attention_triton(on_device[0], on_device[1], 1, *on_device[2:], scale=0.2, window=window)
    expected = paged_attention_reference(*(t.double() for t in on_device[:2]), 1, *on_device[2:], 0.2, window=window)
    torch.testing.assert_close(result.double(), expected, atol=2e-6, rtol=2e-6)
    return [int(count) for count in noted[0][: len(seq_lens), 0]]


@pytest.mark.parametrize(
    ("seq_lens", "window", "size", "parts"),
    [
        ([1024], None, 0, [8]),  # 64 programs, where a division by the model's length would leave 8
        ([1024], None, 4, [8]),
        ([100], None, 0, [1]),
        ([2000, 90, 1, 700], None, 0, [16, 1, 1, 6]),
        ([2000, 90, 700], 300, 0, [3, 1, 3]),
    ],
)
def test_decodes_are_divided_by_their_own_lengths(
    seq_lens: list[int],
    window: int | None,
    size: int,
    parts: list[int],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the width of the block tables."""
    assert parts_of(seq_lens, device, monkeypatch, window, size) == parts


def test_a_long_sequence_among_short_ones_is_divided_and_they_are_not(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eighth of all tokens is a share; lengths are looked at in two passes."""
    monkeypatch.setattr(paged_attention_module, "_SEQS", 4)
    monkeypatch.setattr(paged_attention_module, "_MAX_PARTS_BYTES", 8 * 2 * 16 * 16 * 4)
    assert parts_of([40, 30, 50, 20, 1200, 60], device, monkeypatch) == [1, 1, 1, 1, 7, 1]


def test_a_decode_step_has_as_many_programs_as_work_and_at_most_as_many_empty_ones_as_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """32 heads of 128, 8 of which have KV: 20,480 programs of 64 rows were 98 % empty."""
    monkeypatch.setattr(paged_attention_module, "_PROGRAMS", 512)
    for num_seqs, most in ((1, 65 * 8), (8, (8 + 2 + 64) * 8), (64, (64 + 16 + 64) * 8)):
        q = torch.empty(num_seqs, 32, 128, dtype=torch.bfloat16, device="meta")
        launch = paged_attention_module._Launch.of(q, (0, 0), (num_seqs, num_seqs), 131_072, 4, 128)
        assert (launch.num_shares, launch.num_programs * 8) == (64, most)


MIXED_STEP = [(1, 150), (3, 40), (1, 20), (40, 60), (9, 9)]
"""Decodes first."""


@pytest.mark.parametrize("window", [35, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16], indirect=True, ids=str)
def test_decodes_beside_prompts_are_launched_apart(
    window: int | None, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small tiles, and parts; the prompts in large ones."""
    launches: list[Any] = []
    make = paged_attention_module._Results.of

    def note(out: torch.Tensor, launch: Any) -> Any:
        launches.append(launch)
        return make(out, launch)

    monkeypatch.setattr(paged_attention_module._Results, "of", note)
    q, pool, *index = attention_inputs(MIXED_STEP, (4, 2), 32, 16, padding=3)
    q, pool, *index = (t.to(device) for t in (q.to(dtype), pool.to(dtype), *index))
    result = paged_attention_triton(q, pool, 1, *index, scale=0.2, window=window, decodes=(3, 5))
    expected = paged_attention_reference(q.double(), pool.double(), 1, *index, scale=0.2, window=window)
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert [each.num_seqs for each in launches] == [3, 2]
    assert [each.tiles.rows for each in launches] == [16, 128]


@pytest.mark.parametrize("num_tokens", [3, 0])
@pytest.mark.parametrize("dtype", FLOAT32_FIRST, indirect=True, ids=str)
def test_a_launch_has_room_for_more_decodes_than_there_are(
    num_tokens: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and in parts, and for more prompts; with room for no decode there is one launch."""
    monkeypatch.setattr(paged_attention_module, "_PART", 64)
    few = [(1, 200), (2, 70), (0, 0), (0, 0)] if num_tokens else []
    q, pool, *index = attention_inputs([*few, (20, 110), (9, 9), (0, 0)], (4, 2), 32, 16, padding=3)
    q, pool, *index = (t.to(device) for t in (q.to(dtype), pool.to(dtype), *index))
    expected = paged_attention_reference(q.double(), pool.double(), 1, *index, scale=0.2)
    for most in (32, 1):
        monkeypatch.setattr(paged_attention_module, "_PROGRAMS", most)
        decodes = len(few), 2 * len(few)
        result = paged_attention_triton(q, pool, 1, *index, scale=0.2, decodes=decodes, at_most=True)
        torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


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
