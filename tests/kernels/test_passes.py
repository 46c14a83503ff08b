"""The compiled passes against torch in float64: alone, and on the way into a linear layer, at every level."""

import pytest
import torch
import torch.nn.functional as F
from isas import kernels_of
from rows import check_each

from pdkv.kernels.compiled import levels
from pdkv.kernels.linear import BLOCK_ROWS, GATED, GATED_GELU, Norm, PackedWeight, available
from pdkv.kernels.passes import rms_norm

pytestmark = pytest.mark.skipif(not available(), reason="no compiler when pdkv was installed")

F32, BF16 = torch.float32, torch.bfloat16
EPSILON = 1e-5
SIZES = [1, 15, 16, 31, 32, 33, 63, 64, 100, 257, 1000]
KINDS = [
    pytest.param(F32, F32, id="float32"),
    pytest.param(F32, BF16, id="widened"),
    pytest.param(BF16, BF16, id="bfloat16"),
]


def make(*shape: int, dtype: torch.dtype = F32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


def make_norm(size: int) -> Norm:
    return Norm(make(size, dtype=BF16).float(), EPSILON)


def normed_exactly(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + norm.epsilon).sqrt() * norm.weight.double()


def close(out: torch.Tensor, exact: torch.Tensor, roundings: int = 1) -> None:
    """Within a few roundings in float32, and `roundings` to the dtype of the output."""
    relative = 1e-6 + (roundings * 2.0**-8 if out.dtype == BF16 else 0.0)
    assert bool(((out.double() - exact).abs() <= exact.abs() * relative + 1e-30).all())


def identity(size: int, kind: tuple[torch.dtype, torch.dtype]) -> PackedWeight:
    """A layer that gives what it multiplies."""
    return PackedWeight(torch.eye(size, dtype=kind[1]), None, kind[0])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_are_normed_within_rounding(isa: str, dtype: torch.dtype) -> None:
    check_each(SIZES, lambda size: check_norm(dtype, size))


def check_norm(dtype: torch.dtype, size: int) -> None:
    norm = make_norm(size)
    for rows in (1, 2, 77):
        x = make(rows, size, dtype=dtype, scale=3.0)
        alone = rms_norm(x, norm, 1)
        close(alone, normed_exactly(x, norm))
        for threads in (2, 5):
            assert torch.equal(rms_norm(x, norm, threads), alone)
        with kernels_of(levels()[0]):
            assert torch.equal(rms_norm(x, norm, 1), alone)
        torch.testing.assert_close(alone, F.rms_norm(x, (size,), norm.weight.to(dtype), EPSILON))


@pytest.mark.parametrize(("dtype", "weight_dtype"), KINDS)
def test_a_layer_multiplies_what_the_norm_alone_gives(isa: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    check_each(SIZES, lambda size: check_normed_layer(dtype, weight_dtype, size))


def check_normed_layer(dtype: torch.dtype, weight_dtype: torch.dtype, size: int) -> None:
    norm, layer = make_norm(size), PackedWeight(make(45, size, dtype=weight_dtype), None, dtype)
    for rows in (1, 3, 20):
        x, residual = make(rows, size, dtype=dtype), make(rows, 45, dtype=dtype)
        expected = layer.multiply(rms_norm(x, norm, 1), residual, 1)
        for threads in (1, 3):
            assert torch.equal(layer.multiply(x, residual, threads, norm), expected)


@pytest.mark.parametrize(("dtype", "weight_dtype"), KINDS)
def test_gates_are_within_rounding_of_silu_or_gelu_times_up(
    isa: str, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    check_each(SIZES, lambda size: check_gates(dtype, weight_dtype, size))


def check_gates(dtype: torch.dtype, weight_dtype: torch.dtype, size: int) -> None:
    layer = PackedWeight(torch.eye(size, dtype=weight_dtype), None, dtype)
    for rows in (1, 3, 20):
        x = make(rows, 2 * size, dtype=dtype, scale=8.0)
        gate, up = x.double().chunk(2, -1)
        out = layer.multiply(x, None, 1, GATED)
        close(out, F.silu(gate) * up, roundings=2)
        assert torch.equal(layer.multiply(x, None, 3, GATED), out)
        gelu = F.gelu(gate, approximate="tanh") * up
        difference = (layer.multiply(x, None, 1, GATED_GELU).double() - gelu).abs()
        assert bool((difference <= gelu.abs() * (2.0**-7 if dtype == BF16 else 1e-6) + up.abs() * 1e-6).all())


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gates_of_any_size_are_those_of_torch(isa: str, dtype: torch.dtype) -> None:
    ends = [0.0, -0.0, 1e-30, 86.9, 87.1, 88.8, 1e4, 3e38, float("inf"), float("nan")]
    gate = torch.tensor([*ends, *(-end for end in ends)], dtype=dtype)
    layer = PackedWeight(torch.eye(1, dtype=dtype), None, dtype)
    x = torch.stack((gate, torch.ones_like(gate)), 1)
    torch.testing.assert_close(
        layer.multiply(x, None, 1, GATED)[:, 0], F.silu(gate), rtol=1e-6, atol=1e-35, equal_nan=True
    )


@pytest.mark.parametrize(("dtype", "weight_dtype"), KINDS)
@pytest.mark.parametrize("before", ["norm", GATED])
def test_a_row_has_the_same_bits_beside_any_others_and_at_every_level(
    isa: str, dtype: torch.dtype, weight_dtype: torch.dtype, before: str
) -> None:
    size = 96
    given = GATED if before == GATED else make_norm(size)
    layer = PackedWeight(torch.eye(size, dtype=weight_dtype), None, dtype)
    x = make(BLOCK_ROWS + 21, size * (1 + (before == GATED)), dtype=dtype)
    alone = torch.cat([layer.multiply(x[i : i + 1], None, 1, given) for i in range(len(x))])
    for rows in (2, 7, 14, 15, 29, BLOCK_ROWS, len(x)):
        assert torch.equal(layer.multiply(x[:rows], None, 1 + rows % 3, given), alone[:rows])
    with kernels_of(levels()[0]):
        lowest = PackedWeight(torch.eye(size, dtype=weight_dtype), None, dtype)
    assert torch.equal(lowest.multiply(x, None, 1, given), alone)


@pytest.mark.parametrize(("dtype", "weight_dtype"), KINDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_nothing_beside_the_rows_is_read(
    isa: str, dtype: torch.dtype, weight_dtype: torch.dtype, poison: float, rows: int
) -> None:
    """They are unaligned columns of a larger tensor full of NaN or infinity; so was the scratch."""
    size = 37
    layer = PackedWeight(make(45, size, dtype=weight_dtype), None, dtype)
    layer.multiply(torch.full((100, size), poison, dtype=dtype), None, 2)
    whole_norm = torch.full((size + 2,), poison)
    whole_norm[1:-1] = make(size)
    for given, columns in ((Norm(whole_norm[1:-1], EPSILON), size), (GATED, 2 * size)):
        x = make(rows, columns, dtype=dtype)
        whole = torch.full((rows + 2, columns + 7), poison, dtype=dtype)
        inside = whole[1:-1, 3 : 3 + columns]
        inside.copy_(x)
        before = whole.clone()
        out = layer.multiply(inside, None, 2, given)
        assert torch.equal(out, layer.multiply(x, None, 1, given))
        assert bool(out.isfinite().all())
        if isinstance(given, Norm):
            assert torch.equal(rms_norm(inside, given, 2), rms_norm(x, given, 1))
        assert torch.equal(whole.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(("dtype", "weight_dtype"), KINDS)
def test_what_is_not_finite_stays_in_its_row(isa: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    layer = PackedWeight(make(40, 64, dtype=weight_dtype), None, dtype)
    for given, columns in ((make_norm(64), 64), (GATED, 128)):
        x = make(15, columns, dtype=dtype)
        clean = layer.multiply(x, None, 1, given)
        x[4, columns - 1], x[9, 0] = float("nan"), float("inf")
        out = layer.multiply(x, None, 1, given)
        rest = [i for i in range(15) if i not in (4, 9)]
        assert torch.equal(out[rest], clean[rest])
        assert bool(out[4].isnan().all())
        assert not out[9].isfinite().any()


def test_rows_of_any_strides_and_none_at_all(isa: str) -> None:
    norm, x = make_norm(64), make(64, 20).T
    assert torch.equal(rms_norm(x, norm, 2), rms_norm(x.contiguous(), norm, 1))
    assert rms_norm(x[:0], norm, 2).shape == (0, 64)


def test_operands_that_do_not_fit_are_refused() -> None:
    layer = PackedWeight(make(40, 64), None, F32)
    for x, given in ((make(2, 64), make_norm(63)), (make(2, 64), GATED), (make(2, 128), make_norm(64))):
        with pytest.raises(AssertionError):
            layer.multiply(x, None, 1, given)
    with pytest.raises(AssertionError):
        rms_norm(make(2, 64), make_norm(63), 1)
    for weight in (make(64, dtype=BF16), make(128)[::2], make(8, 8)):
        with pytest.raises(AssertionError):
            Norm(weight, EPSILON)
