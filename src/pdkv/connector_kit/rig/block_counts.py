"""The free blocks of one of the kit's engines, and the holders of the others."""

import random
from collections.abc import Iterable, Sequence


class Books:
    """Reference counts of blocks. Free blocks are allocated in random order, so that no block table is contiguous."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self._holders = [0] * num_blocks
        self._random = random.Random(seed)
        self._dirty: set[int] = set()  # freed, with content that must not be read any more

    @property
    def num_held(self) -> int:
        """Blocks with at least one holder."""
        return sum(holders > 0 for holders in self._holders)

    @property
    def num_free(self) -> int:
        """Blocks without a holder."""
        return len(self._holders) - self.num_held

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks."""
        free = [block for block, holders in enumerate(self._holders) if not holders]
        assert len(free) >= num_blocks, f"the kit's pool has no {num_blocks} free blocks"
        chosen = self._random.sample(free, num_blocks)
        self.hold(chosen)
        self._dirty.difference_update(chosen)
        return chosen

    def take(self, block_ids: Sequence[int]) -> None:
        """Take these blocks, which must be free."""
        assert not any(self._holders[block] for block in block_ids), "the kit's blocks are not free"
        self.hold(block_ids)
        self._dirty.difference_update(block_ids)

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add a holder to each."""
        for block in block_ids:
            self._holders[block] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Remove a holder from each; without holders, the content is void."""
        for block in block_ids:
            assert self._holders[block] > 0, f"block {block} has no holder"
            self._holders[block] -= 1
            if not self._holders[block]:
                self._dirty.add(block)

    def take_dirty(self) -> list[int]:
        """Blocks freed since the last call that are still free: another request writes them now."""
        dirty, self._dirty = sorted(self._dirty), set()
        return dirty
