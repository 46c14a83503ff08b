"""The Triton kernels against their references in higher precision; run by test_triton.py, in a process of their own."""

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_case import MIXES, Case, Shape, layers_of
from interpreted_floats import compute_as_gpus_do
from oracle import oracle
from serving_checks import serve_directory
from small_models import FEATURES

from pdkv import LLM, SamplingParams
from pdkv.connectors.transfer.planning import first_seen_block
from pdkv.engine.attention import cuda as attention_cuda
from pdkv.engine.attention import select
from pdkv.engine.attention.cuda import CudaAttention
from pdkv.kernels import paged_attention_triton as paged_attention_module
from pdkv.kernels.digest import hash_rows, seeds_of
from pdkv.kernels.digest_triton import digests_triton
from pdkv.kernels.host import Rows
from pdkv.kernels.kv_copy import (
    FP8,
    Range,
    gather_blocks_reference,
    quantize,
    raw,
    scatter_blocks_reference,
    write_kv_reference,
)
from pdkv.kernels.kv_copy_triton import copy_units_triton, write_kv_triton
from pdkv.kernels.paged_attention import paged_attention_reference
from pdkv.kernels.paged_attention_triton import paged_attention_triton
from pdkv.kernels.pool_copy import copy_pieces_reference
from pdkv.kernels.pool_copy_triton import copy_pieces_triton
from pdkv.models import heads, loader, passes

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}

MIXED = [(1, 33), (20, 20), (0, 9), (1, 16), (3, 130), (0, 0), (1, 1), (35, 65)]  # (queries, tokens) of a sequence


if os.environ.get("TRITON_INTERPRET") == "1":
    compute_as_gpus_do()


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    if request.param == torch.float16 and device.type == "cpu":
        pytest.skip("the interpreter takes bfloat16 the same way")
    return request.param


def randn(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def attention_inputs(
    lengths: list[tuple[int, int]], heads: tuple[int, int], head_size: int, block_size: int, padding: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, pool (3 layers; float32, every block of it used at most once), block tables, lengths, cu_seqlens_q."""
    generator = torch.Generator().manual_seed(len(lengths))
    num_q = [q for q, _ in lengths]
    max_blocks = max(-(-s // block_size) for _, s in lengths) + 1
    q = torch.randn(sum(num_q) + padding, heads[0], head_size, generator=generator)
    pool = torch.randn(len(lengths) * max_blocks, 3, 2, heads[1], block_size, head_size, generator=generator)
    tables = torch.randperm(len(pool), generator=generator).view(len(lengths), max_blocks).int()
    seq_lens = torch.tensor([s for _, s in lengths], dtype=torch.int32)
    return q, pool, tables, seq_lens, torch.tensor([0, *num_q]).cumsum(0).int()


@pytest.mark.parametrize("lengths", [MIXED, [(1, 50)]], ids=["mixed", "one"])
@pytest.mark.parametrize(
    ("heads", "head_size", "block_size"),
    [((4, 2), 32, 16), ((8, 8), 64, 16), ((6, 2), 80, 48), ((32, 1), 16, 32)],
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


@pytest.mark.parametrize("window", [1, 65, 100])
@pytest.mark.parametrize(("heads", "head_size", "block_size"), [((4, 2), 32, 16), ((6, 2), 80, 48)], ids=str)
def test_windows(
    heads: tuple[int, int], head_size: int, block_size: int, window: int, dtype: torch.dtype, device: torch.device
) -> None:
    q, pool, *index = attention_inputs([*MIXED, (70, 200)], heads, head_size, block_size, padding=3)
    q, pool, *index = (t.to(device) for t in (q.to(dtype), pool.to(dtype), *index))
    result = paged_attention_triton(q, pool, 1, *index, scale=head_size**-0.5, window=window)
    expected = paged_attention_reference(q.double(), pool.double(), 1, *index, scale=head_size**-0.5, window=window)
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    whole = paged_attention_reference(q.double(), pool.double(), 1, *index, scale=head_size**-0.5)
    assert not torch.allclose(expected, whole)


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
    q, pool, *index = attention_inputs(IN_PARTS, heads, head_size, block_size, padding=3)
    q, pool, *index = (t.to(device) for t in (q.to(dtype), pool.to(dtype), *index))
    result = paged_attention_triton(q, pool, 1, *index, scale=head_size**-0.5, window=window)
    expected = paged_attention_reference(q.double(), pool.double(), 1, *index, scale=head_size**-0.5, window=window)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    for num_parts in (2, 0):  # for which there is room: of 128 tokens; not divided
        monkeypatch.setattr(paged_attention_module, "_MAX_PARTS_BYTES", num_parts * 4 * q.numel())
        other = paged_attention_triton(q, pool, 1, *index, scale=head_size**-0.5, window=window, max_seq_len=200)
        torch.testing.assert_close(other, result, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_parts_grow_where_there_is_no_room_for_many() -> None:
    """By 32 MiB of float32 for all parts together, in tokens of 32 heads of 128."""
    parts = {
        (num_tokens, longest): tuple(paged_attention_module._Parts.of(num_tokens * 32 * 128, longest))
        for num_tokens, longest in ((1, 131072), (31, 131072), (64, 4096), (512, 131072), (512, 500), (1025, 131072))
    }
    assert parts == {
        (1, 131072): (256, 512),
        (31, 131072): (64, 2048),
        (64, 4096): (8, 512),
        (512, 131072): (4, 32768),
        (512, 500): (1, 512),
        (1025, 131072): (1, 131072),
    }


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


@pytest.mark.parametrize("window", [None, 70])
def test_prompts_are_computed_in_large_tiles(window: int | None, dtype: torch.dtype, device: torch.device) -> None:
    q, pool, *index = attention_inputs([(100, 130), (1, 20), (45, 45)], (4, 2), 32, 16, padding=3)
    q, pool, *index = (t.to(device) for t in (q.to(dtype), pool.to(dtype), *index))
    assert paged_attention_module._Tiles.of(q, num_seqs=3, group_size=2).rows == (16 if dtype == torch.float32 else 128)
    result = paged_attention_triton(q, pool, 1, *index, scale=32**-0.5, window=window)
    expected = paged_attention_reference(q.double(), pool.double(), 1, *index, scale=32**-0.5, window=window)
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("window", [1, 7, 65])
@pytest.mark.parametrize("block_size", [16, 48])
def test_blocks_before_the_window_are_not_even_loaded(window: int, block_size: int, device: torch.device) -> None:
    """A request has given them up: block numbers out of range stand for them here."""
    lengths = [(1, 33), (20, 120), (1, 200), (70, 250)]
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


POISONS = ["nan", "inf", "-inf", "largest"]


@pytest.mark.parametrize("poison", POISONS)
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
@pytest.mark.parametrize("poison", POISONS[:3])
@pytest.mark.parametrize("first_bad", [0, 1, 7, 11, 19, 20])
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


@pytest.fixture
def in_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA backend launches the Triton kernels here, too, where its own choice would be the references."""
    if device.type == "cpu":
        monkeypatch.setattr(attention_cuda, "paged_attention", paged_attention_triton)
        monkeypatch.setattr(attention_cuda, "write_kv", write_kv_triton)


@pytest.mark.usefixtures("in_triton")
@pytest.mark.parametrize("mix", [*MIXES[:2], [(0, 40), (37, 1), (0, 3), (30, 20), (15, 1)], MIXES[5][:9]], ids=len)
@pytest.mark.parametrize("shape", [Shape(), Shape(4, 4, 80, 48)], ids=str)
def test_the_backend_equals_attention_written_out(
    mix: list[tuple[int, int]], shape: Shape, device: torch.device
) -> None:
    case = Case(mix, shape=shape).to(device)
    windows = [None, 20]
    expected = [case.expected(layer, windows[layer]) for layer in range(shape.layers)]
    backend = CudaAttention(case.pool, shape.heads, layers_of(windows))
    for layer in range(shape.layers):
        torch.testing.assert_close(case.run(backend, layer).double(), expected[layer], rtol=1e-5, atol=1e-5)
    some = case.run(backend, shape.layers - 1, last_only=True)
    torch.testing.assert_close(some.double(), expected[-1][case.last_rows], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy remarks on what the neighbour computes
@pytest.mark.usefixtures("in_triton")
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, torch.finfo(torch.float32).max])
def test_the_backend_reads_only_what_a_request_owns(poison: float, device: torch.device) -> None:
    """Poison in tails, in nobody's blocks and in a neighbour: the others get what they get beside nothing odd."""
    mix = [(0, 20), (37, 1), (0, 3), (40, 10), (15, 1)]
    clean, poisoned = Case(mix).to(device), Case(mix).to(device)
    poisoned.fill_foreign(poison)
    poisoned.poison(3, poison)
    others = torch.ones(len(clean.qkv), dtype=torch.bool)
    others[clean.rows(3)] = False
    results = [
        case.run(CudaAttention(case.pool, case.shape.heads, case.layers), 0)[others] for case in (clean, poisoned)
    ]
    assert torch.equal(*results)


@pytest.mark.usefixtures("in_triton")
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_an_engine_over_the_kernels_says_what_transformers_says(
    family: str,
    device: torch.device,
    hf_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts in chunks beside decodes, one of them found in the cache in part; windows, and queries and keys that are
    normed, for qwen3.
    """
    monkeypatch.setattr(select, "on_device", lambda _: True)
    monkeypatch.setattr(loader, "linear_kind", lambda *_: "plain")
    for module in (heads, passes):
        monkeypatch.setattr(module, "by_triton", lambda _: True)
    directory = hf_model(family, initializer_range=0.2, **FEATURES.get(family, {}))
    prompts = [list(range(3, 3 + length)) for length in (5, 21, 37)]
    prompts.append([*prompts[-1], 7, 9])
    expected = [oracle(directory).generate(prompt, 6) for prompt in prompts]
    monkeypatch.setattr(passes.F, "rms_norm", lambda *_: pytest.fail("a norm by torch"))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    options = {"kv_cache_memory": 4 << 20, "max_num_batched_tokens": 24, "max_num_seqs": 4, "dtype": "float32"}
    with LLM(serve_directory(directory, tmp_path), device=device.type, threads=1, **options) as llm:
        outputs = llm.generate(prompts[:3], params, progress=False) + llm.generate(prompts[3:], params, progress=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert outputs[-1].num_cached_tokens > 0


def test_paged_attention_takes_strided_queries(device: torch.device) -> None:
    """Queries as a slice of a fused projection."""
    q, pool, *index = (t.to(device) for t in attention_inputs(MIXED, (4, 2), 32, 16, padding=0))
    fused = randn(len(q), 8, 32, dtype=torch.float32, device=device)
    strided = fused[:, 2:6]
    result = paged_attention_triton(strided, pool, 0, *index, scale=0.2)
    expected = paged_attention_reference(strided.double(), pool.double(), 0, *index, scale=0.2)
    torch.testing.assert_close(result.double(), expected, atol=2e-6, rtol=2e-6)


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


STEP = [(35, 65), (1, 130), (0, 9), (1, 16), (3, 100), (20, 20), (1, 1)]
"""(Queries, tokens): prompts with and without cached context, decodes, and a sequence that waits."""


@pytest.mark.parametrize(
    ("stored", "heads", "head_size", "block_size", "window"),
    [
        (torch.bfloat16, (4, 4), 64, 16, None),
        (torch.bfloat16, (8, 2), 128, 32, 40),
        (FP8, (4, 1), 64, 48, None),
        (FP8, (8, 2), 128, 16, 40),
    ],
    ids=str,
)
def test_a_step_in_bfloat16_errs_by_its_roundings_alone(
    stored: torch.dtype,
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
    window: int | None,
    device: torch.device,
) -> None:
    """K and V are written, then attended to, beside float64.

    FP8 keeps 3 bits behind the first: 2**-4 of a number, half of 2**-9 of what is subnormal, both times the scale.
    Attention rounds the weights and the result to bfloat16, 2**-8 of each; 2**-16 is left to sums in float32.
    """
    scales = (0.02, 0.5) if stored == FP8 else (1.0, 1.0)
    q, blank, tables, *lengths = (t.to(device) for t in attention_inputs(STEP, heads, head_size, block_size, 3))
    pool = torch.zeros_like(blank).to(stored)
    size = int(lengths[0].sum())
    keys, values = randn(2, size + 2, heads[1], head_size, dtype=torch.bfloat16, device=device)
    slots = [
        int(row[p // block_size]) * block_size + p % block_size
        for row, n in zip(tables, lengths[0].tolist(), strict=True)
        for p in range(n)
    ]
    slot_mapping = torch.tensor([*slots, -1, -1], device=device)
    write_kv_triton(pool, 1, keys, values, slot_mapping, scales)
    written = pool.double() * torch.tensor(scales, device=device)[:, None, None, None]
    whole = torch.zeros_like(blank).double()
    write_kv_reference(whole, 1, keys.double(), values.double(), slot_mapping)
    rounding, least = (2**-4, 2**-10) if stored == FP8 else (0.0, 0.0)
    least_of_sides = least * torch.tensor(scales, device=device)[:, None, None, None]
    assert ((written - whole).abs() <= rounding * whole.abs() + least_of_sides * (whole != 0)).all()

    q = q.bfloat16()
    index = (1, tables, *lengths, head_size**-0.5)
    result = paged_attention_triton(q, pool, *index, window=window, kv_scales=scales).double()
    expected = paged_attention_reference(q.double(), written, *index, window=window)
    written[:, 1, 1] = written[:, 1, 1].abs()
    size_of_terms = paged_attention_reference(q.double(), written, *index, window=window)
    assert ((result - expected).abs() <= (2**-8 + 2**-16) * (size_of_terms + expected.abs())).all()
    assert not result[len(q) - 3 :].any()


@pytest.mark.parametrize(
    ("stored", "sent"),
    [(torch.float32, torch.float32), (FP8, FP8), (FP8, torch.bfloat16), (torch.bfloat16, FP8)],
    ids=str,
)
@pytest.mark.parametrize(
    ("block_size", "tokens", "layers", "heads"),
    [(16, 16, (0, 5), (0, 3)), (48, 16, (1, 4), (1, 3)), (128, 128, (4, 5), (0, 3)), (32, 16, (0, 5), (2, 3))],
    ids=str,
)
def test_blocks_travel_both_ways(
    block_size: int,
    tokens: int,
    layers: Range,
    heads: Range,
    stored: torch.dtype,
    sent: torch.dtype,
    device: torch.device,
) -> None:
    """Parts of blocks, ranges of layers and heads, into FP8 and out of it, to the last bit; nothing else is written."""
    pool = randn(7, 5, 2, 3, block_size, 40, dtype=torch.float32, device=device) * 200
    pool = quantize(pool, 1.0) if stored == FP8 else pool.to(stored)
    scales = torch.rand(5, 2, generator=torch.Generator().manual_seed(1)).add_(0.1).to(device)
    ids = torch.tensor([5, 0, 6], device=device) * (block_size // tokens) + block_size // tokens - 1
    shape = (3, layers[1] - layers[0], 2, heads[1] - heads[0], tokens, 40)
    gathered, expected = torch.zeros(2, *shape, device=device).to(sent)
    part = layers, heads, scales
    copy_units_triton(pool, ids, gathered, *part, to_pool=False)
    gather_blocks_reference(pool, ids, expected, *part)
    assert torch.equal(raw(gathered), raw(expected))
    target, expected_target = torch.zeros_like(pool), torch.zeros_like(pool)
    copy_units_triton(target, ids.flip(0), gathered, *part, to_pool=True)
    scatter_blocks_reference(expected_target, ids.flip(0), gathered, *part)
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
    unit = rows.row_bytes
    source = torch.randint(256, (12 * max(unit, 2880),), dtype=torch.uint8, generator=generator).to(device)
    target = torch.zeros(6 * max(unit, 2880), dtype=torch.uint8, device=device)
    to, start = (torch.tensor(ids, device=device) * unit for ids in ([5, 0, 2], [11, 7, 3]))
    expected = target.clone()
    copy_pieces_reference(expected, source, to, start, rows)
    copy_pieces_triton(target, source, to, start, rows)
    assert torch.equal(target, expected)
    assert target.any()
