"""The KV blocks of one engine: who holds each, which content it has, and the order in which free ones are reused.

A block is in the free queue if and only if nobody holds it. A block with a key (hashed) is immutable.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import chain

from pdkv.connectors.block_table import BlockTable
from pdkv.wire.messages import BlockCounts, BlockRemoved, BlockStored, CacheCleared, KVEvent


class Holder(IntEnum):
    """Why a block is held. A block counts once, as the first that holds of: quarantined, active, leased."""

    ACTIVE = 0  # a request, a step in flight or I/O
    LEASE = 1  # handed off; a peer may read it
    QUARANTINE = 2  # a peer may still write it


class _Class(IntEnum):
    """The five classes of the ownership equation."""

    FREE = 0
    CACHED = 1
    ACTIVE = 2
    LEASED = 3
    QUARANTINED = 4


class BlockPool:
    """Allocation, reference counts, content index and LRU eviction of `num_blocks` blocks. Not thread-safe."""

    def __init__(self, num_blocks: int, table: BlockTable) -> None:
        self.num_blocks = num_blocks
        self.table = table
        self._holders: tuple[list[int], list[int], list[int]] = tuple([0] * num_blocks for _ in Holder)  # type: ignore[assignment]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to be reused first
        self._keys: list[list[bytes] | None] = [None] * num_blocks
        self._parents: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._counts = [0] * len(_Class)
        self._counts[_Class.FREE] = num_blocks
        self._unannounced: set[int] = set()  # blocks with content of which no event tells
        self.events: list[KVEvent] = []

    @property
    def num_available(self) -> int:
        """Blocks that an allocation can have: free and cached ones."""
        return len(self._free)

    def counts(self) -> BlockCounts:
        """Blocks by class; the five add up to the total."""
        free, cached, active, leased, quarantined = self._counts
        return BlockCounts(
            total=self.num_blocks, free=free, cached=cached, active=active, leased=leased, quarantined=quarantined
        )

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take blocks for a request (holder ACTIVE), evicting the least recently used content; None: not enough."""
        if num_blocks > len(self._free):
            return None
        block_ids = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            before = self._class_of(block_id)
            self._forget(block_id)
            self.table.reuse(block_id)  # before anything is written: late readers see it
            self._holders[Holder.ACTIVE][block_id] = 1
            self._count(before, _Class.ACTIVE)
        return block_ids

    def hold(self, block_ids: Iterable[int], holder: Holder) -> None:
        """Add one holder to each block."""
        counts = self._holders[holder]
        for block_id in block_ids:
            before = self._class_of(block_id)
            counts[block_id] += 1
            self._free.pop(block_id, None)
            self._count(before, self._class_of(block_id))

    def release(self, block_ids: Sequence[int], holder: Holder) -> None:
        """Take one holder from each block; the last one gone, it returns to the free queue.

        Content stays findable. The end of a chain is reused before its beginning, and blocks without content first.
        """
        counts = self._holders[holder]
        for block_id in reversed(block_ids):
            assert counts[block_id] > 0, f"block {block_id} has no {holder.name} holder"
            before = self._class_of(block_id)
            counts[block_id] -= 1
            if not self.is_held(block_id):
                self._free[block_id] = None
                if self._keys[block_id] is None:
                    self._free.move_to_end(block_id, last=False)
            self._count(before, self._class_of(block_id))

    def num_freed_by(self, holds: Iterable[Sequence[int]]) -> int:
        """Blocks that nobody would hold any more once these ACTIVE holds were released."""
        active, leased, quarantined = self._holders
        counts = Counter(chain.from_iterable(holds))
        return sum(active[i] == n and not leased[i] and not quarantined[i] for i, n in counts.items())

    def is_held(self, block_id: int) -> bool:
        """Whether anybody holds the block."""
        active, leased, quarantined = self._holders
        return active[block_id] > 0 or leased[block_id] > 0 or quarantined[block_id] > 0

    def has_content(self, block_id: int) -> bool:
        """Whether the block is hashed, and so immutable."""
        return self._keys[block_id] is not None

    def lookup(self, key: bytes) -> int | None:
        """The block whose last hash-block key is `key`."""
        return self._by_key.get(key)

    def commit(self, block_id: int, keys: list[bytes], parent: bytes | None, *, announced: bool = True) -> None:
        """The held block is full and confirmed: enter its content. A second copy of known content stays private.

        `announced` False: only `lookup` finds it; neither events nor the table say that it is there.
        """
        if self._keys[block_id] is not None or keys[-1] in self._by_key:
            return
        self._keys[block_id] = keys
        self._parents[block_id] = parent
        self._by_key[keys[-1]] = block_id
        if announced:
            self.table.publish(block_id, keys)
            self.events.append(BlockStored(keys=keys, parent=parent))
        else:
            self._unannounced.add(block_id)

    def withdraw(self, block_id: int) -> None:
        """The block's content turned out to be wrong: nobody finds it any more, and peers that read it refuse it."""
        before = self._class_of(block_id)
        self._forget(block_id)
        self.table.reuse(block_id)
        if before == _Class.CACHED:
            self._free.move_to_end(block_id, last=False)
        self._count(before, self._class_of(block_id))

    def snapshot_events(self) -> list[KVEvent]:
        """The whole content as events, for a reader that lost track; parents before children."""
        events: list[KVEvent] = [CacheCleared()]
        stored: set[int] = set()
        for block_id in self._by_key.values():
            if block_id in self._unannounced:
                continue
            chain: list[int] = []  # from the block up to its first ancestor that is told already, or is not here
            ancestor: int | None = block_id
            while ancestor is not None and ancestor not in stored:
                chain.append(ancestor)
                stored.add(ancestor)
                parent = self._parents[ancestor]
                ancestor = None if parent is None else self._by_key.get(parent)
            for member in reversed(chain):
                keys = self._keys[member]
                assert keys is not None
                events.append(BlockStored(keys=keys, parent=self._parents[member]))
        return events

    def check_integrity(self) -> None:
        """Raise AssertionError where a count, the free queue or the index contradicts the holders."""
        classes = [self._class_of(block_id) for block_id in range(self.num_blocks)]
        assert [classes.count(c) for c in _Class] == self._counts, (self._counts, classes)
        for block_id in range(self.num_blocks):
            assert (block_id in self._free) == (not self.is_held(block_id)), f"block {block_id}"
            assert all(holder[block_id] >= 0 for holder in self._holders), f"block {block_id}"
        indexed = {block_id: keys[-1] for block_id, keys in enumerate(self._keys) if keys is not None}
        assert {key: block_id for block_id, key in indexed.items()} == self._by_key

    def _class_of(self, block_id: int) -> _Class:
        active, leased, quarantined = self._holders
        if quarantined[block_id]:
            return _Class.QUARANTINED
        if active[block_id]:
            return _Class.ACTIVE
        if leased[block_id]:
            return _Class.LEASED
        return _Class.FREE if self._keys[block_id] is None else _Class.CACHED

    def _count(self, before: _Class, after: _Class) -> None:
        self._counts[before] -= 1
        self._counts[after] += 1

    def _forget(self, block_id: int) -> None:
        keys = self._keys[block_id]
        if keys is None:
            return
        self._keys[block_id] = None
        del self._by_key[keys[-1]]
        if block_id in self._unannounced:
            self._unannounced.discard(block_id)
        else:
            self.events.append(BlockRemoved(keys=keys))
