"""Transfer planning: pure functions from block ids and token ranges to a few large pieces. No bytes are moved here."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.errors import IncompatiblePeers
from pdkv.kernels.int_lists import int64_array

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]
NO_IDS: Ids = np.empty(0, dtype=np.int64)

IdBytes = bytes
"""An int64 vector as raw memory: an order's many blocks, for the ranks of the same host."""


def first_seen_block(window: int, num_tokens: int, block_size: int) -> int:
    """Index of the first block that the token at position `num_tokens` attends to, with a window of `window` tokens
    including itself (0: no window). Earlier blocks may be freed.
    """
    return max(num_tokens - window + 1, 0) // block_size if window else 0


def as_ids(ids: Sequence[int] | Ids | IdBytes) -> Ids:
    """Block ids as an int64 vector."""
    if type(ids) is bytes:
        return np.frombuffer(ids, np.int64)
    return int64_array(ids) if type(ids) is list else np.asarray(ids, dtype=np.int64)


def run_starts(*ids: Ids) -> Ids:
    """Positions at which a new run begins, because at least one of the vectors does not increase by one.

    Args:
        ids: vectors of one common length n.

    Returns:
        Ascending positions, the first of them 0; empty if n is 0.
    """
    if ids[0].size == 0:
        return as_ids([])
    breaks = np.zeros(ids[0].size, dtype=np.bool_)
    breaks[0] = True
    for vector in ids:
        breaks[1:] |= np.diff(vector) != 1
    return np.flatnonzero(breaks).astype(np.int64)


def whole_blocks(units: Sequence[int] | Ids, units_per_block: int) -> Ids | None:
    """The blocks that `units` (block * units_per_block + position) cover, if they list each block's units in order
    from its first; only the last block may be incomplete. Otherwise None.
    """
    taken = as_ids(units)
    blocks = taken[::units_per_block] // units_per_block
    in_order = blocks[:, None] * units_per_block + np.arange(units_per_block)
    return blocks if np.array_equal(in_order.reshape(-1)[: taken.size], taken) else None


def unit_index(block_ids: Sequence[int] | Ids, block_size: int, start: int, stop: int) -> Ids:
    """Units that hold tokens [start, stop): block * units_per_block + position in the block, one per hash block.

    Args:
        block_ids: the first one holds token 0.
        block_size: a multiple of the hash block size, as is `start`; the last unit may be needed only in part.

    Raises:
        ValueError: a range that does not begin at a hash block, or is longer than the blocks.
    """
    if block_size % HASH_BLOCK_SIZE or start % HASH_BLOCK_SIZE or not 0 <= start <= stop:
        raise ValueError(f"tokens [{start}, {stop}) in blocks of {block_size} are not whole units of {HASH_BLOCK_SIZE}")
    if stop > len(block_ids) * block_size:
        raise ValueError(f"token {stop} is beyond {len(block_ids)} blocks of {block_size}")
    units_per_block = block_size // HASH_BLOCK_SIZE
    positions = np.arange(start // HASH_BLOCK_SIZE, -(-stop // HASH_BLOCK_SIZE), dtype=np.int64)
    return as_ids(block_ids)[positions // units_per_block] * units_per_block + positions % units_per_block


# --- ranks --------------------------------------------------------------------------------------------------------


class HeadPart(NamedTuple):
    """KV heads that this rank exchanges with one rank of a peer."""

    peer_rank: int
    first: int  # counted in this rank's pool
    peer_first: int  # counted in the peer rank's pool
    num_heads: int


def rank_heads(rank: int, tp: int, num_heads: int) -> range:
    """The KV heads that a rank holds. With more ranks than heads, tp / num_heads neighbours hold the same one.

    Raises:
        IncompatiblePeers: neither number divides the other.
    """
    if tp < 1 or num_heads < 1 or (num_heads % tp and tp % num_heads):
        raise IncompatiblePeers(f"{num_heads} KV heads cannot be divided among {tp} tensor parallel ranks")
    if num_heads >= tp:
        return range(rank * num_heads // tp, (rank + 1) * num_heads // tp)
    return range(rank * num_heads // tp, rank * num_heads // tp + 1)


def check_ranks(tp: int, peer_tp: int, num_heads: int) -> None:
    """Check that KV can be exchanged between engines with these numbers of ranks.

    Raises:
        IncompatiblePeers: neither number is a multiple of the other, or the heads cannot be divided among them.
    """
    if tp < 1 or peer_tp < 1 or (tp % peer_tp and peer_tp % tp):
        raise IncompatiblePeers(
            f"numbers of tensor parallel ranks must be multiples of one another: {tp} here, {peer_tp} there"
        )
    rank_heads(0, tp, num_heads)
    rank_heads(0, peer_tp, num_heads)


@lru_cache(maxsize=1024)  # called for each transfer, by the step thread
def reader_parts(rank: int, tp: int, peer_tp: int, num_heads: int) -> tuple[HeadPart, ...]:
    """The parts that reader `rank` of `tp` takes from the ranks of a peer: each of its heads from one owner.

    If several of the peer's ranks hold a head, its readers are spread over them.

    Raises:
        IncompatiblePeers: see `check_ranks`.
    """
    check_ranks(tp, peer_tp, num_heads)
    heads = rank_heads(rank, tp, num_heads)
    readers, owners = max(tp // num_heads, 1), max(peer_tp // num_heads, 1)  # ranks that hold one head
    parts: list[HeadPart] = []
    for head in heads:
        owner = head * peer_tp // num_heads + rank % readers * owners // readers
        peer_first = head - rank_heads(owner, peer_tp, num_heads).start
        last = parts[-1] if parts else None
        if last is not None and last.peer_rank == owner:
            parts[-1] = last._replace(num_heads=last.num_heads + 1)
        else:
            parts.append(HeadPart(owner, head - heads.start, peer_first, 1))
    return tuple(parts)


@lru_cache(maxsize=1024)
def sender_parts(rank: int, tp: int, peer_tp: int, num_heads: int) -> tuple[HeadPart, ...]:
    """The parts that sender `rank` of `tp` gives to the ranks of a peer: the same exchange, seen from the other side.

    Empty for a rank if all readers take its heads from a neighbour that holds the same ones.

    Raises:
        IncompatiblePeers: see `check_ranks`.
    """
    return tuple(
        HeadPart(peer_rank, part.peer_first, part.first, part.num_heads)
        for peer_rank in range(peer_tp)
        for part in reader_parts(peer_rank, peer_tp, tp, num_heads)
        if part.peer_rank == rank
    )


# --- pieces -------------------------------------------------------------------------------------------------------


def blocks_of(start: int, stop: int, block_size: int) -> range:
    """Indices of the blocks with tokens [start, stop)."""
    return range(start // block_size, -(-stop // block_size)) if stop > start else range(0)
