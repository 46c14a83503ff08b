"""Pools with free blocks in the order of an engine that has run for a while, or of a fresh one."""

import random
from collections import deque
from collections.abc import Callable, Mapping

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connector_kit.rig.engine import ScatteredPool
from pdkv.connectors.block_table import BlockTable, LocalBlockTable
from pdkv.engine.kv.block_pool import BlockPool, Holder
from pdkv.wire.kv import KVLayout

NUM_OPERATIONS = 10_000
"""Allocations and frees that age a pool."""

LONGEST = 64
"""Blocks of the longest request that ages a pool."""


def aged(layout: KVLayout, num_blocks: int, table: BlockTable, seed: int) -> BlockPool:
    """The pool after NUM_OPERATIONS random allocations and frees of requests of many lengths, all of which it caches.

    So the block freed first is taken first, and the end of a chain before its beginning.
    """
    rng, free, live = random.Random(seed), deque(range(num_blocks)), list[list[int]]()

    def free_any() -> None:
        index = rng.randrange(len(live))
        live[index], live[-1] = live[-1], live[index]
        free.extend(reversed(live.pop()))

    longest = min(max(num_blocks // 16, 1), LONGEST)
    for _ in range(NUM_OPERATIONS):
        size = rng.randint(1, longest)
        if size <= len(free) and (not live or rng.random() < 0.5):
            live.append([free.popleft() for _ in range(size)])
        else:
            free_any()
    while live:
        free_any()
    pool = BlockPool(num_blocks, LocalBlockTable(num_blocks), keys_per_block=layout.block_size // HASH_BLOCK_SIZE)
    pool.hold(free, Holder.ACTIVE)
    pool.commit(list(free), [b"%d" % block for block in free], None, announced=False)
    pool.release(list(reversed(free)), Holder.ACTIVE)
    pool.table = table
    return pool


class ContiguousPool(ScatteredPool):
    """Every request gets adjacent blocks: the lowest run after the previous one."""

    _next = 0

    def choose(self, num_blocks: int) -> list[int]:
        starts = (self._next, *range(self.num_blocks - num_blocks + 1))
        runs = (list(range(start, start + num_blocks)) for start in starts if start + num_blocks <= self.num_blocks)
        run = next((run for run in runs if not self.num_held(run)), None)
        assert run is not None, f"the pool has no {num_blocks} adjacent free blocks"
        self._next = run[-1] + 1
        return run


PATTERNS: Mapping[str, Callable[[KVLayout, int, BlockTable, int], BlockPool]] = {
    "aged": aged,
    "contiguous": ContiguousPool,
}
"""The order of a request's blocks."""
