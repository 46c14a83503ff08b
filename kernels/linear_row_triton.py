"""A dense linear layer of one row in Triton: all the time goes into reading the weight once.

A matrix library multiplies a single row more slowly if there are few outputs, and adds bias and residual in separate
passes. What is done to the row before and behind the product is part of the kernel: each program norms the row for
itself, by a factor that is known when it has read all of it, and has the gates and the inputs that they gate.
"""

from typing import Literal

import torch
import triton
import triton.language as tl

from pdkv.kernels.passes_triton import gated
from pdkv.kernels.triton_jit import LAUNCH_OPTIONS, jit

Act = Literal["silu", "gelu"]

_TILE = 4096  # numbers of the weight that a program reads at once: 8 KiB, in 4 loads of 16 bytes for each thread
_WARPS = 4


@jit()
def _rounded(
    sums: tl.tensor, factor: tl.tensor, bias: tl.tensor, residual: tl.tensor, outputs: tl.tensor, mask: tl.tensor,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, dtype: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    total = tl.sum(sums, axis=1) * factor
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + outputs, mask=mask, other=0.0).to(tl.float32)
    return total.to(dtype)


@jit()
def _linear_row_kernel(
    x: tl.tensor,  # (SIZE,)
    weight: tl.tensor,  # (outputs, SIZE)
    bias: tl.tensor,
    residual: tl.tensor,
    norm: tl.tensor,  # (SIZE,)
    out: tl.tensor,
    num_outputs: tl.tensor,
    stride_weight: tl.tensor,
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,  # there are as many rows of the weight again, for what the outputs gate
    GELU: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
) -> None:
    outputs = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    mask = outputs < num_outputs
    own = tl.minimum(outputs, num_outputs - 1)
    rows = weight + own[:, None].to(tl.int64) * stride_weight
    up_rows = weight + (own + num_outputs)[:, None].to(tl.int64) * stride_weight
    sums = tl.zeros([TILE_OUTPUTS, TILE_INPUTS], tl.float32)
    up_sums = tl.zeros([TILE_OUTPUTS, TILE_INPUTS], tl.float32)
    squares = tl.zeros([TILE_INPUTS], tl.float32)
    for start in range(0, SIZE, TILE_INPUTS):
        at = start + tl.arange(0, TILE_INPUTS)
        is_input = at < SIZE
        if SIZE % TILE_INPUTS:
            numbers = tl.load(rows + at[None, :], mask=is_input[None, :], other=0.0)
            values = tl.load(x + at, mask=is_input, other=0.0).to(tl.float32)
            if GATED:
                ups = tl.load(up_rows + at[None, :], mask=is_input[None, :], other=0.0)
        else:
            numbers = tl.load(rows + at[None, :])
            values = tl.load(x + at).to(tl.float32)
            if GATED:
                ups = tl.load(up_rows + at[None, :])
        if HAS_NORM:
            squares += values * values
            values *= tl.load(norm + at, mask=is_input, other=0.0).to(tl.float32)
        sums += numbers.to(tl.float32) * values[None, :]
        if GATED:
            up_sums += ups.to(tl.float32) * values[None, :]
    factor = 1.0
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares) / SIZE + epsilon)
    dtype: tl.constexpr = out.dtype.element_ty
    total = _rounded(sums, factor, bias, residual, outputs, mask, HAS_BIAS, HAS_RESIDUAL, dtype)
    if GATED:
        up_bias = bias + num_outputs if HAS_BIAS else bias
        total = gated(total, _rounded(up_sums, factor, up_bias, residual, outputs, mask, HAS_BIAS, False, dtype), GELU)
    tl.store(out + outputs, total, mask=mask)


def _tile_inputs(size: int) -> int:
    """The largest power of two that divides the inputs, so that no load is masked; where that is small, one that holds
    them, or as many as a program reads.
    """
    divides = min(_TILE, size & -size)
    return divides if divides >= _TILE // 8 else min(_TILE, triton.next_power_of_2(size))


def linear_row_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None, act: Act | None = None,
) -> torch.Tensor:  # fmt: skip
    """x (1, in) @ weight (out, in).T + bias (out,) + residual (1, out), added up in float32; (1, out), rounded once.

    `norm`: weight (in,) and epsilon of an RMSNorm of x, which is not rounded by itself.
    `act`: of the first half of the outputs, each of which is rounded, then the act, then its product with the output of
    the other half; (1, out / 2).
    """
    outputs, size = weight.shape
    if x.shape != (1, size) or weight.stride(1) != 1 or (norm is not None and norm[0].shape != (size,)):
        raise ValueError(
            f"expected a row and a matrix, got x {tuple(x.shape)}, weight {tuple(weight.shape)}, {weight.stride()}"
        )
    if act is not None and (outputs % 2 or residual is not None):
        raise ValueError(f"{outputs} outputs are not gates and what they gate, to which nothing is added")
    outputs //= 1 if act is None else 2
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    tile_inputs = _tile_inputs(size)
    tile_outputs = _TILE // tile_inputs
    norm_weight, epsilon = (None, 0.0) if norm is None else norm
    _linear_row_kernel[(triton.cdiv(outputs, tile_outputs),)](
        x.contiguous(), weight, bias, None if residual is None else residual.contiguous(), norm_weight, out, outputs,
        weight.stride(0), epsilon, SIZE=size, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        HAS_NORM=norm is not None, GATED=act is not None, GELU=act == "gelu", TILE_OUTPUTS=tile_outputs,
        TILE_INPUTS=tile_inputs, num_warps=_WARPS, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out
