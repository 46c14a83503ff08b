"""`linear_int4` in Triton: packed words are read once, unpacked in registers and multiplied by tensor cores.

The weight's tile is the left operand, so that it stays in registers, and rows of x are the columns of the right one. A
number n becomes a float without a conversion: the bits 0x43000000 | n << 16 are 128 + n, and one multiply-add with
-(128 + zero) * scale gives (n - zero) * scale, exactly if the scale has 16 bits.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pdkv.kernels.int4_weight import Int4Weight
from pdkv.kernels.triton_jit import LAUNCH_OPTIONS, jit

_ONE_GROUP = 1 << 30
"""Stands for any group that a whole weight has one of."""

_PROGRAMS_PER_PROCESSOR = 2
_MIN_CHUNKS = 2  # of a part
_TILE_OUTPUTS = 128
_WARPS = 8
_CPU_PROCESSORS = 2  # of the interpreter
_COMBINE_OUTPUTS = 512


@jit()
def _scales_of(
    scales: tl.tensor,
    zeros: tl.tensor,
    group: tl.tensor,
    outputs: tl.tensor,
    num_outputs: tl.tensor,
    HAS_ZEROS: tl.constexpr,
) -> tl.tensor:
    """(scale, -(128 + zero) * scale) of each output in one group."""
    at, mask = group * num_outputs + outputs, outputs < num_outputs
    scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_ZEROS:
        return scale, scale * (-128.0 - tl.load(zeros + at, mask=mask, other=0).to(tl.float32))
    return scale, scale * -136.0


@jit()
def _numbers_of(words: tl.tensor, PLANE: tl.constexpr) -> tl.tensor:
    """128 + the numbers of one plane, in float32."""
    shifted = words << (16 - 4 * PLANE) if PLANE < 4 else words >> (4 * PLANE - 16)
    return ((shifted & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True)


@jit()
def _with_added(
    total: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    outputs: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> tl.tensor:
    """Sums, with what is added to them; all of shapes that broadcast."""
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    return total


@jit(do_not_specialize=("num_rows", "chunks_each"))
def _linear_int4_kernel(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,  # (rows, outputs), or (parts, rows, outputs) float32
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    stride_x: tl.tensor,
    chunks_each: tl.tensor,  # of a part
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
) -> None:
    outputs = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    rows = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    first = tl.program_id(2) * chunks_each
    last = tl.minimum(first + chunks_each, tl.cdiv(num_inputs, 256))
    in_outputs, in_rows = outputs < num_outputs, rows < num_rows
    lane = tl.arange(0, 32)
    words += (first.to(tl.int64) * num_outputs + outputs[:, None]) * 32 + lane[None, :]
    x += rows[None, :].to(tl.int64) * stride_x + lane[:, None]
    total = tl.zeros((TILE_OUTPUTS, TILE_ROWS), dtype=tl.float32)
    for chunk in range(first, last):
        packed = tl.load(words, mask=in_outputs[:, None], other=0)
        words += num_outputs * 32
        for plane in tl.static_range(8):
            column = chunk * 256 + plane * 32
            if (plane * 32) % GROUP_SIZE == 0:
                group = tl.minimum(column, num_inputs - 1) // GROUP_SIZE
                scale, shift = _scales_of(scales, zeros, group, outputs, num_outputs, HAS_ZEROS)
            mask = in_rows[None, :] & (column + lane < num_inputs)[:, None]
            tile = tl.load(x + column, mask=mask, other=0.0)
            weights = _numbers_of(packed, plane) * scale[:, None] + shift[:, None]
            total = tl.dot(weights.to(tile.dtype), tile, total, input_precision="ieee")
    at = rows[None, :].to(tl.int64) * num_outputs + outputs[:, None]
    mask = in_outputs[:, None] & in_rows[None, :]
    total = _with_added(total, bias, residual, outputs[:, None], at, mask, HAS_BIAS, HAS_RESIDUAL)
    tl.store(
        out + tl.program_id(2).to(tl.int64) * num_rows * num_outputs + at, total.to(out.dtype.element_ty), mask=mask
    )


@jit(do_not_specialize=("num_rows", "num_parts"))
def _combine_kernel(
    parts: tl.tensor,  # (parts, rows, outputs) float32
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_parts: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> None:
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = outputs < num_outputs
    at = tl.program_id(1).to(tl.int64) * num_outputs + outputs
    total = tl.zeros((OUTPUTS,), dtype=tl.float32)
    parts += at
    for _ in range(num_parts):
        total += tl.load(parts, mask=mask, other=0.0)
        parts += num_rows.to(tl.int64) * num_outputs
    total = _with_added(total, bias, residual, outputs, at, mask, HAS_BIAS, HAS_RESIDUAL)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@jit()
def _unpack_kernel(
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    out: tl.tensor,  # (outputs, inputs)
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
) -> None:
    chunk = tl.program_id(1)
    outputs = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    in_outputs = outputs < num_outputs
    lane = tl.arange(0, 32)[None, :]
    at = (chunk.to(tl.int64) * num_outputs + outputs[:, None]) * 32 + lane
    packed = tl.load(words + at, mask=in_outputs[:, None], other=0)
    out += outputs[:, None].to(tl.int64) * num_inputs + lane
    for plane in tl.static_range(8):
        column = chunk * 256 + plane * 32
        if (plane * 32) % GROUP_SIZE == 0:
            group = tl.minimum(column, num_inputs - 1) // GROUP_SIZE
            scale, shift = _scales_of(scales, zeros, group, outputs, num_outputs, HAS_ZEROS)
        weights = _numbers_of(packed, plane) * scale[:, None] + shift[:, None]
        mask = in_outputs[:, None] & (column + lane < num_inputs)
        tl.store(out + column, weights.to(out.dtype.element_ty), mask=mask)


class _Tiles(NamedTuple):
    """How a product is divided among programs."""

    rows: int  # of x
    parts: int  # of the inputs
    num_stages: int

    @classmethod
    def of(cls, num_rows: int, weight: Int4Weight, processors: int) -> "_Tiles":
        """The tile sizes for a call. Up to 64 rows, words are read once. If there are few outputs, the inputs are
        divided to keep all processors busy; the partial sums take no more bytes than the words.
        """
        rows = min(64, max(16, triton.next_power_of_2(num_rows)))
        wanted = processors * _PROGRAMS_PER_PROCESSOR // triton.cdiv(weight.outputs, _TILE_OUTPUTS)
        most = min(weight.words.shape[0] // _MIN_CHUNKS, weight.inputs // (8 * triton.next_power_of_2(num_rows)))
        return cls(rows, max(1, min(wanted, most)), 2 if rows == 64 else 4)


def linear_int4_triton(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Launch the kernels; arguments as `linear_int4` has checked them."""
    num_rows = x.shape[0]
    out = torch.empty(num_rows, weight.outputs, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    residual = None if residual is None else residual.contiguous()
    tiles = _Tiles.of(num_rows, weight, _processors(x.device))
    if tiles.parts == 1:
        _multiply(x, weight, bias, residual, out, tiles)
        return out
    sums = torch.empty(tiles.parts, num_rows, weight.outputs, dtype=torch.float32, device=x.device)
    _multiply(x, weight, None, None, sums, tiles)
    _combine_kernel[(triton.cdiv(weight.outputs, _COMBINE_OUTPUTS), num_rows)](
        sums, bias, residual, out, num_rows, weight.outputs, tiles.parts,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, OUTPUTS=_COMBINE_OUTPUTS, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out


def _multiply(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    tiles: _Tiles,
) -> None:
    chunks, num_rows = weight.words.shape[0], x.shape[0]
    grid = triton.cdiv(weight.outputs, _TILE_OUTPUTS), triton.cdiv(num_rows, tiles.rows), tiles.parts
    _linear_int4_kernel[grid](
        x, weight.words, weight.scales, weight.zeros, bias, residual, out,
        num_rows, weight.outputs, weight.inputs, x.stride(0), triton.cdiv(chunks, tiles.parts),
        GROUP_SIZE=_group_size(weight), HAS_ZEROS=weight.zeros is not None, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, TILE_OUTPUTS=_TILE_OUTPUTS, TILE_ROWS=tiles.rows,
        num_warps=_WARPS, num_stages=tiles.num_stages, **LAUNCH_OPTIONS,
    )  # fmt: skip


def unpack_int4_triton(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """The dense weight (outputs, inputs), rounded once."""
    out = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.words.device)
    _unpack_kernel[(triton.cdiv(weight.outputs, 64), weight.words.shape[0])](
        weight.words, weight.scales, weight.zeros, out, weight.outputs, weight.inputs,
        GROUP_SIZE=_group_size(weight), HAS_ZEROS=weight.zeros is not None, TILE_OUTPUTS=64, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out


def _group_size(weight: Int4Weight) -> int:
    """As a constant of the kernels: one compilation for all weights with one group."""
    return weight.group_size if weight.group_size < weight.inputs else _ONE_GROUP


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
