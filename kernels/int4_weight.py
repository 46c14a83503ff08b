"""4-bit weights in groups with scales and zero points, in one layout for all formats.

A word holds 8 numbers, the low bits first, of columns that are 32 apart. So each shift of a tile of words gives a tile
of 32 neighbouring columns, and unpacking moves nothing between the lanes of a GPU.
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


class Int4Weight(NamedTuple):
    """weight[output, column] = (number - zero) * scale, with zero and scale of the column's group."""

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
    """Whether no plane of a weight (outputs, inputs) has columns of two groups, and no chunk an odd part of a group."""
    return group_size >= inputs or group_size % CHUNK == 0 or (group_size % PLANE == 0 and CHUNK % group_size == 0)


def pack_int4(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int) -> Int4Weight:
    """Lay out numbers (outputs, inputs) uint8 below 16, on the device that holds them; `fits` must be true.

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


def unpack_int4_reference(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """The dense weight (outputs, inputs), in torch: multiplied in float32, rounded once."""
    planes = torch.stack([(weight.words >> (4 * plane)) & 0xF for plane in range(PLANES)], dim=2)
    numbers = planes.permute(1, 0, 2, 3).flatten(1)[:, : weight.inputs]
    group = torch.arange(weight.inputs, device=numbers.device) // weight.group_size
    zeros = SYMMETRIC_ZERO if weight.zeros is None else weight.zeros.int().T[:, group]
    return ((numbers - zeros) * weight.scales.float().T[:, group]).to(dtype)
