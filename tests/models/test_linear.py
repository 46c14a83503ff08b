"""Compiled, packed and plain layers compute the same; build and processor settle which of them serves."""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from pdkv.models import linear
from pdkv.models.linear import PlainLinear, can_pack, linear_kind, make_linear, make_norm, narrowed
from pdkv.models.passes import silu_mul

CPU = torch.device("cpu")

torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_layers_agree_with_float64(
    dtype: torch.dtype, with_bias: bool, rows: int, choice: Literal["auto", "torch"]
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias, residual = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, 96), (160, 96), (160,), (rows, 160))
    )
    layer = make_linear(weight, bias if with_bias else None, linear_kind(dtype, CPU, choice))
    plain = PlainLinear(weight, bias if with_bias else None)
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.2}
    before = residual.clone()
    with torch.inference_mode():
        for each in (layer, plain):
            torch.testing.assert_close(each(x).double(), expected, **tolerance)
            torch.testing.assert_close(each.add(x, residual).double(), expected + residual.double(), **tolerance)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("with_bias", [False, True])
def test_on_a_gpu_a_layer_adds_to_the_residual(with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_adds_in_place", lambda _: True)
    x, weight, bias, residual = (torch.randn(*shape) for shape in ((7, 96), (160, 96), (160,), (7, 160)))
    expected = x @ weight.T + residual + (bias if with_bias else 0.0)
    added = PlainLinear(weight, bias if with_bias else None).add(x, residual)
    torch.testing.assert_close(added, expected, rtol=1e-5, atol=1e-4)
    assert added is residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_layers_take_passes_along(dtype: torch.dtype, rows: int, choice: Literal["auto", "torch"]) -> None:
    """What compiled layers fuse, and what comes before others, is what torch's operations give one by one."""
    generator = torch.Generator().manual_seed(rows)
    x, gate_up, weight, scale, residual = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((rows, 96), (rows, 192), (160, 96), (96,), (rows, 160))
    )
    kind = linear_kind(dtype, CPU, choice)
    layer, plain, norm = make_linear(weight, None, kind), PlainLinear(weight), make_norm(scale, 1e-5, kind)
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.2}
    with torch.inference_mode():
        normed = F.rms_norm(x, (96,), scale, 1e-5)
        torch.testing.assert_close(norm(x), normed)
        torch.testing.assert_close(layer(x, norm), plain(normed), **tolerance)
        torch.testing.assert_close(layer.add(x, residual, norm), plain.add(normed, residual), **tolerance)
        gated = F.silu(gate_up[:, :96]) * gate_up[:, 96:]
        torch.testing.assert_close(layer(gate_up, silu_mul), plain(gated), **tolerance)
        torch.testing.assert_close(layer.add(gate_up, residual, silu_mul), plain.add(gated, residual), **tolerance)


def test_an_unknown_dtype_is_not_packed() -> None:
    assert not can_pack(torch.int8, torch.device("cpu"))
    assert not can_pack(torch.float32, torch.device("meta"))


def test_compiled_layers_serve_where_nothing_better_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "available", lambda: True)
    monkeypatch.setattr(linear, "flags", lambda: frozenset({"avx512f"}))
    assert {linear_kind(dtype, CPU) for dtype in (torch.float32, torch.bfloat16)} == {"compiled"}
    assert linear_kind(torch.float16, CPU) != "compiled"
    assert linear_kind(torch.float32, torch.device("meta")) == "plain"
    assert linear_kind(torch.float32, CPU, "torch") != "compiled"
    monkeypatch.setattr(linear, "flags", lambda: frozenset({"avx512f", "amx_bf16"}))
    assert linear_kind(torch.float32, CPU) == "compiled"
    assert linear_kind(torch.bfloat16, CPU) != "compiled"
    monkeypatch.setattr(linear, "available", lambda: False)
    assert linear_kind(torch.float32, CPU) != "compiled"


def test_weights_are_narrowed_only_where_that_loses_nothing() -> None:
    exact = torch.randn(4, 4).bfloat16()
    assert torch.equal(narrowed(exact.float()), exact)
    assert narrowed(exact.float()).dtype == narrowed(exact).dtype == torch.bfloat16
    for odd in (1.0 + 2.0**-12, float("nan")):
        weight = exact.float()
        weight[1, 2] = odd
        assert narrowed(weight) is weight


def test_one_number_that_is_not_of_bfloat16_is_found_in_any_row() -> None:
    exact = torch.randn(37, 5000).bfloat16()  # in several pieces, of which few rows are sampled
    assert torch.equal(narrowed(exact.float()), exact)
    for row in range(len(exact)):
        weight = exact.float()
        weight[row, 4999] = 1.0 + 2.0**-12
        assert narrowed(weight) is weight
