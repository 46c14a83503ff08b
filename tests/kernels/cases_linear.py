"""Linear layers of quantized weights against their references; run by test_triton.py, in a process of its own."""

import math

import pytest
import torch
from kernel_inputs import randn

from pdkv.kernels import linear_int4_triton as module
from pdkv.kernels.int4_weight import CHUNK, Int4Weight, fits, pack_int4, unpack_int4_reference
from pdkv.kernels.kv_copy import FP8_MAX
from pdkv.kernels.linear_int4 import linear_int4
from pdkv.kernels.linear_int4_triton import linear_int4_triton, unpack_int4_triton
from pdkv.kernels.quantize_fp8 import MIN_SCALE, quantize_rows_reference
from pdkv.kernels.quantize_fp8_triton import quantize_rows_triton

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Of a number, what rounding may take from it or add to it; torch.float32 is also what products are added up in."""

FLOAT16_FIRST = [
    torch.float16,
    *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.bfloat16, torch.float32)),
]

WEIGHTS = {  # outputs, inputs, group size (0: of all inputs), whether there are zero points
    "groups of 128": (130, 512, 128, True),
    "groups of 64, ragged": (70, 320, 64, True),
    "groups of 32": (33, 288, 32, True),
    "symmetric": (40, 384, 128, False),
    "one group": (50, 200, 0, True),
    "one group, inputs by no 16": (17, 77, 0, False),
    "large groups": (20, 1536, 512, True),
}


def weight_of(name: str, device: torch.device, scales: torch.dtype = torch.float16) -> Int4Weight:
    outputs, inputs, group_size, has_zeros = WEIGHTS[name]
    generator = torch.Generator().manual_seed(outputs)
    group_size = group_size or inputs
    groups = -(-inputs // group_size)
    numbers = torch.randint(0, 16, (outputs, inputs), generator=generator).to(torch.uint8)
    zeros = torch.randint(0, 17, (groups, outputs), generator=generator).to(torch.uint8)
    scale = (torch.rand(groups, outputs, generator=generator) * 0.02 + 0.005).to(scales)
    numbers, zeros, scale = (each.to(device) for each in (numbers, zeros, scale))
    return pack_int4(numbers, scale, zeros if has_zeros else None, group_size)


def check(
    found: torch.Tensor, x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> None:
    """One rounding of the result, and of each addition to a sum that is at most that of all absolute values."""
    dense = unpack_int4_reference(weight, x.dtype).double()
    expected = x.double() @ dense.T + sum(each.double() for each in (bias, residual) if each is not None)
    most = x.double().abs() @ dense.abs().T + expected.abs()
    bound = UNIT[x.dtype] * expected.abs() + 2 * weight.inputs * UNIT[torch.float32] * most
    assert found.dtype == x.dtype
    assert bool(((found.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_products_of_packed_weights(name: str, dtype: torch.dtype, device: torch.device) -> None:
    weight = weight_of(name, device, dtype)
    for rows, has_bias, has_residual in ((1, True, False), (19, False, True), (70, True, True)):
        x = randn(rows, weight.inputs, dtype=dtype, device=device)
        bias = randn(weight.outputs, dtype=dtype, device=device) if has_bias else None
        residual = randn(rows, weight.outputs, dtype=dtype, device=device) if has_residual else None
        kept = None if residual is None else residual.clone()
        check(linear_int4_triton(x, weight, bias, residual), x, weight, bias, residual)
        assert kept is None or torch.equal(kept, residual)


def test_inputs_in_parts_are_added_up(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_processors", lambda _: 64)
    WEIGHTS["many inputs"] = (40, 9 * CHUNK, 128, True)
    weight = weight_of("many inputs", device)
    for rows in (1, 5):
        x = randn(rows, weight.inputs, dtype=torch.float16, device=device)
        assert module._Tiles.of(rows, weight, 64).parts == 4
        bias, residual = (randn(*shape, dtype=x.dtype, device=device) for shape in ((40,), (rows, 40)))
        check(linear_int4_triton(x, weight, bias, residual), x, weight, bias, residual)
        check(linear_int4_triton(x, weight), x, weight, None, None)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter computes in numpy
def test_rows_do_not_reach_one_another_nor_what_is_beyond_them(device: torch.device) -> None:
    weight = weight_of("groups of 32", device)
    wide = torch.full((9, weight.inputs + 11), math.nan, dtype=torch.float16, device=device)
    x = wide[:, : weight.inputs]
    x[:4] = randn(4, weight.inputs, dtype=x.dtype, device=device)
    assert torch.equal(linear_int4_triton(x, weight)[:4], linear_int4_triton(x[:4].contiguous(), weight))


@pytest.mark.parametrize("dtype", FLOAT16_FIRST, ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_unpacked_weights_are_the_same_to_the_bit(name: str, dtype: torch.dtype, device: torch.device) -> None:
    for scales in (torch.float16, torch.bfloat16):
        weight = weight_of(name, device, scales)
        assert torch.equal(unpack_int4_triton(weight, dtype), unpack_int4_reference(weight, dtype))


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    weight = weight_of("groups of 32", device)
    x = randn(3, weight.inputs, dtype=torch.float16, device=device)
    for arguments, words in (
        ((x[:, 1:], weight), "x must be"),
        ((x, weight, x[0]), "bias must be"),
        ((x, weight, None, x), "residual must be"),
    ):
        with pytest.raises(ValueError, match=words):
            linear_int4(*arguments)
    assert [fits(size, 300) for size in (32, 64, 128, 256, 512, 16, 96, 48)] == [True] * 5 + [False] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [48, 5000])
@pytest.mark.parametrize("scale", [None, 0.004])
def test_rows_in_fp8(scale: float | None, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
    x = randn(6, inputs + 8, dtype=dtype, device=device)[:, :inputs]
    x[2], x[3, 7] = 0.0, 1e30
    given = None if scale is None else torch.tensor(scale, device=device)
    numbers, scales = quantize_rows_triton(x, given, MIN_SCALE)
    for found, expected in zip((numbers, scales), quantize_rows_reference(x, given), strict=True):
        assert (found.dtype, found.is_contiguous()) == (expected.dtype, True)
        assert torch.equal(found.float(), expected.float())
    assert float(numbers[3].float().abs().max()) == FP8_MAX
    x[4, 0] = math.nan
    back = torch.mul(*(each.float() for each in quantize_rows_triton(x, given, MIN_SCALE)))
    assert back[4].isnan().any()
    assert back[[0, 1, 2, 3, 5]].isfinite().all()
