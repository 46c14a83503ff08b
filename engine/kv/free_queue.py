"""The free blocks of a pool in the order in which they are reused, in arrays: many blocks cost little more than a few.

Blocks without content are reused first, starting with the most recently freed; then blocks with content, starting with
the one that has been free longest. A block taken from the middle leaves a stale entry behind.
"""

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
_NOWHERE = -1
_LOOK = 64
"""The least number of entries examined together."""


class FreeQueue:
    """The set of free blocks. At first all of `num_blocks` are free, without content, and block 0 is taken first."""

    def __init__(self, num_blocks: int) -> None:
        self._num_free = num_blocks
        # Place of a block's entry: i >= 0 in `_cached`, -2 - i in `_empty`; -1: it is not free.
        self.places = -2 - np.arange(num_blocks - 1, -1, -1, dtype=np.int64)
        self._empty = np.zeros(2 * num_blocks, dtype=np.int64)  # a stack
        self._empty[:num_blocks] = np.arange(num_blocks - 1, -1, -1)
        self._top = num_blocks
        self._cached = np.zeros(2 * num_blocks, dtype=np.int64)  # first in, first out
        self._head = self._tail = 0
        # Scalar accesses through a memoryview cost a third of numpy's: most steps take one block at a time.
        self._place_of = memoryview(self.places.data)
        self._empty_at = memoryview(self._empty.data)
        self._cached_at = memoryview(self._cached.data)

    def __len__(self) -> int:
        return self._num_free

    def __contains__(self, block_id: int) -> bool:
        return self._place_of[block_id] != _NOWHERE

    def push(self, block_ids: Ids, *, cached: bool) -> None:
        """Add blocks that become free, in this order."""
        count = len(block_ids)
        if not count:
            return
        if cached:
            if self._tail + count > len(self._cached):
                self._compact_cached()
            self._cached[self._tail : self._tail + count] = block_ids
            self.places[block_ids] = np.arange(self._tail, self._tail + count)
            self._tail += count
        else:
            if self._top + count > len(self._empty):
                self._compact_empty()
            self._empty[self._top : self._top + count] = block_ids
            self.places[block_ids] = -2 - np.arange(self._top, self._top + count)
            self._top += count
        self._num_free += count

    def push_one(self, block_id: int, *, cached: bool) -> None:
        """Add a block that becomes free."""
        if cached:
            if self._tail == len(self._cached):
                self._compact_cached()
            self._cached_at[self._tail] = block_id
            self._place_of[block_id] = self._tail
            self._tail += 1
        else:
            if self._top == len(self._empty):
                self._compact_empty()
            self._empty_at[self._top] = block_id
            self._place_of[block_id] = -2 - self._top
            self._top += 1
        self._num_free += 1

    def remove(self, block_ids: Ids) -> None:
        """Remove blocks that are no longer free."""
        self.places[block_ids] = _NOWHERE
        self._num_free -= len(block_ids)

    def note_taken(self, count: int) -> None:
        """Subtract blocks already removed from `places` from the free count."""
        self._num_free -= count

    def remove_one(self, block_id: int) -> None:
        """Remove a block that is no longer free."""
        self._place_of[block_id] = _NOWHERE
        self._num_free -= 1

    def take_one(self) -> int:
        """Take the next block. There must be one."""
        places, empty, cached = self._place_of, self._empty_at, self._cached_at
        self._num_free -= 1
        while self._top:
            self._top -= 1
            block_id = empty[self._top]
            if places[block_id] == -2 - self._top:
                places[block_id] = _NOWHERE
                return block_id
        while True:
            block_id, at = cached[self._head], self._head
            self._head += 1
            if places[block_id] == at:
                places[block_id] = _NOWHERE
                return block_id

    def take(self, count: int) -> Ids:
        """Take the next blocks. There must be enough."""
        taken: list[Ids] = []
        missing = count
        while missing and self._top:
            at = np.arange(self._top - 1, max(self._top - 1 - max(missing, _LOOK), -1), -1)
            live = np.flatnonzero(self.places[self._empty[at]] == -2 - at)[:missing]
            self._top = int(at[live[-1]] if len(live) == missing else at[-1])
            taken.append(self._empty[at[live]])
            missing -= len(live)
        while missing:
            at = np.arange(self._head, min(self._head + max(missing, _LOOK), self._tail))
            live = np.flatnonzero(self.places[self._cached[at]] == at)[:missing]
            self._head = int(at[live[-1]] if len(live) == missing else at[-1]) + 1
            taken.append(self._cached[at[live]])
            missing -= len(live)
        block_ids = np.concatenate(taken)
        self.remove(block_ids)
        return block_ids

    def check_integrity(self, empty: Ids, cached: Ids) -> None:
        """Raise AssertionError unless exactly these blocks are free, each with one valid entry."""
        assert self._num_free == len(empty) + len(cached) == np.count_nonzero(self.places != _NOWHERE)
        at = -2 - self.places[empty]
        assert ((at >= 0) & (at < self._top)).all(), empty
        assert (self._empty[at] == empty).all(), empty
        at = self.places[cached]
        assert ((at >= self._head) & (at < self._tail)).all(), cached
        assert (self._cached[at] == cached).all(), cached

    def _compact_cached(self) -> None:
        at = np.arange(self._head, self._tail)
        live = self._cached[at][self.places[self._cached[at]] == at]
        self._cached[: len(live)] = live
        self.places[live] = np.arange(len(live))
        self._head, self._tail = 0, len(live)

    def _compact_empty(self) -> None:
        at = np.arange(self._top)
        live = self._empty[at][self.places[self._empty[at]] == -2 - at]
        self._empty[: len(live)] = live
        self.places[live] = -2 - np.arange(len(live))
        self._top = len(live)
