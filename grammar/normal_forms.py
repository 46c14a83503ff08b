"""A cache of schemas' normal forms: a repeated schema costs ten microseconds, instead of at least one per property."""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from pdkv.errors import InvalidRequest
from pdkv.grammar import schema as schemas
from pdkv.grammar.schema_time import SchemaTime

MAX_KEPT_BYTES = 8 << 20
"""Bytes of schemas and their normal forms together."""


class NormalForms:
    """The latest schemas, by their text. Thread-safe."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def normalize(self, schema: Mapping[str, Any] | bool, *, time: SchemaTime | None = None) -> str:
        """As `schema.normalize`; also raises InvalidRequest for invalid JSON."""
        try:
            key = msgspec.json.encode(schema)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(f"the schema is not valid JSON: {error}") from None
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        made = schemas.normalize(schema, time=time)
        with self._lock:
            self._keep(key, made)
        return made

    def _keep(self, key: bytes, made: str) -> None:
        if key in self._kept:  # another thread was first
            return
        self._kept[key] = made
        self.num_bytes += _size(key, made)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _size(*self._kept.popitem(last=False))


def _size(key: bytes, made: str) -> int:
    return len(key) + 4 * len(made)


normalize = NormalForms().normalize
"""The cache of this process."""
