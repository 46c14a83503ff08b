"""Bodies of values that a codec makes from the images of their units, padded to one size."""

from collections.abc import Sequence
from functools import cache

from pdkv.connectors.transfer.planning import Bytes
from pdkv.connectors.transfer.units import UnitPart
from pdkv.errors import ConfigError
from pdkv.kernels.host import DTYPES
from pdkv.kv_store.codecs.base import Codec, PartShape
from pdkv.wire.kv import KVLayout


class ValueCoder:
    """Codes bodies on a connector's threads, which share it.

    Args:
        codecs: one for each form in which values are stored.

    Raises:
        ConfigError: the codec cannot code the engine's KV, or the engine's keys promise exact KV and the codec is
            lossy.
    """

    def __init__(self, codecs: Sequence[Codec], layout: KVLayout) -> None:
        for codec in codecs:
            if codec.lossy and codec.identity not in layout.codec.split("+"):
                raise ConfigError(f"the engine's keys are those of exact KV, but codec={codec.name} is lossy")
            if layout.dtype not in DTYPES:
                raise ConfigError(f"codec={codec.name} supports KV in {', '.join(DTYPES)}, not in {layout.dtype}")
        self.codecs = codecs
        self._layout = layout
        self.body_bytes = cache(self._body_bytes)
        """(form, part, number of units) -> bytes of a body, whatever the KV."""

    def _body_bytes(self, form: int, part: UnitPart, num_units: int) -> int:
        return self.codecs[form].max_bytes(self._shape(part, num_units))

    def encode(self, images: Bytes, form: int, part: UnitPart, num_units: int, body: Bytes) -> None:
        """Fill a body. Raises KVNotCodable."""
        coded = self.codecs[form].encode(images, self._shape(part, num_units))
        body[: coded.size] = coded
        body[coded.size :] = 0

    def decode(self, body: Bytes, form: int, part: UnitPart, num_units: int, images: Bytes) -> None:
        """Fill images from a body. Raises KVCorrupted."""
        codec = self.codecs[form]
        codec.decode(codec.trim(body), self._shape(part, num_units), images)

    def _shape(self, part: UnitPart, num_units: int) -> PartShape:
        layout = self._layout
        return PartShape(
            num_units,
            part.num_layers,
            part.num_heads,
            layout.head_size,
            layout.dtype,
            first_layer=part.layer_start,
            total_layers=layout.num_layers,
            sides=layout.sides,
        )
