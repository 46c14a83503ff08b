"""The backends against attention written out, over random mixes of chunks and decodes."""

import ctypes
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from attention_case import MIXES, Case, Shape, layers_of, without_compiled_kernel
from isas import kernels_of

from pdkv.engine.worker.attention.backend import AttentionBackend, Scores
from pdkv.engine.worker.attention.cpu import CpuAttention, TorchQueries
from pdkv.engine.worker.attention.select import make_backend
from pdkv.kernels import host
from pdkv.kernels.compiled import levels

torch.set_num_threads(1)

SHAPE = Shape()

needs_compiled_kernel = pytest.mark.skipif(not host.available(), reason="no compiler when pdkv was installed")


@needs_compiled_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"), [(6, 2, 16), (4, 4, 32), (8, 2, 64), (3, 1, 128), (2, 2, 80)]
)
def test_single_queries_equal_attention_written_out_at_every_level(
    heads: int, kv_heads: int, head_size: int, dtype: torch.dtype
) -> None:
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.02}
    for mix in ([(0, 1)], [(40, 1)], MIXES[4]):
        expected = Case(mix, dtype, shape=Shape(heads, kv_heads, head_size)).expected(1)
        for isa, threads in itertools.product(levels(), (1, 2)):
            torch.set_num_threads(threads)
            try:
                with kernels_of(isa):
                    case = Case(mix, dtype, shape=Shape(heads, kv_heads, head_size))
                    backend = CpuAttention(case.pool, heads, case.layers)
                    assert not isinstance(backend._singles, TorchQueries)
                    result = case.run(backend, 1).double()
            finally:
                torch.set_num_threads(1)
            torch.testing.assert_close(
                result, expected, **close, msg=lambda text, isa=isa, n=threads: f"{isa}, {n} threads: {text}"
            )


@needs_compiled_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_caps_equal_the_reference_at_every_level(dtype: torch.dtype) -> None:
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.02}
    for scores in (Scores(0.9, 1.5), Scores(0.9, 50.0), Scores(20.0, 3.0)):
        case = Case(MIXES[3], dtype)
        backend = CpuAttention(case.pool, SHAPE.heads, case.layers, scores)
        backend._singles = backend._prompts = TorchQueries(case.pool, SHAPE.heads, scores)
        expected = case.run(backend, 1)
        for isa in levels():
            with kernels_of(isa):
                case = Case(MIXES[3], dtype)
                result = case.run(CpuAttention(case.pool, SHAPE.heads, case.layers, scores), 1)
            torch.testing.assert_close(result, expected, **close, msg=lambda text, isa=isa: f"{isa}: {text}")


@needs_compiled_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mix", [[(2999, 1)], [(511, 1), (512, 1)], [(2500, 1), *[(9, 1)] * 7]], ids=len)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (6, 3), (4, 1)])
def test_single_queries_give_the_same_bits_on_any_number_of_threads(
    heads: int, kv_heads: int, mix: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    case = Case(mix, dtype, shape=Shape(heads, kv_heads, 64))
    backend, results = CpuAttention(case.pool, heads, case.layers), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(case.run(backend, 0))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(result, results[0]) for result in results)
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(results[0].double(), case.expected(0), **close)


@needs_compiled_kernel
@pytest.mark.parametrize(("kv_heads", "threads"), [(8, 12), (8, 16), (1, 8), (3, 2)])
@pytest.mark.parametrize("num_short", [0, 31])
def test_a_long_query_is_shared_by_all_threads_whatever_the_heads(num_short: int, kv_heads: int, threads: int) -> None:
    seq_lens = np.array([4000] + [1] * num_short, dtype=np.int64)
    args = host.AttentionArgs(
        seq_lens=seq_lens.ctypes.data, n=len(seq_lens), num_threads=threads,
        heads=kv_heads, kv_heads=kv_heads, head_size=64, block_size=16,
    )  # fmt: skip
    library = host._library()
    assert library is not None
    assert library.pdkv_attend_pieces(ctypes.byref(args)) >= num_short + threads


@needs_compiled_kernel
def test_keys_whose_scores_are_all_minus_infinity_weigh_nothing_beside_others() -> None:
    case = Case([(1023, 1)], shape=Shape(1, 1, 16))
    case.qkv.fill_(1.0)
    case.pool[case.blocks(0)[:32], 0, 0] = torch.finfo(torch.float32).min
    result = case.run(CpuAttention(case.pool, 1, case.layers), 0)
    alone = Case([(511, 1)], shape=Shape(1, 1, 16))
    alone.qkv.fill_(1.0)
    alone.pool[alone.blocks(0)] = case.pool[case.blocks(0)[32:]]
    torch.testing.assert_close(result, alone.run(CpuAttention(alone.pool, 1, alone.layers), 0))


@needs_compiled_kernel
def test_every_half_is_read_and_the_means_of_two_are_rounded_as_torch_rounds() -> None:
    """With queries of 0 a result is the mean of the values: of one alone, what it was; of two, rounded to a half."""
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()].view(-1, 16)
    others = halves.roll(5, 0).flip(1)
    for earlier, own, expected in ((0, halves, halves), (1, others, ((halves.float() + others.float()) / 2).half())):
        case = Case([(earlier, 1)] * len(halves), torch.float16, shape=Shape(1, 1, 16))
        case.pool[[case.blocks(slot)[0] for slot in range(len(halves))], 0, 1, 0, 0] = halves
        case.qkv.zero_()
        case.qkv[:, -1] = own
        assert torch.equal(case.run(CpuAttention(case.pool, 1, case.layers), 0), expected)


@needs_compiled_kernel
def test_large_scores_do_not_overflow() -> None:
    case = Case([(100, 1), (0, 1)])
    case.qkv[:, : SHAPE.heads] *= 1000
    torch.testing.assert_close(
        case.run(CpuAttention(case.pool, SHAPE.heads, case.layers), 0).double(), case.expected(0), rtol=1e-3, atol=1e-3
    )


@needs_compiled_kernel
def test_head_sizes_that_the_kernel_does_not_take_are_left_to_torch() -> None:
    for pool in (torch.zeros(2, 1, 2, 1, 16, 8), torch.zeros(2, 1, 2, 1, 16, 16, dtype=torch.float64)):
        assert isinstance(CpuAttention(pool, 1, layers_of([None]))._singles, TorchQueries)


@pytest.mark.parametrize("mix", MIXES, ids=len)
@pytest.mark.parametrize("make", [CpuAttention, without_compiled_kernel], ids=["cpu", "cpu-torch"])
def test_backends_equal_attention_written_out(
    mix: list[tuple[int, int]], make: Callable[[torch.Tensor, int], AttentionBackend]
) -> None:
    for layer in range(SHAPE.layers):
        case = Case(mix)
        expected = case.expected(layer)
        backend = make(case.pool, SHAPE.heads, case.layers)
        torch.testing.assert_close(case.run(backend, layer).double(), expected, rtol=1e-4, atol=1e-5)
        some = case.run(backend, SHAPE.layers - 1, last_only=True)
        if layer == SHAPE.layers - 1:
            torch.testing.assert_close(some.double(), expected[case.last_rows], rtol=1e-4, atol=1e-5)


WINDOWS = [1, 16, 40, 700]
FEW_WINDOWS = [1, 40, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 16, 17, 150, 700, 5000))]


@pytest.mark.parametrize("window", FEW_WINDOWS)
@pytest.mark.parametrize("mix", MIXES, ids=len)
@pytest.mark.parametrize("make", [CpuAttention, without_compiled_kernel], ids=["cpu", "cpu-torch"])
def test_windows_equal_attention_written_out(
    mix: list[tuple[int, int]], make: Callable[..., AttentionBackend], window: int
) -> None:
    """In both layers, in one or the other, and another one in each."""
    for windows in ([window, window], [None, window], [window, None], [window, 20]):
        case = Case(mix)
        expected = [case.expected(layer, windows[layer]) for layer in range(2)]
        backend = make(case.pool, SHAPE.heads, layers_of(windows))
        for layer in range(2):
            torch.testing.assert_close(case.run(backend, layer).double(), expected[layer], rtol=1e-4, atol=1e-5)
        some = case.run(backend, 1, last_only=True)
        torch.testing.assert_close(some.double(), expected[1][case.last_rows], rtol=1e-4, atol=1e-5)


@needs_compiled_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(4, 4, 32), (8, 2, 64), (3, 1, 128), (2, 2, 80)])
def test_windows_of_single_queries(heads: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> None:
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.02}
    for window in WINDOWS:
        case = Case(MIXES[4], dtype, shape=Shape(heads, kv_heads, head_size))
        result = case.run(CpuAttention(case.pool, heads, layers_of([window, window])), 1)
        torch.testing.assert_close(result.double(), case.expected(1, window), **close)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    case = Case(MIXES[3], dtype)
    expected = case.expected(0)
    torch.testing.assert_close(
        case.run(CpuAttention(case.pool, SHAPE.heads, case.layers), 0).double(), expected, rtol=0.05, atol=0.05
    )


def test_only_the_scheduled_slots_are_written() -> None:
    case = Case([(5, 3), (0, 20), (31, 1)])
    before = case.pool.clone()
    case.run(make_backend(case.pool, SHAPE.heads, case.layers), 1)
    written = torch.zeros(case.pool.shape[0], SHAPE.block_size, dtype=torch.bool)
    written[case.inputs.block_ids[0], case.inputs.offsets] = True
    changed = (
        (case.pool != before).any(-1).permute(0, 4, 1, 2, 3).flatten(3)
    )  # (blocks, offsets, layers, sides * heads)
    assert changed[:, :, 1].all(-1).eq(written).all()
    assert not changed[:, :, 0].any()
