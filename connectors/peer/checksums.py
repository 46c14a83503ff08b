"""Digests of hand-offs on both sides of a transfer: which transfers have them, and how mismatches are reported."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from pdkv.connectors.base import ConnectorConfig, TransferKey
from pdkv.connectors.transfer.digest import PieceDigests, PoolDigests, cut_tokens
from pdkv.connectors.transfer.planning import Ids, blocks_of
from pdkv.connectors.transfer.units import UnitPart
from pdkv.errors import KVCorrupted
from pdkv.wire.kv import ChecksumMode

logger = logging.getLogger(__name__)

SAMPLED = 16
"""With mode sample, one transfer in this many has digests."""


def is_checked(mode: ChecksumMode, transfer_id: str) -> bool:
    """Whether an engine in that mode digests a transfer: both ends decide the same way."""
    return mode == "on" or (mode == "sample" and xxhash.xxh3_64_intdigest(transfer_id.encode()) % SAMPLED == 0)


class Checksums:
    """The digests of one rank; none with mode off. Thread-safe."""

    pool: PoolDigests

    def __init__(self, config: ConnectorConfig, kv_cache: Any) -> None:
        self._config = config
        if config.kv_checksum != "off":
            self.pool = PoolDigests(kv_cache, config.layout, rank=config.rank, tp=config.tp)
            self.pool.compile_kernels()

    def close(self) -> None:
        """Release the pool. Idempotent."""
        self.__dict__.pop("pool", None)

    def are_wanted(self, peer: ChecksumMode, transfer_id: str) -> bool:
        """Whether both ends have digests of a transfer."""
        return is_checked(self._config.kv_checksum, transfer_id) and is_checked(peer, transfer_id)

    def of(self, block_ids: Sequence[int] | Ids, first: int, tokens: range, part: UnitPart, key: TransferKey) -> bytes:
        """Digests of a piece of a transfer in this engine's blocks, 8 bytes for each hash block; for a long piece, a
        digest of these digests.

        Args:
            block_ids: the first of them holds token `first` of the transfer.
            tokens: the piece's tokens.
            part: the piece's heads and layers, in this rank's numbering.
            key: the ticket's key, which names the transfer at both ends.
        """
        return self.begin(block_ids, first, tokens, part, key).finish()

    def begin(
        self, block_ids: Sequence[int] | Ids, first: int, tokens: range, part: UnitPart, key: TransferKey
    ) -> PieceDigests:
        """As `of`, for digests that are made while the piece is copied."""
        cut = cut_tokens(block_ids, self.pool.layout.block_size, tokens.start, tokens.stop, first=first)
        return self.pool.begin(cut, part, key, tokens.start)

    def compare(self, own: bytes, theirs: bytes, tokens: range, key: TransferKey, peer: str) -> None:
        """Compare the digests of the received data with the peer's.

        Raises:
            KVCorrupted: they differ, or the peer's are missing.
        """
        if own == theirs:
            return
        if len(own) != len(theirs):
            what = f"came with {len(theirs)} bytes of digests instead of {len(own)}"
        elif len(own) % 8 or len(own) // 8 != len(blocks_of(tokens.start, tokens.stop, self.pool.unit_tokens)):
            what = "changed on the way"
        else:
            wrong = np.flatnonzero(np.frombuffer(own, np.uint64) != np.frombuffer(theirs, np.uint64))
            size = self.pool.unit_tokens
            first = int(tokens.start // size + wrong[0]) * size
            what = f"changed on the way: {wrong.size} hash blocks, the first from token {first} on"
        self.report(f"tokens [{tokens.start}, {tokens.stop}) {what}", key, peer)

    def report(self, what: str, key: TransferKey, peer: str) -> None:
        """Log a mismatch with its details. Raises KVCorrupted."""
        logger.warning(
            "KV from engine %s to engine %s is damaged: transfer %s, attempt %d: %s",
            peer, self._config.engine, key.transfer_id, key.attempt, what,
        )  # fmt: skip
        raise KVCorrupted(f"from engine {peer}: {what}", key=key)
