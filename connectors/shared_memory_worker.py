"""The worker side of `shared_memory`: I/O threads copy blocks out of peers' arenas and verify what they have read."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pdkv.connectors.base import ConnectorConfig, KVConnectorMetadata, TransferKey
from pdkv.connectors.block_copy import STAGING_BYTES, Bytes, copy_blocks, copy_segments
from pdkv.connectors.io_lanes import Lane, LaneConfig
from pdkv.connectors.planning import Ids, as_ids, token_segments
from pdkv.connectors.shared_arena import Arena, PeerArena, token_view
from pdkv.connectors.shared_block_table import fence
from pdkv.connectors.shared_peers import PeerArenas
from pdkv.connectors.transfer_worker import Job, Task, TransferWorker
from pdkv.errors import ConfigError, KVNotFound, StaleGeneration
from pdkv.messages import EngineCard

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 16 * 1024 * 1024
"""Between two pieces of a copy a cancel, the deadline and a shutdown are seen."""


class BlockLoad(msgspec.Struct, frozen=True):
    """Copy tokens [start, stop) of a request from a peer's pool into `block_ids`."""

    key: TransferKey
    engine: str
    epoch: str
    start: int
    stop: int
    unit: int  # tokens per source entry: the peer's block size, or the hash block size
    source: Sequence[int]  # block * (peer's block size / unit) + position; the first one holds token `start`
    generations: Sequence[int]  # of each entry's block when it was promised
    block_ids: Sequence[int]  # the first one holds token `start`
    is_handoff: bool = True  # else it was found by its content


class SharedMemoryMetadata(KVConnectorMetadata, kw_only=True):
    """The loads that begin with a step."""

    loads: Sequence[BlockLoad] = ()


class SharedMemoryWorker(TransferWorker):
    """Loads of one engine. Saves need no work: the pool that the engine writes is what its peers read."""

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
        """`peers`: those of the scheduler's side where it is in this process."""
        super().__init__(
            notify,
            timeout_s=load_timeout_s,
            lanes=LaneConfig(num_shared=io_threads, thread_name="pdkv-load"),
        )
        self._layout = config.layout
        self._arena = arena
        self._pool: Bytes | None = arena.data()
        self._peers = PeerArenas(config) if peers is None else peers
        self.start_threads()

    def register_kv_caches(self, kv_cache: "torch.Tensor") -> None:
        """Check that the pool is the one that peers see.

        Raises:
            ConfigError: it lies on another device or elsewhere in memory.
        """
        if kv_cache.device.type != "cpu":
            raise ConfigError(
                f"connector shared_memory keeps KV in host memory, the engine's KV is on {kv_cache.device}: use "
                "--device cpu, or a connector for device memory (between engines in one process: memory)"
            )
        assert self._pool is not None, "the connector is shut down"
        if kv_cache.data_ptr() != self._pool.ctypes.data or kv_cache.nbytes != self._pool.nbytes:
            raise ConfigError("connector shared_memory must allocate the KV pool itself (allocate_kv_cache)")

    def handshake(self) -> bytes:
        return msgspec.msgpack.encode(self._arena.address)

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        if isinstance(meta, SharedMemoryMetadata):
            for load in meta.loads:
                self.submit(load.key, "receive", [Task(load)])

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        for card in removed:
            self._peers.remove(card.engine, card.epoch)
        for card in added:
            self._peers.add(card)

    def shutdown(self) -> None:
        super().shutdown()
        self._peers.clear()
        self._pool = None

    # --- I/O threads ----------------------------------------------------------------------------------------------

    def make_scratch(self, lane: Lane) -> Bytes:
        return np.empty(STAGING_BYTES, dtype=np.uint8)

    def do_idle_work(self) -> bool:
        """With nothing to copy, peers' pools are mapped ahead, bit by bit."""
        return self._peers.map_ahead()

    def run_job(self, job: Job, scratch: Any) -> int:
        """Copy, then check that nothing was reused meanwhile."""
        load: BlockLoad = job.order
        if not load.source:
            raise KVNotFound("no engine was found to have the blocks")
        peer = self._peers.get(load.engine, load.epoch)
        peer.is_source = peer.is_source or load.is_handoff
        units_per_block = peer.header.layout.block_size // load.unit
        blocks = as_ids(load.source) // units_per_block
        expected = as_ids(load.generations)
        if blocks.size != expected.size or blocks.min() < 0 or blocks.max() >= len(peer.data):
            raise KVNotFound(f"engine {load.engine} has no such blocks")
        self._verify(peer, blocks, expected, load)
        if load.unit == peer.header.layout.block_size == self._layout.block_size and load.start % load.unit == 0:
            num_bytes = self._copy_whole(job, load, peer, scratch)
        else:
            num_bytes = self._copy_tokens(job, load, peer, units_per_block)
        fence()  # the generations are read after the data
        self._verify(peer, blocks, expected, load)
        job.check()
        return num_bytes

    def _copy_whole(self, job: Job, load: BlockLoad, peer: PeerArena, staging: Bytes) -> int:
        pool = self._pool
        assert pool is not None
        source, target = as_ids(load.source), as_ids(load.block_ids)
        count = max(1, PIECE_BYTES // pool.shape[1])
        for first in range(0, source.size, count):
            job.check()
            piece = slice(first, first + count)
            copy_blocks(peer.data, pool, source[piece], target[piece], staging)
        return int(source.size * pool.shape[1])

    def _copy_tokens(self, job: Job, load: BlockLoad, peer: PeerArena, units_per_block: int) -> int:
        pool = self._pool
        assert pool is not None
        segments = token_segments(load.start, load.stop, load.unit, self._layout.block_size)
        tokens = token_view(pool, self._layout)
        token_bytes = self._layout.block_bytes // self._layout.block_size
        count = max(1, PIECE_BYTES // (load.unit * token_bytes))
        for first in range(0, len(segments), count):
            job.check()
            piece = segments[first : first + count]
            copy_segments(peer.tokens(), tokens, load.source, units_per_block, load.block_ids, piece)
        return (load.stop - load.start) * token_bytes

    def _verify(self, peer: PeerArena, blocks: Ids, expected: Ids, load: BlockLoad) -> None:
        stale = np.flatnonzero(peer.table.generations(blocks) != expected)
        if stale.size:
            raise StaleGeneration(
                f"engine {load.engine} reused {stale.size} of {blocks.size} blocks, the first {blocks[stale[0]]}",
                transfer_id=load.key[0],
                attempt=load.key[1],
            )
