"""Quantizes rows of activations to FP8 numbers with one scale per row, as `torch._scaled_mm` expects them."""

from typing import Final

import torch

from pdkv.kernels.kv_copy import FP8_MAX

MIN_SCALE: Final = 1.0 / (FP8_MAX * 512.0)
"""The smallest scale of a row: a row of zeros has one, too."""


def quantize_rows(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """x (rows, inputs) as numbers (rows, inputs) float8_e4m3fn and scales (rows, 1) float32; x is about their product.

    NaN stays NaN and affects only its row; infinity becomes NaN, or the largest number if the scale is given.

    Args:
        scale: () float32, for all rows; numbers too large for it become the largest one. None: each row is scaled so
            that its largest number becomes FP8's largest.

    Raises:
        ValueError: x is not (rows, inputs).
    """
    if x.dim() != 2:
        raise ValueError(f"x must be (rows, inputs), got {tuple(x.shape)}")
    if x.is_cuda:
        from pdkv.kernels.quantize_fp8_triton import quantize_rows_triton

        return quantize_rows_triton(x, scale, MIN_SCALE)
    return quantize_rows_reference(x, scale)


def quantize_rows_reference(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What `quantize_rows` does, in torch."""
    x = x.float()
    if scale is None:
        scales = (x.abs().amax(dim=1, keepdim=True) * (1.0 / FP8_MAX)).clamp(min=MIN_SCALE)
    else:
        scales = scale.reshape(1, 1).expand(len(x), 1).contiguous()
    return (x / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales
