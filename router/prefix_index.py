"""Which engine has which prompt prefix in its cache, kept from the engines' numbered KV events.

A block key is a hash of the whole prefix up to it, so the radix tree needs no nodes: a dict from key to the engines
that hold it is the tree, and a match is a walk along the prompt's own keys.
"""

import sys
from collections.abc import Sequence

from pdkv.block_keys import HASH_BLOCK_SIZE
from pdkv.wire.messages import BlockRemoved, BlockStored, CacheCleared, KVEvents


class _Part:
    """One engine's part of the index."""

    __slots__ = ("asked", "bit", "keys", "max_keys", "next_number")

    def __init__(self, bit: int, max_keys: int) -> None:
        self.bit = bit
        self.max_keys = max_keys
        self.keys: set[bytes] = set()
        self.next_number: int | None = None  # None: nothing counts until a batch begins with CacheCleared
        self.asked = False  # a Resync is under way


class PrefixIndex:
    """Keys by engine. Memory is one dict entry per distinct key and one set entry per key and engine."""

    def __init__(self, hash_block_size: int = HASH_BLOCK_SIZE) -> None:
        self.hash_block_size = hash_block_size
        self.num_gaps = 0
        self.num_excess_keys = 0  # that engines told beyond what their cache can hold
        self._parts: dict[str, _Part] = {}
        self._holders: dict[bytes, int] = {}  # key -> bit mask of engines

    @property
    def num_keys(self) -> int:
        """Distinct keys that any engine holds."""
        return len(self._holders)

    def num_keys_of(self, engine: str) -> int:
        """Keys that the engine holds."""
        part = self._parts.get(engine)
        return 0 if part is None else len(part.keys)

    def add_engine(self, engine: str, max_keys: int = sys.maxsize) -> None:
        """Begin with an empty part; an engine's first batch says what it holds. Keys beyond `max_keys` are dropped."""
        self.remove_engine(engine)
        taken = {part.bit for part in self._parts.values()}
        bit = next(1 << i for i in range(len(taken) + 1) if 1 << i not in taken)
        self._parts[engine] = _Part(bit, max_keys)

    def remove_engine(self, engine: str) -> None:
        """The engine is gone, and its cache with it. Idempotent."""
        part = self._parts.pop(engine, None)
        if part is not None:
            self._clear(part)

    def apply(self, engine: str, events: KVEvents) -> bool:
        """Apply one batch of an engine.

        Returns:
            False for a gap in the numbers: the engine's part is empty now, and a Resync must be asked for (once: what
            comes before its answer is skipped).
        """
        part = self._parts.get(engine)
        if part is None:
            return True
        starts_over = bool(events.events) and isinstance(events.events[0], CacheCleared)
        if not starts_over and events.number != part.next_number:
            if part.asked:
                return True
            self.num_gaps += 1
            part.next_number, part.asked = None, True
            self._clear(part)
            return False
        part.asked = False
        part.next_number = events.number if events.more else events.number + 1
        for event in events.events:
            match event:
                case BlockStored():
                    self._store(part, event.keys)
                case BlockRemoved():
                    for key in event.keys:
                        self._remove(part, key)
                case CacheCleared():
                    self._clear(part)
        return True

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Tokens of the longest prefix of `keys` that each engine holds; engines without any are left out."""
        holders = self._holders
        alive = -1
        lengths: list[tuple[int, int]] = []  # (engines, keys) that ended at that length
        for i, key in enumerate(keys):
            mask = holders.get(key, 0)
            if alive & ~mask:
                lengths.append((alive & ~mask, i))
                alive &= mask
                if not alive:
                    break
        else:
            lengths.append((alive, len(keys)))
        return {
            engine: num_keys * self.hash_block_size
            for engine, part in self._parts.items()
            for mask, num_keys in lengths
            if mask & part.bit and num_keys
        }

    def match_one(self, engine: str, keys: Sequence[bytes]) -> int:
        """Tokens of the longest prefix of `keys` that this engine holds."""
        part, holders = self._parts.get(engine), self._holders
        if part is None:
            return 0
        num_keys = next((i for i, key in enumerate(keys) if not holders.get(key, 0) & part.bit), len(keys))
        return num_keys * self.hash_block_size

    def _store(self, part: _Part, keys: Sequence[bytes]) -> None:
        holders, bit = self._holders, part.bit
        room = part.max_keys - len(part.keys)
        if len(keys) > room:
            keys = [key for key in keys if key not in part.keys]
            self.num_excess_keys += max(len(keys) - room, 0)
            keys = keys[:room]
        for key in keys:
            holders[key] = holders.get(key, 0) | bit
        part.keys.update(keys)

    def _remove(self, part: _Part, key: bytes) -> None:
        if key not in part.keys:
            return
        part.keys.discard(key)
        mask = self._holders[key] & ~part.bit
        if mask:
            self._holders[key] = mask
        else:
            del self._holders[key]

    def _clear(self, part: _Part) -> None:
        for key in list(part.keys):
            self._remove(part, key)
