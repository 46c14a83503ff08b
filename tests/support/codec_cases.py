"""KV as models have it, for tests of codecs."""

import numpy as np
import torch

from pdkv.kv_store.codecs.base import Bytes, PartShape

SHAPE = PartShape(num_units=4, num_layers=6, num_heads=2, head_size=32, dtype="bfloat16")


def draw(shape: PartShape, *, seed: int = 0, outlier: float = 8.0) -> torch.Tensor:
    """Images; K has channels with a mean of their own, and some with a much larger spread than others."""
    generator = torch.Generator().manual_seed(seed)
    sizes = shape.dimensions
    numbers = torch.randn(sizes, generator=generator)
    numbers[:, :, 0] += 3 * torch.randn((1, *sizes[1:2], sizes[3], 1, sizes[5]), generator=generator)
    numbers[:, :, 0, :, :, 3] *= outlier
    return numbers.to(getattr(torch, shape.dtype))


def as_bytes(numbers: torch.Tensor) -> Bytes:
    """Flat, as a buffer has it."""
    return numbers.reshape(-1).view(torch.uint8).numpy()


def as_numbers(data: Bytes, like: torch.Tensor) -> torch.Tensor:
    """Images from a buffer."""
    return torch.from_numpy(data).view(like.dtype).view(like.shape)


def empty(shape: PartShape) -> Bytes:
    """A buffer that is not what has been there before."""
    return np.full(shape.num_bytes, 0xA5, np.uint8)
