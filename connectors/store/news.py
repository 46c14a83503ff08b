"""Reports of a store connector to the routers: values that were saved or loaded here, and values not found."""

from collections.abc import Iterable

import msgspec

from pdkv.connectors.store.plan import StoreCut, Value
from pdkv.kv_store.base import KVStore
from pdkv.wire.tiers import TierEvents, TierPart

MAX_NEWS = 1 << 14
"""The most keys waiting to be taken; further ones are dropped."""


class StoreNews:
    """Changes since the last `take`, the latest for each key. Used only by the step thread.

    Only whole values of the first KV group are reported: prompts find others only together with them. If all layers
    have a window, nothing is reported, since no chain of values begins with the prompt.
    """

    def __init__(self, store: KVStore, cut: StoreCut, value_bytes: int = 0) -> None:
        """`value_bytes`: bytes of a whole value of the first group, as a rank stores it; 0: the size of its blocks."""
        self._size = cut.value_tokens[0]  # the same for engines of all block sizes, which a hit's end may not be
        value_bytes = value_bytes or self._size * cut.layout.token_bytes
        parts = _parts_of(store, value_bytes)
        self._empty = TierEvents(
            store.medium, store.is_shared, self._size, parts=parts, value_bytes=value_bytes, scope=store.scope
        )
        self._is_told = not cut.windows[0]
        self._changes: dict[bytes, bool] = {}  # key -> whether it is stored
        self._announced = False

    def stored(self, values: Iterable[Value]) -> None:
        """Note values that were saved or loaded."""
        self._note(values, is_there=True)

    def missing(self, values: Iterable[Value]) -> None:
        """Note values that were not found, or are damaged."""
        self._note(values, is_there=False)

    def take(self) -> list[TierEvents]:
        """The changes to report; the first time at least the existence of the store."""
        if self._announced and not self._changes:
            return []
        self._announced = True
        changes, self._changes = self._changes, {}
        empty = self._empty
        removed = [key for key, is_there in changes.items() if not is_there]
        stored = [key for key, is_there in changes.items() if is_there]
        return [msgspec.structs.replace(empty, removed=removed, stored=stored)]

    def _note(self, values: Iterable[Value], *, is_there: bool) -> None:
        if not self._is_told:
            return
        changes, size = self._changes, self._size
        keys = [key for key, _, num_tokens, group in values if not group and num_tokens == size]
        if len(changes) + len(keys) > MAX_NEWS:
            room = MAX_NEWS - len(changes)
            keys = [key for key in keys if key in changes] + [key for key in keys if key not in changes][:room]
        changes.update(dict.fromkeys(keys, is_there))


def _parts_of(store: KVStore, value_bytes: int) -> list[TierPart]:
    """The parts of the store, and how many of this engine's values fit into each."""
    parts = store.parts()
    rooms = [None if (room := part.own_capacity) is None else room // value_bytes for part in parts.values()]
    return [TierPart(name, room) for name, room in zip(parts if len(parts) > 1 else [""], rooms, strict=True)]
