"""Hand-offs of a layout with KV groups: which blocks of each group the reader's next token attends to, and where they
are.

Reader and source have blocks of one size (the layout's identity says it), so a load is pairs of whole blocks, group
after group. From a group with a window, only the blocks that the token after the load attends to are read; the source
has no others.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from pdkv.connectors.base import BlockTables
from pdkv.connectors.block_table import BlockTable
from pdkv.connectors.peer.group_entries import entries_to_load
from pdkv.connectors.transfer.block_runs import Blocks, pack_blocks, unpack_blocks
from pdkv.connectors.transfer.planning import Ids
from pdkv.errors import MalformedMessage
from pdkv.wire.decoding import decode_total
from pdkv.wire.kv import KVLayout

_GROUPS = msgspec.msgpack.Decoder(list[tuple[int, bytes]])


class NamedGroup(NamedTuple):
    """A group's blocks, as named by a hand-off."""

    first: int  # entries of the source's table before them
    blocks: Blocks


class BlockPairs(NamedTuple):
    """The source's blocks that a load reads, group after group."""

    source: Ids
    generations: Ids


def pack_groups(block_tables: BlockTables, table: BlockTable) -> bytes:
    """The blocks of a request at its end, for `unpack_groups`."""
    named = []
    for block_ids in block_tables:
        first = next((i for i, block_id in enumerate(block_ids) if block_id >= 0), len(block_ids))
        held = block_ids[first:]
        named.append((first, pack_blocks(held, table.generations_of(held))))
    return msgspec.msgpack.encode(named)


def unpack_groups(payload: bytes, num_groups: int, most: int) -> list[NamedGroup] | None:
    """The inverse of `pack_groups`; None: it does not describe that many groups, of at most `most` blocks each."""
    try:
        groups = decode_total(_GROUPS, payload)
    except MalformedMessage:
        return None
    if len(groups) != num_groups:  # before any is unpacked: a few bytes may name a million blocks
        return None
    named: list[NamedGroup] = []
    for first, packed in groups:
        blocks = unpack_blocks(packed, most)
        if blocks is None or first < 0:
            return None
        named.append(NamedGroup(first, blocks))
    return named


def find_pairs(layout: KVLayout, groups: Sequence[NamedGroup], start: int, stop: int) -> BlockPairs | None:
    """Places of the KV of tokens [start, stop) at a source; None: it no longer has all of it."""
    parts: list[Blocks] = []
    for entries, (first, blocks) in zip(entries_to_load(layout, start, stop), groups, strict=True):
        if entries and (entries.start < first or entries.stop > first + blocks.ids.size):
            return None
        part = slice(max(entries.start - first, 0), max(entries.stop - first, 0)) if entries else slice(0)
        parts.append(Blocks(blocks.ids[part], blocks.generations[part]))
    return BlockPairs(*map(np.concatenate, zip(*parts, strict=True)))
