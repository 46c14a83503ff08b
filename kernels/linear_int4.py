"""Linear layers whose weights stay 4-bit numbers in groups with scales and zero points, in one layout for all formats.

A word holds 8 numbers, the low bits first, of columns that are 32 apart. So a tile of words gives, shift by shift,
tiles of 32 neighbouring columns, and nothing is moved between the lanes of a GPU to unpack it.
"""

from typing import Final, NamedTuple

import torch

CHUNK: Final = 256
"""Columns (inputs) whose numbers lie together: 32 words for each output."""

PLANE: Final = 32
"""Neighbouring columns, of which each word of a chunk has one."""

PLANES: Final = CHUNK // PLANE

SYMMETRIC_ZERO: Final = 8
"""The zero point where none is stored: half of the range."""

_DENSE_ROWS = 256
"""From so many rows on the weight is unpacked for the call: a matrix product takes longer than that by then."""


class Int4Weight(NamedTuple):
    """weight[output, column] = (number - zero) * scale, of the column's group."""

    words: torch.Tensor  # (chunks, outputs, 32) int32; bits [4i, 4i + 4) of word j: column chunk * 256 + 32 * i + j
    scales: torch.Tensor  # (groups, outputs), float16, bfloat16 or float32
    zeros: torch.Tensor | None  # (groups, outputs) uint8, at most 16; None: SYMMETRIC_ZERO
    group_size: int  # columns of a group; the last one may be shorter
    inputs: int

    @property
    def outputs(self) -> int:
        """Rows of the dense weight."""
        return self.scales.shape[1]


def fits(group_size: int, inputs: int) -> bool:
    """Whether no plane of a weight (outputs, inputs) has columns of two groups, nor a chunk an odd part of one."""
    return group_size >= inputs or group_size % CHUNK == 0 or (group_size % PLANE == 0 and CHUNK % group_size == 0)


def pack_int4(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int) -> Int4Weight:
    """Lay out numbers (outputs, inputs) uint8 below 16, on the device where they are; `fits` holds.

    Args:
        scales: (groups, outputs).
        zeros: (groups, outputs), from 0 to 16; None: SYMMETRIC_ZERO.
    """
    outputs, inputs = numbers.shape
    groups = -(-inputs // group_size)
    assert fits(group_size, inputs), (group_size, inputs)
    assert scales.shape == (groups, outputs), (scales.shape, groups, outputs)
    assert zeros is None or zeros.shape == scales.shape, zeros
    chunks = -(-inputs // CHUNK)
    padded = torch.nn.functional.pad(numbers, (0, chunks * CHUNK - inputs)).view(outputs, chunks, PLANES, PLANE)
    words = torch.zeros(chunks, outputs, PLANE, dtype=torch.int32, device=numbers.device)
    for plane in range(PLANES):
        words |= padded[:, :, plane].transpose(0, 1).int() << (4 * plane)
    stored = None if zeros is None else zeros.to(torch.uint8).contiguous()
    return Int4Weight(words, scales.contiguous(), stored, group_size, inputs)


def unpack_int4(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """The dense weight (outputs, inputs): multiplied in float32, rounded once."""
    if weight.words.is_cuda:
        from pdkv.kernels.linear_int4_triton import unpack_int4_triton

        return unpack_int4_triton(weight, dtype)
    return unpack_int4_reference(weight, dtype)


def unpack_int4_reference(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """What `unpack_int4` does, in torch."""
    planes = torch.stack([(weight.words >> (4 * plane)) & 0xF for plane in range(PLANES)], dim=2)
    numbers = planes.permute(1, 0, 2, 3).flatten(1)[:, : weight.inputs]
    group = torch.arange(weight.inputs, device=numbers.device) // weight.group_size
    zeros = SYMMETRIC_ZERO if weight.zeros is None else weight.zeros.int().T[:, group]
    return ((numbers - zeros) * weight.scales.float().T[:, group]).to(dtype)


def linear_int4(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias + residual.

    The weight's numbers are rounded to x's dtype, as a dense weight is, and products added up in float32. Few rows read
    the packed weight; for many of them it is unpacked first.

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
    """What `linear_int4` does, in float64 but for the rounding of weights; rounded once."""
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
