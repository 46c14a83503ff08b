"""`cachegen`: deltas from anchors, in steps that depend on the layer, entropy coded (SIGCOMM '24, arXiv:2310.07240).

The first layers get finer steps than the last ones, and K finer ones than V. kernels/cachegen.py says what is computed.
"""

from typing import ClassVar, Final

import numpy as np

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.errors import KVCorrupted, KVNotCodable
from pdkv.kernels import cachegen
from pdkv.kernels.cachegen import Parts, Shape
from pdkv.kernels.rans import LANES
from pdkv.kv_store.codecs.base import HEADER_BYTES, Bytes, Codec, PartShape
from pdkv.kv_store.codecs.symbol_model import symbol_model

_FACTORS: Final = ((0.22, 0.28), (0.28, 0.35), (0.35, 0.4))  # by third of the layers: of K, of V; of level 1
_MAX_BITS: Final = (4.7, 4.2, 3.7, 3.2, 2.7)  # of a symbol on average, by level: what does not fit gets coarser steps
_COARSER: Final = np.float32(2**0.25)


class CacheGenCodec(Codec):
    """Lossy. Each level has steps sqrt(2) times as large as the one before, which is half a bit for each number."""

    name: ClassVar[str] = "cachegen"
    lossy: ClassVar[bool] = True
    number: ClassVar[int] = 3
    levels: ClassVar[range] = range(len(_MAX_BITS))
    default_level: ClassVar[int] = 1

    def max_bytes(self, shape: PartShape) -> int:
        return HEADER_BYTES + _fixed_bytes(shape) + 2 * self._max_words(shape)

    def _max_words(self, shape: PartShape) -> int:
        return int(shape.num_numbers * _MAX_BITS[self.level]) // 16

    def encode(self, images: Bytes, shape: PartShape) -> Bytes:
        shape.check(images)
        factors = self._factors(shape)
        while True:
            parts = cachegen.encode(images, _kernel_shape(shape), factors, symbol_model())
            if parts is None:
                raise KVNotCodable(f"{self.identity}: there are NaN, infinities or numbers beyond {cachegen.HIGHEST}")
            if parts.words.size <= self._max_words(shape):
                return self._with_header(shape, parts.num_words.astype("<u4"), *parts[:5], parts.words)
            factors *= _COARSER

    def _factors(self, shape: PartShape) -> cachegen.Floats:
        """(layers, 2): steps of K and of V, in mean absolute deltas; a latent row's are K's."""
        layers = range(shape.first_layer, shape.first_layer + shape.num_layers)
        total = shape.total_layers or shape.num_layers
        factors = np.array([_FACTORS[min(3 * layer // total, 2)] for layer in layers], dtype=np.float32)
        factors = factors if shape.sides == 2 else factors[:, [0, 0]]
        return factors * np.float32(2 ** ((self.level - self.default_level) / 2))

    def decode(self, coded: Bytes, shape: PartShape, out: Bytes) -> None:
        shape.check(out)
        parts = self._parse(self._body(coded, shape), shape)
        if not cachegen.decode(parts, _kernel_shape(shape), symbol_model(), out):
            raise KVCorrupted(f"{self.identity}: the words do not end where their symbols do")

    def _parse(self, body: Bytes, shape: PartShape) -> Parts:
        """The parts, all of the sizes that follow from the shape; no step is NaN, negative or too large."""
        if body.size < _fixed_bytes(shape) or body.size % 2:
            raise KVCorrupted(f"{self.identity}: {body.size} bytes behind the header of {shape}")
        template = Parts.empty(_kernel_shape(shape), 0)
        offset = 4 * shape.num_layers
        num_words = body[:offset].view("<u4").astype(np.int64)
        arrays = []
        for array in template[:5]:
            part = body[offset : offset + array.nbytes]
            arrays.append(part.copy().view(array.dtype).reshape(array.shape))
            offset += array.nbytes
        words = body[offset:].copy().view(np.uint16)
        anchor_steps, steps, anchors, contexts, states = arrays
        if int(num_words.sum()) != words.size:
            raise KVCorrupted(f"{self.identity}: {words.size} words where the layers have {num_words.tolist()}")
        if not all(bool(((numbers >= 0) & (numbers <= cachegen.HIGHEST)).all()) for numbers in (anchor_steps, steps)):
            raise KVCorrupted(f"{self.identity}: a step is not a number from 0 to {cachegen.HIGHEST}")
        return Parts(anchor_steps, steps, anchors, contexts, states, num_words, words)


def _kernel_shape(shape: PartShape) -> Shape:
    units, layers, heads, head_size, dtype = shape[:5]
    return Shape(units, layers, shape.sides * heads, HASH_BLOCK_SIZE, head_size, dtype)


def _fixed_bytes(shape: PartShape) -> int:
    """Bytes of a body without the words: per layer their number and the states, two steps a plane, two bytes a
    channel.
    """
    planes = shape.sides * shape.num_heads
    return shape.num_layers * (4 + 4 * LANES + planes * (8 + 2 * shape.head_size))
