"""Codecs with one byte for each number: the number divided by a scale that several numbers share.

`fp8`: E4M3 floats (OCP 8-bit floating point specification), scaled by head. `int8`: K is scaled by channel and V by
token, according to where their outliers lie (KIVI, arXiv:2402.02750).
"""

import math
from typing import ClassVar, Final

import numpy as np
import torch

from pdkv.errors import KVCorrupted, KVNotCodable
from pdkv.kv_store.codecs.base import HEADER_BYTES, Bytes, Codec, PartShape

_HIGHEST: Final = 1e30  # a scale beyond it cannot be coded: every number that is decoded is finite


class ScaledCodec(Codec):
    """Lossy. A value is the scales of K, those of V if there is one, in float32, and a code for each number in the
    images' order.

    Dimensions are those of one side's numbers, (units, layers, heads, HASH_BLOCK_SIZE, head_size).
    """

    lossy: ClassVar[bool] = True
    code: ClassVar[torch.dtype]
    """The type of a code; invalid ones are NaN."""
    largest: ClassVar[float]
    """The largest value of a code; a scale is the largest of its numbers, divided by this."""
    shared: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]]
    """For K and for V: the dimensions along which numbers share a scale."""

    def max_bytes(self, shape: PartShape) -> int:
        return HEADER_BYTES + self._scale_bytes(shape) + shape.num_numbers

    def encode(self, images: Bytes, shape: PartShape) -> Bytes:
        shape.check(images)
        numbers = torch.from_numpy(_writable(images)).view(getattr(torch, shape.dtype)).view(shape.dimensions).float()
        codes = torch.empty(shape.dimensions, dtype=torch.uint8)
        scales = []
        for side, shared in enumerate(self.shared[: shape.sides]):
            scale = numbers[:, :, side].abs().amax(shared, keepdim=True) / self.largest
            if not bool((scale <= _HIGHEST).all()):  # nor where it is NaN
                raise KVNotCodable(f"{self.identity}: there are NaN, infinities or numbers beyond {_HIGHEST}")
            ratios = (numbers[:, :, side] / scale.masked_fill(scale == 0, 1)).clamp_(-self.largest, self.largest)
            whole = ratios if self.code.is_floating_point else ratios.round_()
            codes[:, :, side] = whole.to(self.code).view(torch.uint8)
            scales.append(scale.numpy())
        return self._with_header(shape, *scales, codes.numpy())

    def decode(self, coded: Bytes, shape: PartShape, out: Bytes) -> None:
        shape.check(out)
        body = self._body(coded, shape)
        if coded.size != self.max_bytes(shape):
            raise KVCorrupted(f"{coded.size} bytes where {self.identity} has {self.max_bytes(shape)} of {shape}")
        offset = self._scale_bytes(shape)
        scales = torch.from_numpy(body[:offset].copy().view(np.float32))
        if not bool(((scales >= 0) & (scales <= _HIGHEST)).all()):
            raise KVCorrupted(f"{self.identity}: a scale is not a number from 0 to {_HIGHEST}")
        dtype: torch.dtype = getattr(torch, shape.dtype)
        numbers = torch.from_numpy(_writable(body[offset:])).view(self.code).float().view(shape.dimensions)
        for side, sizes in enumerate(self._scale_shapes(shape)):
            scale, scales = scales[: math.prod(sizes)].view(sizes), scales[math.prod(sizes) :]
            numbers[:, :, side] *= scale
        if not bool(numbers.isfinite().all()):
            raise KVCorrupted(f"{self.identity}: a code does not represent a number")
        most = torch.finfo(dtype).max
        torch.from_numpy(out).view(dtype).view(shape.dimensions).copy_(numbers.clamp_(-most, most))

    def _scale_shapes(self, shape: PartShape) -> list[tuple[int, ...]]:
        """Shapes of K's scales and of V's."""
        side = shape.dimensions[:2] + shape.dimensions[3:]
        return [
            tuple(1 if i in shared else size for i, size in enumerate(side)) for shared in self.shared[: shape.sides]
        ]

    def _scale_bytes(self, shape: PartShape) -> int:
        return 4 * sum(map(math.prod, self._scale_shapes(shape)))


class Fp8Codec(ScaledCodec):
    """A scale for each layer and head of K, and of V, over all tokens of the value."""

    name: ClassVar[str] = "fp8"
    number: ClassVar[int] = 1
    code: ClassVar[torch.dtype] = torch.float8_e4m3fn
    largest: ClassVar[float] = 448.0
    shared: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]] = ((0, 3, 4), (0, 3, 4))


class Int8Codec(ScaledCodec):
    """Scales of K for each layer, head and channel, over all tokens of a value; of V for each layer, head and token."""

    name: ClassVar[str] = "int8"
    number: ClassVar[int] = 2
    code: ClassVar[torch.dtype] = torch.int8
    largest: ClassVar[float] = 127.0
    shared: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]] = ((0, 3), (4,))


def _writable(data: Bytes) -> Bytes:
    """Torch takes no other arrays without a warning; nothing is written."""
    return data if data.flags.writeable else data.copy()
