"""`raw`: KV as it is."""

from typing import ClassVar

from pdkv.errors import KVCorrupted
from pdkv.kv_store.codecs.base import Bytes, Codec, PartShape


class RawCodec(Codec):
    """Exact, without a header: the bytes that stores keep without a codec, under the same keys."""

    name: ClassVar[str] = "raw"
    lossy: ClassVar[bool] = False
    number: ClassVar[int] = 0

    @property
    def identity(self) -> str:
        return ""

    def max_bytes(self, shape: PartShape) -> int:
        return shape.num_bytes

    def trim(self, padded: Bytes) -> Bytes:
        """The buffer unchanged: raw values have no header and no padding."""
        return padded

    def encode(self, images: Bytes, shape: PartShape) -> Bytes:
        """The images themselves: no copy."""
        shape.check(images)
        return images

    def decode(self, coded: Bytes, shape: PartShape, out: Bytes) -> None:
        shape.check(out)
        if coded.size != out.size:
            raise KVCorrupted(f"expected {out.size} bytes of {shape}, got {coded.size}")
        out[:] = coded
