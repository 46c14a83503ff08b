"""A linear layer of one row against torch in float64; run by test_triton.py, in a process of its own."""

import pytest
import torch
from kernel_inputs import BFLOAT16_FIRST, randn
from torch.nn.functional import gelu

from pdkv.kernels import linear_row_triton as module
from pdkv.kernels.linear_row_triton import linear_row_triton

TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", BFLOAT16_FIRST, ids=str)
@pytest.mark.parametrize("added", [(), ("bias",), ("residual",), ("bias", "residual")], ids=str)
@pytest.mark.parametrize(("outputs", "size"), [(64, 2048), (33, 1000), (9, 1536), (3, 48)])
def test_a_row_is_multiplied_and_what_is_given_is_added(
    outputs: int, size: int, added: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = (randn(*shape, dtype=dtype, device=device) for shape in ((1, size), (outputs, size)))
    x *= size**-0.5
    shapes = {"bias": (outputs,), "residual": (1, outputs)}
    given = {name: randn(*shapes[name], dtype=dtype, device=device) for name in added}
    expected = x.double() @ weight.double().T + sum(each.double() for each in given.values())
    result = linear_row_triton(x, weight, **given)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", BFLOAT16_FIRST, ids=str)
@pytest.mark.parametrize(("outputs", "size"), [(64, 2048), (32, 1000)])
def test_a_row_is_normed_first_and_gated_behind(
    outputs: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, norm, bias = (
        randn(*shape, dtype=dtype, device=device) for shape in ((1, size), (outputs, size), (size,), (outputs,))
    )
    weight *= size**-0.5
    normed = torch.nn.functional.rms_norm(x.double(), (size,), norm.double(), 1e-5)
    expected = normed @ weight.double().T + bias.double()
    tolerance = {"atol": 2 * TOLERANCES[dtype], "rtol": 2 * TOLERANCES[dtype]}
    result = linear_row_triton(x, weight, bias, norm=(norm, 1e-5))
    torch.testing.assert_close(result.double(), expected, **tolerance)
    gates, ups = expected.chunk(2, dim=1)
    for act, acted in (("silu", torch.nn.functional.silu(gates)), ("gelu", gelu(gates, approximate="tanh"))):
        found = linear_row_triton(x, weight, bias, norm=(norm, 1e-5), act=act)
        torch.testing.assert_close(found.double(), acted * ups, **tolerance)


def test_a_weight_may_be_a_part_of_another(device: torch.device) -> None:
    x, weight = (randn(*shape, dtype=torch.float32, device=device) for shape in ((1, 40), (12, 64)))
    torch.testing.assert_close(linear_row_triton(x, weight[:, :40]), x @ weight[:, :40].T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [2048, 4096, 5120, 8192, 13_824, 14_336, 17_408, 25_600, 27_648, 28_672])
def test_models_inputs_are_whole_tiles(size: int) -> None:
    """Of Qwen 14B and 32B, and Mistral Small: 4,096 numbers at a time leave a second load, mostly masked."""
    assert size % module._tile_inputs(size) == 0
    assert 512 <= module._tile_inputs(size) <= 4096


def test_the_tiles_need_not_fit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TILE", 64)
    x, weight = (randn(*shape, dtype=torch.float32, device=device) for shape in ((1, 201), (13, 201)))
    torch.testing.assert_close(linear_row_triton(x, weight), x @ weight.T, atol=1e-4, rtol=1e-5)


def test_several_rows_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"x \(2, 8\), weight \(4, 8\)"):
        linear_row_triton(torch.zeros(2, 8, device=device), torch.zeros(4, 8, device=device))
