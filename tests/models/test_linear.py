"""Packed and plain layers compute the same."""

import pytest
import torch

from pdkv.models.linear import PlainLinear, can_pack, make_linear

torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_layers_agree_with_float64(dtype: torch.dtype, with_bias: bool, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias, residual = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, 96), (160, 96), (160,), (rows, 160))
    )
    layer = make_linear(weight, bias if with_bias else None, packed=can_pack(dtype, torch.device("cpu")))
    plain = PlainLinear(weight, bias if with_bias else None)
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.2}
    before = residual.clone()
    with torch.inference_mode():
        for each in (layer, plain):
            torch.testing.assert_close(each(x).double(), expected, **tolerance)
            torch.testing.assert_close(each.add(x, residual).double(), expected + residual.double(), **tolerance)
    assert torch.equal(residual, before)


def test_an_unknown_dtype_is_not_packed() -> None:
    assert not can_pack(torch.int8, torch.device("cpu"))
    assert not can_pack(torch.float32, torch.device("meta"))
