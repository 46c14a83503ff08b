"""`quantize_rows` in Triton: a program for each row, which it reads once from memory and once from the cache."""

import torch
import triton
import triton.language as tl

from pdkv.kernels.kv_copy import FP8_MAX
from pdkv.kernels.triton_jit import LAUNCH_OPTIONS, jit

_BLOCK = 2048  # numbers that a program looks at together


@jit()
def _quantize_rows_kernel(
    x: tl.tensor,
    scale: tl.tensor,  # () of all rows
    numbers: tl.tensor,  # (rows, inputs)
    scales: tl.tensor,  # (rows, 1)
    stride_x: tl.tensor,
    num_inputs: tl.tensor,
    HAS_SCALE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x += row * stride_x
    if HAS_SCALE:
        divisor = tl.load(scale)
    else:
        largest = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, num_inputs, BLOCK):
            value = tl.load(x + start + columns, mask=start + columns < num_inputs, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(value))
        divisor = tl.maximum(tl.max(largest, axis=0) * (1.0 / FP8_MAX), MIN_SCALE)
    tl.store(scales + row, divisor)
    for start in range(0, num_inputs, BLOCK):
        mask = start + columns < num_inputs
        value = tl.math.div_rn(tl.load(x + start + columns, mask=mask, other=0.0).to(tl.float32), divisor)
        value = tl.where(value > FP8_MAX, FP8_MAX, tl.where(value < -FP8_MAX, -FP8_MAX, value))  # NaN stays
        tl.store(numbers + row * num_inputs + start + columns, value.to(numbers.dtype.element_ty), mask=mask)


def quantize_rows_triton(
    x: torch.Tensor, scale: torch.Tensor | None, min_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; arguments as `quantize_rows` has checked them, and its MIN_SCALE."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, num_inputs = x.shape
    numbers = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    if num_rows:
        block = min(_BLOCK, triton.next_power_of_2(num_inputs))
        _quantize_rows_kernel[(num_rows,)](
            x, scale, numbers, scales, x.stride(0), num_inputs,
            HAS_SCALE=scale is not None, FP8_MAX=FP8_MAX, MIN_SCALE=min_scale, BLOCK=block, **LAUNCH_OPTIONS,
        )  # fmt: skip
    return numbers, scales
