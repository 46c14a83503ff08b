"""The KV blocks of one engine: the holders and the content of each, and the order in which free ones are reused.

A block is in the free queue if and only if it has no holder. A block with a key (hashed) is immutable.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from enum import IntEnum
from itertools import chain

import numpy as np
import numpy.typing as npt

from pdkv.connectors.block_table import BlockTable
from pdkv.engine.kv.free_queue import FreeQueue, Ids
from pdkv.kernels.block_pool import HolderCounts, available
from pdkv.kernels.int_lists import int64_array
from pdkv.wire.messages import BlockRemoved, BlockStored, CacheCleared, KVEvent
from pdkv.wire.reports import BlockCounts


class Holder(IntEnum):
    """Why a block is held. A block counts once, in the first class that applies: quarantined, active, leased."""

    ACTIVE = 0  # a request, a step in flight or I/O
    LEASE = 1  # handed off; a peer may read it
    QUARANTINE = 2  # a peer may still write it


_HELD = sum(1 << holder for holder in Holder)
_CONTENT = _HELD + 1
_NUM_STATES = 2 * _CONTENT
"""A block's state: a bit per kind of holder, and one for content."""

_CLASSES = [
    "quarantined" if state & 1 << Holder.QUARANTINE
    else "active" if state & 1 << Holder.ACTIVE
    else "leased" if state & 1 << Holder.LEASE
    else "cached" if state & _CONTENT
    else "free"
    for state in range(_NUM_STATES)
]  # fmt: skip
"""The five classes of the ownership equation, by state."""

_IN_CLASS = np.array([[of == name for of in _CLASSES] for name in BlockCounts.__struct_fields__[1:]], dtype=np.int64)
"""(classes, states): 1 where a state belongs to the class."""

MAX_KEYS_PER_EVENT = 4096
"""The most block keys in one event."""

MAX_CLEANED_KEYS = 4096
"""The most keys of reused blocks that leave the index with one step."""

_FEW = 24
"""Up to this many blocks, a loop is faster than arrays."""

States = npt.NDArray[np.uint8]


class BlockPool:
    """Allocation, reference counts, content index and LRU eviction of `num_blocks` blocks. Not thread-safe.

    Counts per block are kept in arrays, so that a request of a hundred thousand tokens costs little more than a short
    one.

    Args:
        keys_per_block: hash blocks in a block, which is the number of keys of its announced content.
    """

    def __init__(self, num_blocks: int, table: BlockTable, *, keys_per_block: int = 1) -> None:
        self.num_blocks = num_blocks
        self.table = table
        self.events: list[KVEvent] = []
        self._keys_per_block = keys_per_block
        self._free = FreeQueue(num_blocks)
        self._num_holders = np.zeros((len(Holder), num_blocks), dtype=np.int32)
        self._states = np.zeros(num_blocks, dtype=np.uint8)
        self._in_states = np.zeros(_NUM_STATES, dtype=np.int64)
        self._num_in_state = memoryview(self._in_states.data)
        self._num_in_state[0] = num_blocks
        self._keys = np.full((num_blocks, keys_per_block), None, dtype=object)  # of unannounced content: only the last
        self._is_announced = np.zeros(num_blocks, dtype=np.bool_)  # of blocks with content
        self._parents = np.full(num_blocks, None, dtype=object)
        self._by_key: dict[bytes, int] = {}  # a block's last key; those in `_stale` do not count
        self._stale: list[bytes] = []
        # Scalar accesses through a memoryview cost a third of numpy's: a decode takes one block at a time.
        self._last_keys = self._keys[:, -1]
        self._is_announced_of = memoryview(self._is_announced.data)
        self._state_of = memoryview(self._states.data)
        self._num_of = [memoryview(self._num_holders[holder].data) for holder in Holder]
        self._compiled: HolderCounts | None = None
        if available():
            arrays = (self._states, self._num_holders, self._in_states, self._free.places)
            self._compiled = HolderCounts(*arrays, held=_HELD)

    @property
    def num_available(self) -> int:
        """Blocks available to an allocation: free and cached ones."""
        return len(self._free)

    def counts(self) -> BlockCounts:
        """Blocks by class; the five add up to the total."""
        return BlockCounts(self.num_blocks, *(_IN_CLASS @ self._in_states).tolist())

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take blocks for a request (holder ACTIVE), evicting the least recently used content; None: there are not
        enough.
        """
        if num_blocks > len(self._free):
            return None
        if num_blocks <= _FEW:
            return [self._allocate_one() for _ in range(num_blocks)]
        block_ids = self._free.take(num_blocks)
        before = self._states[block_ids]
        self._forget(block_ids[before != 0])
        taken: list[int] = block_ids.tolist()
        self.table.reuse_all(taken)  # before anything is written, so that late readers notice
        self._num_holders[Holder.ACTIVE, block_ids] = 1
        self._set_states(block_ids, before, np.full(num_blocks, 1 << Holder.ACTIVE, dtype=np.uint8))
        return taken

    def _allocate_one(self) -> int:
        block_id = self._free.take_one()
        before = self._state_of[block_id]
        if before:
            self._forget_one(block_id)
        self.table.reuse(block_id)
        self._num_of[Holder.ACTIVE][block_id] = 1
        self._set_state(block_id, before, 1 << Holder.ACTIVE)
        return block_id

    def hold(self, block_ids: Collection[int], holder: Holder) -> None:
        """Add a holder to each block, once for every time it is named."""
        if self._compiled is not None and len(block_ids) > _FEW:
            self._free.note_taken(self._compiled.hold(int64_array(block_ids), holder))
            return
        counts, states, bit = self._num_of[holder], self._state_of, 1 << holder
        for block_id in block_ids:
            before = states[block_id]
            counts[block_id] += 1
            if not before & _HELD:
                self._free.remove_one(block_id)
            if not before & bit:
                self._set_state(block_id, before, before | bit)

    def release(self, block_ids: Sequence[int], holder: Holder) -> None:
        """Remove a holder from each block, once for every time it is named; without holders, a block returns to the
        free queue.

        Content can still be found. The end of a chain is reused before its beginning, and blocks without content first.
        """
        if self._compiled is not None and len(block_ids) > _FEW:
            freed = self._compiled.release(int64_array(block_ids), holder)
            self._free.push(freed.cached, cached=True)
            self._free.push(freed.empty, cached=False)
            return
        counts, states, num_in_state, others = self._num_of[holder], self._state_of, self._num_in_state, ~(1 << holder)
        for block_id in reversed(block_ids):
            num_left = counts[block_id] - 1
            if num_left < 0:
                raise AssertionError(f"block {block_id} has no {holder.name} holder")
            counts[block_id] = num_left
            if not num_left:
                before = states[block_id]
                states[block_id] = after = before & others
                num_in_state[before] -= 1
                num_in_state[after] += 1
                if not after & _HELD:
                    self._free.push_one(block_id, cached=after != 0)

    def num_freed_by(self, holds: Iterable[Sequence[int]]) -> int:
        """Number of blocks that would be free once these ACTIVE holds were released."""
        block_ids, counts = np.unique(int64_array(list(chain.from_iterable(holds))), return_counts=True)
        only_active = self._states[block_ids] & _HELD == 1 << Holder.ACTIVE
        return int((only_active & (self._num_holders[Holder.ACTIVE, block_ids] == counts)).sum())

    def num_held(self, block_ids: Sequence[int]) -> int:
        """Number of these blocks that have a holder."""
        if len(block_ids) <= _FEW:
            return sum(map(self.is_held, block_ids))
        return int(np.count_nonzero(self._states[int64_array(block_ids)] & _HELD))

    def is_held(self, block_id: int) -> bool:
        """Whether the block has a holder."""
        return bool(self._state_of[block_id] & _HELD)

    def has_content(self, block_id: int) -> bool:
        """Whether the block is hashed, and so immutable."""
        return bool(self._state_of[block_id] & _CONTENT)

    def lookup(self, key: bytes) -> int | None:
        """The block with `key` as its last hash-block key."""
        return self._index().get(key)

    def lookup_chain(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of `keys`, each of them a block's last key."""
        found: list[int] = []
        with suppress(KeyError):
            found.extend(map(self._index().__getitem__, keys))  # the blocks before the first missing one stay
        return found

    def commit(
        self, block_ids: Sequence[int], keys: list[bytes], parent: bytes | None, *, announced: bool = True
    ) -> None:
        """Enter the content of consecutive held blocks of a request, which are full and confirmed.

        A second copy of known content stays private.

        Args:
            block_ids: -1: not held, nothing to enter.
            keys: the keys of all their hash blocks, in order; for unannounced content, one per block.
            parent: the key before the first; None: the first is a root.
            announced: False: only lookups find it; it appears neither in events nor in the table.
        """
        per_block = self._keys_per_block if announced else 1
        if len(block_ids) <= _FEW:
            if len(block_ids) == 1 and len(keys) == per_block:  # as happens now and then in decode
                self._enter_one(block_ids[0], keys, parent, announced=announced)
                return
            for first, block_id in zip(range(0, len(keys), per_block), block_ids, strict=True):
                own = keys[first : first + per_block]
                self._enter_one(block_id, own, keys[first - 1] if first else parent, announced=announced)
            return
        ids = int64_array(block_ids)
        known = np.fromiter(map(self._index().__contains__, keys[per_block - 1 :: per_block]), np.bool_, len(ids))
        fresh = np.flatnonzero(~known & (ids >= 0) & (self._states[ids] & _CONTENT == 0))
        for run in np.split(fresh, np.flatnonzero(np.diff(fresh) != 1) + 1):
            if run.size:
                start, stop = int(run[0]), int(run[-1]) + 1
                first = start * per_block
                own = keys[first : stop * per_block]
                self._enter(ids[start:stop], own, keys[first - 1] if first else parent, announced=announced)

    def _enter_one(self, block_id: int, keys: list[bytes], parent: bytes | None, *, announced: bool) -> None:
        last = keys[-1]
        index = self._index() if self._stale else self._by_key
        if block_id < 0 or last in index:
            return
        before = self._state_of[block_id]
        if before & _CONTENT:
            return
        index[last] = block_id
        self._set_state(block_id, before, before | _CONTENT)
        self._is_announced_of[block_id] = announced
        if not announced:
            self._last_keys[block_id] = last
            return
        if len(keys) == 1:
            self._last_keys[block_id] = last  # three times as fast as a row
        else:
            self._keys[block_id] = keys
        self._parents[block_id] = parent
        self.table.publish(block_id, keys)
        self.events.append(BlockStored(keys, parent))

    def _enter(self, ids: Ids, keys: list[bytes], parent: bytes | None, *, announced: bool) -> None:
        block_ids: list[int] = ids.tolist()
        per_block = self._keys_per_block if announced else 1
        last = keys[per_block - 1 :: per_block]
        self._by_key.update(zip(last, block_ids, strict=True))
        self._is_announced[ids] = announced
        before = self._states[ids]
        self._set_states(ids, before, before | np.uint8(_CONTENT))
        self._keys[ids, -per_block:] = _as_objects(keys).reshape(-1, per_block)
        if not announced:
            return
        self._parents[ids] = _as_objects([parent, *last[:-1]])
        self.table.publish_all(block_ids, keys)
        for start in range(0, len(keys), MAX_KEYS_PER_EVENT):
            part = keys[start : start + MAX_KEYS_PER_EVENT]
            self.events.append(BlockStored(keys=part, parent=keys[start - 1] if start else parent))

    def _index(self) -> dict[bytes, int]:
        """Index blocks by their last key."""
        self.clean_index(len(self._stale))
        return self._by_key

    def clean_index(self, most: int = MAX_CLEANED_KEYS) -> None:
        """Remove at most `count` keys of reused blocks from the index. A lookup removes all of them first; called
        between steps, this halves the work of a step that reuses thousands of blocks.
        """
        if self._stale:
            stale = self._stale[-most:]
            del self._stale[-most:]
            deque(map(self._by_key.__delitem__, stale), maxlen=0)  # for each

    def withdraw(self, block_ids: Collection[int]) -> None:
        """Drop the content of blocks that turned out to be wrong: it is no longer found, and peers that read it refuse
        it.
        """
        distinct = int64_array(list(dict.fromkeys(block_ids)))
        with_content = distinct[self._states[distinct] & _CONTENT != 0]
        before = self._states[with_content]
        self._forget(with_content)
        self.table.reuse_all(with_content.tolist())
        cached = with_content[before == _CONTENT]
        self._free.remove(cached)
        self._free.push(cached, cached=False)
        self._set_states(with_content, before, before & np.uint8(_HELD))

    def drop_cached(self, block_ids: Sequence[int] | None = None) -> int:
        """Drop the content of these blocks, or of all, as an eviction does; blocks with a holder keep their content.

        Returns:
            The number of blocks that had content and are free now.
        """
        ids = np.arange(self.num_blocks) if block_ids is None else int64_array(block_ids)
        cached: list[int] = ids[self._states[ids] == _CONTENT].tolist()
        self.withdraw(cached)
        return len(cached)

    def snapshot_events(self) -> list[KVEvent]:
        """The whole content as events, for a reader that lost track; parents before children."""
        events: list[KVEvent] = [CacheCleared()]
        stored: set[int] = set()
        index = self._index()
        for block_id in index.values():
            if not self._is_announced[block_id]:
                continue
            line: list[int] = []  # up to the first ancestor that is already in an event, or not in the pool
            ancestor: int | None = block_id
            while ancestor is not None and ancestor not in stored:
                line.append(ancestor)
                stored.add(ancestor)
                parent = self._parents[ancestor]
                ancestor = None if parent is None else index.get(parent)
            for member in reversed(line):
                events.append(BlockStored(keys=list(self._keys[member]), parent=self._parents[member]))
        return events

    def check_integrity(self) -> None:
        """Raise AssertionError if a count, the free queue or the index contradicts the holders."""
        in_states = np.bincount(self._states, minlength=_NUM_STATES)
        assert in_states.tolist() == self._num_in_state.tolist(), self._num_in_state.tolist()
        assert (self._num_holders >= 0).all()
        for block_id in range(self.num_blocks):
            state, keys = self._state_of[block_id], self._keys[block_id].tolist()
            holders = sum(1 << holder for holder in Holder if self._num_holders[holder, block_id])
            assert state & _HELD == holders, f"block {block_id}"
            num_keys = (len(keys) if self._is_announced[block_id] else 1) if state & _CONTENT else 0
            missing = [None] * (len(keys) - num_keys)
            assert keys[: len(missing)] == missing, f"block {block_id}"
            assert None not in keys[len(missing) :], f"block {block_id}"
        indexed = {keys[-1]: block_id for block_id, keys in enumerate(self._keys) if keys[-1] is not None}
        stale = {*self._stale}
        assert len(stale) == len(self._stale)
        assert indexed == {key: block_id for key, block_id in self._by_key.items() if key not in stale}
        assert sum(keys[-1] is not None for keys in self._keys) == len(self._by_key) - len(self._stale)
        self._free.check_integrity(np.flatnonzero(self._states == 0), np.flatnonzero(self._states == _CONTENT))

    def _set_state(self, block_id: int, before: int, after: int) -> None:
        self._state_of[block_id] = after
        self._num_in_state[before] -= 1
        self._num_in_state[after] += 1

    def _set_states(self, block_ids: Ids, before: States, after: States) -> None:
        self._states[block_ids] = after
        self._in_states += np.bincount(after, minlength=_NUM_STATES) - np.bincount(before, minlength=_NUM_STATES)

    def _forget_one(self, block_id: int) -> None:
        keys = self._keys[block_id].tolist()
        self._keys[block_id] = None
        self._parents[block_id] = None
        del self._by_key[keys[-1]]
        if self._is_announced[block_id]:
            self.events.append(BlockRemoved(keys=keys))

    def _forget(self, with_content: Ids) -> None:
        """Make the content of these blocks unfindable. The caller sets their states."""
        if not with_content.size:
            return
        told, last = with_content[self._is_announced[with_content]], self._last_keys[with_content].tolist()
        is_all = self._keys_per_block == 1 and told.size == with_content.size
        removed = last if is_all else self._keys[told].ravel().tolist()
        self._stale += last
        self._keys[with_content] = None
        self._parents[with_content] = None
        for start in range(0, len(removed), MAX_KEYS_PER_EVENT):
            self.events.append(BlockRemoved(keys=removed[start : start + MAX_KEYS_PER_EVENT]))


def _as_objects(values: Sequence[bytes | None]) -> npt.NDArray[np.object_]:
    objects = np.empty(len(values), dtype=object)
    objects[:] = values
    return objects
