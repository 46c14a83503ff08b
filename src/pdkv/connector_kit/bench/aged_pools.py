"""Pools with free blocks in the order of an engine that has run for a while, or of a fresh one."""

import random
from collections import deque
from collections.abc import Iterable

from pdkv.connector_kit.rig.block_counts import Books

NUM_OPERATIONS = 10_000
"""Allocations and frees that age a pool."""

LONGEST = 64
"""Blocks of the longest request that ages a pool."""


class FreshBooks(Books):
    """Books of a fresh pool: free blocks in ascending order."""

    def __init__(self, num_blocks: int, seed: int = 0) -> None:
        super().__init__(num_blocks, seed)
        self._free = deque(range(num_blocks))

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate as the engine's pool does: the block freed first is taken first."""
        assert len(self._free) >= num_blocks, f"the pool has no {num_blocks} free blocks"
        chosen = [self._free.popleft() for _ in range(num_blocks)]
        self.hold(chosen)
        return chosen

    def release(self, block_ids: Iterable[int]) -> None:
        """Release as the engine's pool does: the end of a chain is reused before its beginning."""
        for block in reversed(list(block_ids)):
            super().release([block])
            if not self._holders[block]:
                self._free_one(block)

    def take_dirty(self) -> list[int]:
        """No blocks: free blocks keep their content, since nothing else writes here."""
        return []

    def _free_one(self, block: int) -> None:
        self._free.append(block)


class ContiguousBooks(FreshBooks):
    """Every request gets adjacent blocks: the lowest run after the previous one."""

    def __init__(self, num_blocks: int, seed: int = 0) -> None:
        super().__init__(num_blocks, seed)
        self._next = 0

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate adjacent blocks, further on in the pool each time."""
        first = self._next if self._next + num_blocks <= len(self._holders) else 0
        chosen = list(range(first, first + num_blocks))
        if any(self._holders[block] for block in chosen):
            chosen = self._first_free_run(num_blocks)
        self._next = chosen[-1] + 1
        self.hold(chosen)
        return chosen

    def _first_free_run(self, num_blocks: int) -> list[int]:
        length = 0
        for block, holders in enumerate(self._holders):
            length = 0 if holders else length + 1
            if length == num_blocks:
                return list(range(block + 1 - num_blocks, block + 1))
        raise AssertionError(f"the pool has no {num_blocks} adjacent free blocks")

    def _free_one(self, block: int) -> None:
        pass


class AgedBooks(FreshBooks):
    """The pool after NUM_OPERATIONS random allocations and frees of requests of many lengths."""

    def __init__(self, num_blocks: int, seed: int = 0) -> None:
        super().__init__(num_blocks, seed)
        rng = random.Random(seed)
        live: list[list[int]] = []
        longest = min(max(num_blocks // 16, 1), LONGEST)
        for _ in range(NUM_OPERATIONS):
            size = rng.randint(1, longest)
            if size <= len(self._free) and (not live or rng.random() < 0.5):
                live.append(self.allocate(size))
            else:
                self._free_any(live, rng)
        while live:
            self._free_any(live, rng)

    def _free_any(self, live: list[list[int]], rng: random.Random) -> None:
        index = rng.randrange(len(live))
        live[index], live[-1] = live[-1], live[index]
        self.release(live.pop())


PATTERNS: dict[str, type[FreshBooks]] = {"aged": AgedBooks, "contiguous": ContiguousBooks}
"""The order of a request's blocks."""
