"""The passes of a decoder over rows before it multiplies them: RMSNorm, and act(gate) * up; by torch, compiled or in
Triton.

A compiled linear layer fuses such a pass: its rows go through it when they are laid out for the kernels (linear.py).
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from pdkv.kernels.linear import GATED, GATED_GELU, Gated, Norm
from pdkv.kernels.passes import rms_norm


class RowPass(Protocol):
    """x (n, a) -> (n, b), row by row."""

    @property
    def fused(self) -> Norm | Gated:
        """The form in which compiled linear layers fuse the pass."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run the pass by itself; `x` may be overwritten where b < a."""


def by_triton(x: torch.Tensor) -> bool:
    """Whether a Triton kernel makes the pass over `x`, which is on CUDA then."""
    return x.is_cuda


class RMSNorm:
    """x (..., size) -> x / sqrt(mean(x * x) + epsilon) * weight, computed in float32 and rounded once."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        """`weight` (size,), of the rows' dtype or float32."""
        self.weight = weight
        self.fused = Norm(weight.float().contiguous(), epsilon)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if by_triton(x):
            from pdkv.kernels.passes_triton import rms_norm_triton  # Triton, which a CPU need not have

            return rms_norm_triton(x, self.weight, self.fused.epsilon)
        if x.dtype != self.weight.dtype:
            return F.rms_norm(x.float(), self.weight.shape, self.weight, self.fused.epsilon).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.fused.epsilon)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The norm of x (n, size) added to `residual` (n, size), in place, and rounded again."""
        if by_triton(x):
            from pdkv.kernels.passes_triton import rms_norm_triton

            return rms_norm_triton(x, self.weight, self.fused.epsilon, residual)
        return residual.add_(self(x))


class CompiledRMSNorm(RMSNorm):
    """RMSNorm by a compiled kernel, for rows (n, size) in host memory."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.fused, torch.get_num_threads())


class GatedPass:
    """Rows of [gate, up] -> act(gate) * up; act is rounded, then the product."""

    def __init__(self, fused: Gated) -> None:
        self.fused = fused

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if by_triton(x):
            from pdkv.kernels.passes_triton import gated_triton  # Triton, which a CPU need not have

            return gated_triton(x, gelu=self.fused == GATED_GELU)
        gate, up = x.chunk(2, dim=-1)
        return (F.gelu(gate, approximate="tanh") if self.fused == GATED_GELU else F.silu(gate)).mul_(up)


silu_mul, gelu_mul = GatedPass(GATED), GatedPass(GATED_GELU)
