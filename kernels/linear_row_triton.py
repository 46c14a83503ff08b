"""A dense linear layer of one row in Triton: all the time goes into reading the weight once.

A matrix library multiplies a single row more slowly if there are few outputs, and adds bias and residual in separate
passes.
"""

import torch
import triton
import triton.language as tl

from pdkv.kernels.triton_jit import LAUNCH_OPTIONS, jit

_TILE = 4096  # numbers of the weight that a program reads at once: 8 KiB, in 4 loads of 16 bytes for each thread
_WARPS = 4


@jit()
def _linear_row_kernel(
    x: tl.tensor,  # (SIZE,)
    weight: tl.tensor,  # (outputs, SIZE)
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    num_outputs: tl.tensor,
    stride_weight: tl.tensor,
    SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
) -> None:
    outputs = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    mask = outputs < num_outputs
    rows = weight + tl.minimum(outputs, num_outputs - 1)[:, None].to(tl.int64) * stride_weight
    sums = tl.zeros([TILE_OUTPUTS, TILE_INPUTS], tl.float32)
    for start in range(0, SIZE, TILE_INPUTS):
        at = start + tl.arange(0, TILE_INPUTS)
        if SIZE % TILE_INPUTS:
            numbers = tl.load(rows + at[None, :], mask=(at < SIZE)[None, :], other=0.0)
            values = tl.load(x + at, mask=at < SIZE, other=0.0)
        else:
            numbers = tl.load(rows + at[None, :])
            values = tl.load(x + at)
        sums += numbers.to(tl.float32) * values.to(tl.float32)[None, :]
    total = tl.sum(sums, axis=1)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + outputs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + outputs, total.to(out.dtype.element_ty), mask=mask)


def linear_row_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x (1, in) @ weight (out, in).T + bias (out,) + residual (1, out), added up in float32; (1, out), rounded once."""
    outputs, size = weight.shape
    if x.shape != (1, size) or weight.stride(1) != 1:
        raise ValueError(
            f"expected a row and a matrix, got x {tuple(x.shape)}, weight {tuple(weight.shape)}, {weight.stride()}"
        )
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    tile_inputs = min(_TILE, triton.next_power_of_2(size))
    tile_outputs = _TILE // tile_inputs
    _linear_row_kernel[(triton.cdiv(outputs, tile_outputs),)](
        x.contiguous(), weight, bias, None if residual is None else residual.contiguous(), out, outputs,
        weight.stride(0), SIZE=size, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        TILE_OUTPUTS=tile_outputs, TILE_INPUTS=tile_inputs, num_warps=_WARPS, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out
