"""Rotary position embedding: tables of cosines and sines for every position, with their frequencies scaled."""

import math
from typing import NamedTuple

import torch

from pdkv.models.rope_config import Rope, RopeScaling


class RopeTable(NamedTuple):
    """Cosines and sines by position, (max_len, 1, rotary_size); the first half of `sin` is negated, for the rolled
    vector.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, positions: torch.Tensor) -> "RopeTable":
        """The rows of `positions` (n,)."""
        return RopeTable(self.cos.index_select(0, positions), self.sin.index_select(0, positions))


def make_rope_table(rope: Rope | None, max_len: int, dtype: torch.dtype, device: torch.device) -> RopeTable:
    """The table for positions [0, max_len); None: it rotates by nothing."""
    if rope is None:
        still = torch.ones(max_len, 1, 2, dtype=dtype, device=device)
        return RopeTable(still, torch.zeros_like(still))
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies(rope))
    magnitude = rope.scaling.attention_factor if rope.scaling is not None else 1.0
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return RopeTable(
        torch.cat((cos, cos), dim=-1).unsqueeze(1).to(device, dtype),
        torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(device, dtype),
    )


def inverse_frequencies(rope: Rope) -> torch.Tensor:
    """(rotary_size / 2,) radians per position."""
    theta, size, scaling = rope
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    if scaling is not None and scaling.kind == "dynamic":
        theta = _ntk_theta(theta, size, scaling)
    return _scaled(1.0 / theta**exponents, theta, scaling)


def _scaled(inv_freq: torch.Tensor, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    if scaling is None or scaling.kind == "dynamic":
        return inv_freq
    match scaling.kind:
        case "linear":
            return inv_freq / scaling.factor
        case "llama3":
            return _interpolated(inv_freq, scaling, _llama3_shares(inv_freq, scaling))
        case "yarn":
            return _interpolated(inv_freq, scaling, _yarn_shares(len(inv_freq), theta, scaling))
        case "longrope":
            is_long = scaling.length > scaling.original_max_position_embeddings
            return inv_freq / torch.tensor(scaling.long_factors if is_long else scaling.short_factors)


def _interpolated(inv_freq: torch.Tensor, scaling: RopeScaling, kept: torch.Tensor) -> torch.Tensor:
    """Each frequency as it is by its share in `kept` (half,), and divided by the factor by the rest."""
    return (1 - kept) * inv_freq / scaling.factor + kept * inv_freq


def _ntk_theta(theta: float, rotary_size: int, scaling: RopeScaling) -> float:
    """The base by which the slowest frequency is stretched as linear scaling would, and the fastest is not."""
    stretch = scaling.factor * scaling.length / scaling.original_max_position_embeddings - (scaling.factor - 1)
    return float(theta * stretch ** (rotary_size / (rotary_size - 2)))


def _llama3_shares(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: 0 for wavelengths above original / low_freq_factor, 1 below original / high_freq_factor."""
    turns = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)
    shares = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return shares.clamp(0.0, 1.0)


def _yarn_shares(half: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """YaRN: 1 for frequencies that turn at least beta_fast times in the original length, 0 below beta_slow times."""

    def index_of(num_turns: float) -> float:
        """The fractional index of the frequency that makes this many turns."""
        return half * math.log(scaling.original_max_position_embeddings / (num_turns * 2 * math.pi)) / math.log(theta)

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    if first == last:
        last += 0.001
    return 1 - ((torch.arange(half, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)


def rotate(x: torch.Tensor, rows: RopeTable) -> None:
    """Rotate the first rotary_size values of x (n, heads, head_size) in place, by the n rows."""
    x = x[..., : rows.cos.shape[-1]]
    rolled = torch.roll(x, x.shape[-1] // 2, -1).mul_(rows.sin)
    torch.addcmul(rolled, x, rows.cos, out=x)
