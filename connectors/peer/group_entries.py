"""The entries of a request's block tables that a load fills, in a layout with KV groups."""

from itertools import chain

from pdkv.connectors.base import BlockTables
from pdkv.connectors.transfer.planning import first_seen_block
from pdkv.wire.kv import KVLayout


def entries_to_load(layout: KVLayout, start: int, stop: int) -> list[range]:
    """For each group, the entries of a block table that a load of tokens [start, stop) fills. `start` is the first
    token of a block.
    """
    first, last = start // layout.block_size, -(-stop // layout.block_size)
    return [
        range(max(first, min(first_seen_block(window, stop, layout.block_size), last)), last)
        for window in layout.windows
    ]


def own_blocks(layout: KVLayout, block_tables: BlockTables, start: int, stop: int) -> list[int] | None:
    """The reader's blocks for the same tokens, in the same order; None: some are missing."""
    wanted = zip(block_tables, entries_to_load(layout, start, stop), strict=True)
    own = list(chain.from_iterable(table[entries.start : entries.stop] for table, entries in wanted))
    return own if min(own, default=0) >= 0 else None


def filled_entries(layout: KVLayout, start: int, stop: int) -> list[int]:
    """The number of the load's tokens in each entry that it fills, in the same order: all of a block's, except at the
    end. A state's page is whole there, too.
    """
    size = layout.block_size
    return [
        size if group.state else min(size, stop - entry * size)
        for group, entries in zip(layout.groups, entries_to_load(layout, start, stop), strict=True)
        for entry in entries
    ]
