"""Rotary position embedding: tables of cosines and sines for every position, linear and llama3 scaling."""

import math
from typing import NamedTuple

import torch

from pdkv.models.config import ModelConfig, RopeScaling


class RopeTable(NamedTuple):
    """Rows by position, (max_len, 1, head_size); `sin` has its first half negated, for the rolled vector."""

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, positions: torch.Tensor) -> "RopeTable":
        """The rows of `positions` (n,)."""
        return RopeTable(self.cos.index_select(0, positions), self.sin.index_select(0, positions))


def make_rope_table(config: ModelConfig, max_len: int, dtype: torch.dtype, device: torch.device) -> RopeTable:
    """The table of a model for positions [0, max_len)."""
    half = config.head_size // 2
    inv_freq = 1.0 / config.rope_theta ** (torch.arange(0, half, dtype=torch.float32) * 2 / config.head_size)
    inv_freq = scale_frequencies(inv_freq, config.rope_scaling)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inv_freq)
    cos, sin = angles.cos(), angles.sin()
    return RopeTable(
        torch.cat((cos, cos), dim=-1).unsqueeze(1).to(device, dtype),
        torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(device, dtype),
    )


def scale_frequencies(inv_freq: torch.Tensor, scaling: RopeScaling | None) -> torch.Tensor:
    """Scaled inverse frequencies (half,).

    linear: all divided by the factor. llama3 (Llama 3.1): wavelengths above original / low_freq_factor are divided,
    those below original / high_freq_factor kept, the ones between interpolated.
    """
    if scaling is None:
        return inv_freq
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    blend = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inv_freq / scaling.factor + blend * inv_freq


def rotate(x: torch.Tensor, rows: RopeTable) -> None:
    """Rotate x (n, heads, head_size) in place by the table's rows of its n positions."""
    rolled = torch.roll(x, x.shape[-1] // 2, -1).mul_(rows.sin)
    torch.addcmul(rolled, x, rows.cos, out=x)
