"""Linear layers whose weights stay 4-bit numbers (int4_weight.py)."""

import torch

from pdkv.kernels.int4_weight import Int4Weight, unpack_int4_reference

_DENSE_ROWS = 256
"""From so many rows on the weight is unpacked for the call: a matrix product takes longer than that by then."""


def unpack_int4(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """The dense weight (outputs, inputs), with the result of `unpack_int4_reference`."""
    if weight.words.is_cuda:
        from pdkv.kernels.linear_int4_triton import unpack_int4_triton

        return unpack_int4_triton(weight, dtype)
    return unpack_int4_reference(weight, dtype)


def linear_int4(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias + residual.

    The weight's numbers are rounded to x's dtype, like a dense weight, and products are summed in float32. For few rows
    the packed weight is read directly; for many it is unpacked first.

    Args:
        x: (rows, inputs) float16, bfloat16 or float32.
        bias: (outputs,) of x's dtype.
        residual: (rows, outputs) of x's dtype; left as it is.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    _check(x, weight, bias, residual)
    if x.is_cuda and x.shape[0] < _DENSE_ROWS:
        from pdkv.kernels.linear_int4_triton import linear_int4_triton

        return linear_int4_triton(x, weight, bias, residual)
    out = torch.nn.functional.linear(x, unpack_int4(weight, x.dtype), bias)
    return out if residual is None else out.add_(residual)


def linear_int4_reference(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """What `linear_int4` does, in float64 except that weights are rounded first; rounded once."""
    out = x.double() @ unpack_int4_reference(weight, x.dtype).double().T
    for added in (bias, residual):
        out = out if added is None else out + added.double()
    return out.to(x.dtype)


def _check(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, residual: torch.Tensor | None) -> None:
    if x.dim() != 2 or x.shape[1] != weight.inputs:
        raise ValueError(f"x must be (rows, {weight.inputs}), got {tuple(x.shape)}")
    for name, tensor, shape in (
        ("bias", bias, (weight.outputs,)),
        ("residual", residual, (x.shape[0], weight.outputs)),
    ):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != x.dtype):
            raise ValueError(f"{name} must be {shape} of {x.dtype}, got {tuple(tensor.shape)} of {tensor.dtype}")
    if any(each is not None and each.device != x.device for each in (weight.words, bias, residual)):
        raise ValueError("all tensors must be on one device")
