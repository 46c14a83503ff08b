"""Passes over rows by Triton against float64 and torch; run by test_triton.py, in a process of its own.

What is computed in float32 and rounded once to a format of p bits differs from the exact value by half a unit of p
bits, and by what float32 lost before: some units of 24 bits.
"""

import pytest
import torch
import torch.nn.functional as F

from pdkv.kernels.kv_copy import FP8, PagedSlots, raw
from pdkv.kernels.kv_copy_triton import write_kv_triton
from pdkv.kernels.passes_triton import gated_triton, pass_heads_triton, rms_norm_triton
from pdkv.models.heads import TorchRotation, TritonRotation
from pdkv.models.passes import RMSNorm
from pdkv.models.rope import RopeTable

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
HALF_UNITS = {F32: 2.0**-24, BF16: 2.0**-8, F16: 2.0**-11}
"""Of a number's own size, at most: what rounding to the format changes."""
LOST = 24 * 2.0**-24
"""Of a result's size, at most: by float32 sums in trees, and by approximate roots, exponentials and quotients."""


@pytest.fixture(params=[F32, BF16, F16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def make(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(device)


def assert_rounded(result: torch.Tensor, exact: torch.Tensor, roundings: int = 1) -> None:
    """`result` is `exact` (float64) but for so many roundings to its format; some smallest numbers apart."""
    dtype = result.dtype
    tiny = max(torch.finfo(dtype).smallest_normal * HALF_UNITS[dtype] * 2, torch.finfo(F32).tiny)  # which GPUs flush
    bound = exact.abs() * (roundings * HALF_UNITS[dtype] * (1 + HALF_UNITS[dtype]) + LOST) + tiny
    assert ((result.double() - exact).abs() <= bound).all(), ((result.double() - exact).abs() / bound).max()


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 37), (5, 576), (2, 4096), (1, 16384)])
def test_rms_norm(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = make(rows, size + 3, dtype=dtype, device=device)[:, :size], make(size, dtype=dtype, device=device)
    exact = F.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    assert_rounded(rms_norm_triton(x, weight, 1e-5), exact)


def test_rms_norm_of_large_and_small_rows(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = make(4, 100, dtype=dtype, device=device), make(100, dtype=dtype, device=device)
    x *= torch.tensor([1e-3, 0.0, 1e3, 100.0], dtype=dtype, device=device)[:, None]
    result = rms_norm_triton(x, weight, 1e-6)
    assert_rounded(result, F.rms_norm(x.double(), (100,), weight.double(), 1e-6))
    assert not result[1].any()


def test_a_norm_that_is_added_is_the_norm_and_then_the_sum(dtype: torch.dtype, device: torch.device) -> None:
    x, weight, residual = (make(*shape, dtype=dtype, device=device) for shape in ((3, 100), (100,), (3, 100)))
    expected = residual + rms_norm_triton(x, weight, 1e-6)
    assert rms_norm_triton(x, weight, 1e-6, residual) is residual
    assert torch.equal(residual, expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy remarks on infinities
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 37), (2, 1500)])
def test_silu_mul(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = make(rows, 2 * size + 5, dtype=dtype, device=device)[:, : 2 * size] * 4
    gate, up = x.double().chunk(2, dim=1)
    assert_rounded(gated_triton(x), F.silu(gate) * up, roundings=2)
    gelu = F.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gated_triton(x, gelu=True).double(), gelu, atol=1e-5, rtol=0.01)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy remarks on infinities
def test_silu_mul_at_the_ends(device: torch.device) -> None:
    gates = torch.tensor([100.0, -100.0, -1e30, 1e30, 0.0, float("nan")], device=device)
    result = gated_triton(torch.cat([gates, torch.full_like(gates, 2.0)]).unsqueeze(0))
    assert_rounded(result[:, :-1], F.silu(gates[:-1].double()) * 2.0)
    assert result[0, -1].isnan()


SHAPES = [(1, 1, 2, 2), (3, 1, 20, 20), (14, 2, 64, 64), (2, 2, 80, 32), (5, 1, 37, 6), (33, 3, 128, 128)]
"""Heads, KV heads, their size, and how much of it is rotated."""


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "rotary"), SHAPES)
def test_heads_are_torch_s_within_rounding(
    heads: int, kv_heads: int, head_size: int, rotary: int, has_norms: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Norm and products are those of float64 but for what is rounded; values and gaps between rows stay."""
    table = RopeTable(*(make(50, 1, rotary + i, dtype=dtype, device=device)[..., i:].contiguous() for i in (0, 1)))
    rows = make(4, (heads + 2 * kv_heads) * head_size + 8, dtype=dtype, device=device)
    before = rows.clone()
    positions = torch.tensor([49, 0, 3, 3], device=device)
    norms = [RMSNorm(make(head_size + i, dtype=dtype, device=device)[i:], 1e-5) for i in (0, 1)]
    given = norms if has_norms else [None, None]

    def view(x: torch.Tensor) -> torch.Tensor:
        return x[:, :-8].view(4, heads + 2 * kv_heads, head_size)

    TritonRotation(table, heads, kv_heads).at(positions).of(*given).apply(view(rows))
    exact = view(before).double()
    if has_norms:
        exact[:, :heads] = F.rms_norm(exact[:, :heads], (head_size,), norms[0].weight.double(), 1e-5)
        exact[:, heads:-kv_heads] = F.rms_norm(exact[:, heads:-kv_heads], (head_size,), norms[1].weight.double(), 1e-5)
    expected = exact.clone()
    TorchRotation(RopeTable(*(part.double() for part in table)), heads, kv_heads).at(positions).of(None, None).apply(
        expected
    )
    rolled = torch.roll(exact[..., :rotary], rotary // 2, -1)
    size = expected.abs()  # of what is added up, where it is: a sum may cancel
    size[..., :rotary] = (exact[..., :rotary] * table.cos[positions]).abs() + (rolled * table.sin[positions]).abs()
    bound = size * ((2 + has_norms) * HALF_UNITS[dtype] * 1.01 + LOST) + 1e-7
    error = (view(rows).double() - expected).abs()
    assert (error <= bound)[:, :-kv_heads].all(), (error / bound)[:, :-kv_heads].max()
    assert torch.equal(view(rows)[:, -kv_heads:], view(before)[:, -kv_heads:])
    assert torch.equal(rows[:, -8:], before[:, -8:])


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "rotary"), [SHAPES[i] for i in (0, 3, 4, 5)])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_heads_that_are_written_are_those_of_two_kernels_to_the_bit(
    heads: int, kv_heads: int, head_size: int, rotary: int, has_norms: bool, in_fp8: bool, device: torch.device
) -> None:
    """Queries, and a pool in which padding writes nothing."""
    table = RopeTable(*(make(50, 1, rotary + i, dtype=BF16, device=device)[..., i:].contiguous() for i in (0, 1)))
    qkv, positions = make(4, heads + 2 * kv_heads, head_size, dtype=BF16, device=device), torch.arange(4, device=device)
    norms = [RMSNorm(make(head_size, dtype=BF16, device=device), 1e-5)] * 2 if has_norms else [None, None]
    rotation = TritonRotation(table, heads, kv_heads).at(positions).of(*norms)
    pools = [torch.zeros(3, 2, 2, kv_heads, 4, head_size, device=device).to(FP8 if in_fp8 else BF16) for _ in range(2)]
    slots = [PagedSlots(pool, 1, torch.tensor([9, -1, 3, 4], device=device), (0.02, 0.5)) for pool in pools]
    fused = qkv.clone()
    rotation.apply_and_write(fused, slots[0])
    rotation.apply(qkv)
    write_kv_triton(pools[1], 1, qkv[:, heads:-kv_heads], qkv[:, -kv_heads:], *slots[1][2:])
    assert torch.equal(fused[:, :heads], qkv[:, :heads])
    assert torch.equal(raw(pools[0]), raw(pools[1]))
    assert raw(pools[0])[2, 1].any()


def test_rows_that_are_not_contiguous_are_refused(device: torch.device) -> None:
    x = torch.ones(4, 4, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm_triton(x.T, x[0], 1e-6)
    with pytest.raises(ValueError, match="contiguous"):
        gated_triton(x.T)
    with pytest.raises(ValueError, match="contiguous"):
        pass_heads_triton(x.view(4, 2, 2).transpose(1, 2), x[0].long(), x.view(8, 1, 2), x.view(8, 1, 2), 1, 0, None)
