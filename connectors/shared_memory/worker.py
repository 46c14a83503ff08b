"""The worker side of `shared_memory`: I/O threads copy blocks out of peers' arenas and verify the data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from pdkv.connectors.arena.arena import Arena, PeerArena
from pdkv.connectors.arena.block_table import BlockTableReader
from pdkv.connectors.arena.peers import PeerArenas
from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.peer.checksums import Checksums
from pdkv.connectors.peer.pull_worker import Landed, PullPiece, PullWorker
from pdkv.connectors.peer.source_digests import SourceDigests
from pdkv.connectors.transfer.digest import Tokens
from pdkv.connectors.transfer.digest_table import DigestRows
from pdkv.connectors.transfer.lanes import SHARED_LANE, Lane, LaneConfig
from pdkv.connectors.transfer.planning import Bytes, Ids
from pdkv.connectors.transfer.pool_copy import COPY_BYTES, copy_pieces
from pdkv.connectors.transfer.worker import Job
from pdkv.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Scratch:
    """Per-thread state of an I/O thread."""

    table: BlockTableReader | None = None  # the generations of the load that it runs


class SharedMemoryWorker(PullWorker):
    """Loads of one rank. Saves need no work: peers read the pool that the engine writes.

    The KV of a rank's heads is in that rank's arena; the generations of an engine's blocks are in its first rank's.
    """

    carries_digests = True

    def __init__(
        self,
        config: ConnectorConfig,
        arena: Arena,
        notify: Callable[[], None],
        *,
        io_threads: int,
        load_timeout_s: float,
        peers: PeerArenas | None = None,
    ) -> None:
        """`peers`: the scheduler side's peers, if it is in this process."""
        self._arenas = PeerArenas(config) if peers is None else peers
        lanes = LaneConfig(num_shared=io_threads, thread_name="pdkv-load")
        super().__init__(config, notify, self._arenas, timeout_s=load_timeout_s, lanes=lanes)
        self._arena = arena
        self._pool: Bytes | None = arena.data()
        if arena.shape.holds_pool:
            self._start_on(self._pool)

    def _start_on(self, pool: Any) -> None:
        """Start; `pool` as for PoolDigests."""
        self.checksums = Checksums(self.config, pool)
        if self.config.kv_checksum != "off":
            self.source_digests = SourceDigests(self.checksums.pool, self._arena.digests())
        self.start_threads()

    def register_kv_caches(self, kv_cache: "torch.Tensor") -> None:
        """Check that the pool is the one that peers see.

        Raises:
            ConfigError: it is on another device or elsewhere in memory.
        """
        if kv_cache.device.type != "cpu":
            raise ConfigError(f"connector shared_memory has its pool in host memory, the KV is on {kv_cache.device}")
        if not self._arena.holds(kv_cache):
            raise ConfigError("connector shared_memory must allocate the KV pool itself (Built.kv_cache)")

    def handshake(self) -> bytes:
        return msgspec.msgpack.encode(self._arena.address)

    def shutdown(self) -> None:
        super().shutdown()
        if hasattr(self, "checksums"):
            self.checksums.close()
        self._pool = None

    def lane_of(self, engine: str, epoch: str, peer_rank: int, number: int = 0) -> Lane:
        return SHARED_LANE

    # --- I/O threads ----------------------------------------------------------------------------------------------

    def make_scratch(self, lane: Lane) -> Scratch:
        return Scratch()

    def do_idle_work(self) -> bool:
        """Map peers' pools ahead, bit by bit, while there is nothing to copy."""
        return self._arenas.map_ahead()

    def run_job(self, job: Job, scratch: Scratch) -> int | None:
        try:
            return super().run_job(job, scratch)
        finally:
            scratch.table = None  # or it would keep the peer mapped

    def read(self, job: Job, piece: PullPiece, scratch: Scratch) -> int:
        peer, pool = self._begin(job, piece, scratch), self._pool
        assert pool is not None
        pieces = piece.pieces(self.config.layout)
        for part in pieces.cut(COPY_BYTES):
            job.check()
            copy_pieces(pool.reshape(-1), peer.data.reshape(-1), part)
        return pieces.num_bytes

    def read_digested(self, job: Job, piece: PullPiece, scratch: Scratch, tokens: Tokens) -> Landed:
        return self.copy_digested(job, piece, self._begin(job, piece, scratch).data, tokens)

    def _begin(self, job: Job, piece: PullPiece, scratch: Scratch) -> PeerArena:
        """The arena of a piece's source. Raises StaleGeneration if a copy would be in vain."""
        load = piece.load
        peer = self._arenas.get(*piece.peer_rank)
        peer.is_source = peer.is_source or load.is_handoff
        self.check_generations(job, piece, scratch)
        return peer

    def generations(self, job: Job, piece: PullPiece, blocks: Ids, scratch: Scratch) -> Ids:
        scratch.table = scratch.table or self._arenas.get(piece.load.engine, piece.load.epoch).table
        return scratch.table.generations(blocks)

    def read_digests(self, job: Job, piece: PullPiece, scratch: Scratch, units: Ids, generations: Ids) -> DigestRows:
        return self._arenas.get(*piece.peer_rank).digests.read(units, generations)
