"""A codec turns images of KV into the bytes that a store keeps, and back. docs/kv-codecs.md has the formats."""

import math
import struct
from abc import ABC, abstractmethod
from typing import ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.errors import ConfigError, KVCorrupted
from pdkv.kernels.host import DTYPES

Bytes = npt.NDArray[np.uint8]

HEADER_BYTES: Final = 32
_HEADER = struct.Struct("<4sBBBBIHHHHHHQ")
_MAGIC = b"pdkc"
assert _HEADER.size == HEADER_BYTES


class PartShape(NamedTuple):
    """The shape of images of units side by side: (num_units, num_layers, sides, num_heads, HASH_BLOCK_SIZE,
    head_size).
    """

    num_units: int
    num_layers: int
    num_heads: int
    head_size: int
    dtype: str  # "float32", "bfloat16" or "float16"
    first_layer: int = 0
    total_layers: int = 0  # of the model, or of a KV group's blocks; 0: num_layers
    sides: int = 2  # K and V; 1: one latent row

    @property
    def dimensions(self) -> tuple[int, ...]:
        """Dimensions of all images."""
        return self.num_units, self.num_layers, self.sides, self.num_heads, HASH_BLOCK_SIZE, self.head_size

    @property
    def num_numbers(self) -> int:
        """Numbers in all images."""
        return math.prod(self.dimensions)

    @property
    def num_bytes(self) -> int:
        """Bytes of all images, uncoded."""
        return self.num_numbers * (4 if self.dtype == "float32" else 2)

    def check(self, images: Bytes) -> None:
        """Raise ValueError for a buffer of another size, or one that is not contiguous."""
        if images.ndim != 1 or images.size != self.num_bytes or not images.flags.c_contiguous:
            raise ValueError(f"expected {self.num_bytes} bytes of images, got {images.shape}")


class Codec(ABC):
    """Codes values of a store. Threads may share it; calls release the GIL for most of their time.

    A decoder's input may be arbitrary bytes: it never touches memory outside its arguments, allocates in proportion to
    the shape that its caller expects, and writes no NaN or infinity that was not in the encoded data.
    """

    name: ClassVar[str]
    lossy: ClassVar[bool]
    """Whether the decoded KV may differ from the encoded KV."""
    number: ClassVar[int]
    """The codec's number in the header of coded values; 0: they have no header."""
    version: ClassVar[int] = 1
    """Another one for each change of the coded bytes, or of what they decode to."""
    levels: ClassVar[range] = range(1)
    """Level 0 is the finest."""
    default_level: ClassVar[int] = 0

    def __init__(self, level: int | None = None) -> None:
        """Raises ConfigError for a level that the codec does not have."""
        level = self.default_level if level is None else level
        if level not in self.levels:
            raise ConfigError(f"codec {self.name} has levels 0 to {self.levels[-1]}, got {level}")
        self.level = level

    @property
    def identity(self) -> str:
        """A part of a value's key, so that values of different codecs are never confused. Empty: exact, the same key as
        without a codec.
        """
        return f"{self.name}-{self.version}.{self.level}"

    @abstractmethod
    def max_bytes(self, shape: PartShape) -> int:
        """The maximum size in bytes of a coded value of the shape."""

    @abstractmethod
    def encode(self, images: Bytes, shape: PartShape) -> Bytes:
        """Code images.

        Args:
            images: flat, of the shape.

        Raises:
            KVNotCodable: NaN, infinity, or numbers beyond what the codec can express.
            ValueError: a buffer that does not have the shape, or a shape too large for the header.
        """

    @abstractmethod
    def decode(self, coded: Bytes, shape: PartShape, out: Bytes) -> None:
        """Decode images.

        Args:
            coded: flat; all that `encode` returned for the shape, but it may be arbitrary bytes.
            out: flat, of the shape; written. After an error it is undefined.

        Raises:
            KVCorrupted: no coded value of this codec, level and shape.
            ValueError: a buffer that does not have the shape.
        """

    def trim(self, padded: Bytes) -> Bytes:
        """The coded value at the beginning of a buffer, by the length in its header, which is not checked."""
        body_bytes = int.from_bytes(padded[HEADER_BYTES - 8 : HEADER_BYTES].tobytes(), "little")
        return padded[: HEADER_BYTES + body_bytes]

    def _header(self, shape: PartShape, body_bytes: int) -> bytes:
        numbers = (shape.first_layer, shape.num_layers, shape.total_layers or shape.num_layers)
        heads = (shape.num_heads, shape.head_size, HASH_BLOCK_SIZE)
        codec = (self.version, self.number, self.level, DTYPES[shape.dtype])
        try:
            return _HEADER.pack(_MAGIC, *codec, shape.num_units, *numbers, *heads, body_bytes)
        except struct.error as error:
            raise ValueError(f"{shape}: {error}") from None

    def _with_header(self, shape: PartShape, *body: npt.NDArray[np.generic]) -> Bytes:
        """A coded value: the header, and the arrays one behind the other."""
        parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in body]
        header = self._header(shape, sum(part.size for part in parts))
        return np.concatenate([np.frombuffer(header, np.uint8), *parts])

    def _body(self, coded: Bytes, shape: PartShape) -> Bytes:
        """What is behind the header, which must be the one that follows from the shape, byte for byte."""
        expected = self._header(shape, max(coded.size - HEADER_BYTES, 0))
        if coded[:HEADER_BYTES].tobytes() != expected:
            raise KVCorrupted(f"{coded.size} bytes are not a value of {self.identity} with {shape}")
        return coded[HEADER_BYTES:]
