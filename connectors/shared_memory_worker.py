"""The worker side of `shared_memory`: I/O threads copy blocks out of peers' arenas and verify what they have read."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pdkv.connectors.base import (
    NO_TRANSFERS,
    ConnectorConfig,
    KVConnectorMetadata,
    TransferKey,
    TransferOutcome,
    TransferResults,
    WorkerConnector,
)
from pdkv.connectors.block_copy import STAGING_BYTES, Bytes, copy_blocks, copy_segments
from pdkv.connectors.planning import Ids, as_ids, token_segments
from pdkv.connectors.shared_arena import Arena, PeerArena, token_view
from pdkv.connectors.shared_block_table import fence
from pdkv.connectors.shared_peers import PeerArenas
from pdkv.errors import ConfigError, KVNotFound, StaleGeneration, TransferCancelled, TransferError, TransferTimeout
from pdkv.messages import EngineCard

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 * 1024 * 1024
"""Between two pieces of a copy a cancel, the deadline and a shutdown are seen."""

_JOIN_TIMEOUT_S = 5.0


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


class _Job:
    """A load on its way. `cancelled` is set by the step thread and read by an I/O thread."""

    __slots__ = ("cancelled", "deadline", "dropped", "load", "running", "started")

    def __init__(self, load: BlockLoad, started: float, timeout_s: float) -> None:
        self.load = load
        self.started = started
        self.deadline = started + timeout_s
        self.running = False
        self.cancelled = False
        self.dropped = False  # reported already: nobody may touch its blocks any more


class SharedMemoryWorker(WorkerConnector):
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
        self.num_unknown_keys = 0  # cancels and duplicate loads that named nothing new
        self._layout = config.layout
        self._arena = arena
        self._notify = notify
        self._load_timeout_s = load_timeout_s
        self._pool: Bytes | None = arena.data()
        self._peers = PeerArenas(config) if peers is None else peers
        self._lock = threading.Lock()  # guards _jobs, the results and every job's flags
        self._jobs: dict[TransferKey, _Job] = {}
        self._finished: dict[TransferKey, TransferOutcome] = {}
        self._failed: dict[TransferKey, TransferOutcome] = {}
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"pdkv-load-{i}", daemon=True) for i in range(io_threads)
        ]
        for thread in self._threads:
            thread.start()

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
        if not isinstance(meta, SharedMemoryMetadata) or not meta.loads:
            return
        now = time.monotonic()
        for load in meta.loads:
            job = _Job(load, now, self._load_timeout_s)
            with self._lock:
                if load.key in self._jobs:
                    self.num_unknown_keys += 1
                    continue
                self._jobs[load.key] = job
            self._queue.put(job)

    def get_finished(self) -> TransferResults:
        with self._lock:
            if not self._finished and not self._failed:
                return NO_TRANSFERS
            finished, self._finished = self._finished, {}
            failed, self._failed = self._failed, {}
        nothing: Mapping[TransferKey, TransferOutcome] = {}
        return TransferResults(nothing, nothing, finished, failed)

    def cancel(self, key: TransferKey) -> None:
        """A queued load fails at once; one that is being copied fails when the copy has stopped."""
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                self.num_unknown_keys += 1
                return
            job.cancelled = True
            if job.running:
                return
            job.dropped = True
            self._end(job, TransferOutcome(TransferCancelled.code))
        self._notify()

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        for card in removed:
            self._peers.remove(card.engine, card.epoch)
        for card in added:
            self._peers.add(card)

    def shutdown(self) -> None:
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)
            if thread.is_alive():
                logger.error("thread %s does not end", thread.name)
        self._peers.clear()
        self._pool = None

    # --- I/O threads ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        staging = np.empty(STAGING_BYTES, dtype=np.uint8)
        while (job := self._next_job()) is not None:
            with self._lock:
                if job.dropped:
                    continue
                job.running = True
            code, num_bytes = "", 0
            try:
                num_bytes = self._copy(job, staging)
            except TransferError as error:
                code = error.code
                logger.debug("load %s from engine %s: %s", job.load.key, job.load.engine, error)
            except Exception:  # whatever it was, the thread serves the next load, and the request hears of it
                code = TransferError.code
                logger.exception("load %s from engine %s", job.load.key, job.load.engine)
            with self._lock:
                self._end(job, TransferOutcome(code, num_bytes, time.monotonic() - job.started))
            del job
            self._notify()

    def _next_job(self) -> _Job | None:
        """Wait for the next job; None: shut down. With nothing to do, peers' pools are mapped ahead, bit by bit."""
        while self._queue.empty() and not self._stopping and self._peers.map_ahead():
            pass
        return self._queue.get()

    def _end(self, job: _Job, outcome: TransferOutcome) -> None:
        del self._jobs[job.load.key]
        (self._failed if outcome.code else self._finished)[job.load.key] = outcome

    def _copy(self, job: _Job, staging: Bytes) -> int:
        """Copy, then check that nothing was reused meanwhile. Returns the bytes copied; raises a TransferError."""
        load = job.load
        self._check(job)
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
            num_bytes = self._copy_whole(job, peer, staging)
        else:
            num_bytes = self._copy_tokens(job, peer, units_per_block)
        fence()  # the generations are read after the data
        self._verify(peer, blocks, expected, load)
        self._check(job)
        return num_bytes

    def _copy_whole(self, job: _Job, peer: PeerArena, staging: Bytes) -> int:
        pool = self._pool
        assert pool is not None
        source, target = as_ids(job.load.source), as_ids(job.load.block_ids)
        count = max(1, PIECE_BYTES // pool.shape[1])
        for first in range(0, source.size, count):
            self._check(job)
            piece = slice(first, first + count)
            copy_blocks(peer.data, pool, source[piece], target[piece], staging)
        return int(source.size * pool.shape[1])

    def _copy_tokens(self, job: _Job, peer: PeerArena, units_per_block: int) -> int:
        pool, load = self._pool, job.load
        assert pool is not None
        segments = token_segments(load.start, load.stop, load.unit, self._layout.block_size)
        tokens = token_view(pool, self._layout)
        token_bytes = self._layout.block_bytes // self._layout.block_size
        count = max(1, PIECE_BYTES // (load.unit * token_bytes))
        for first in range(0, len(segments), count):
            self._check(job)
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

    def _check(self, job: _Job) -> None:
        transfer_id, attempt = job.load.key
        if job.cancelled or self._stopping:
            raise TransferCancelled("cancelled", transfer_id=transfer_id, attempt=attempt)
        if time.monotonic() >= job.deadline:
            raise TransferTimeout(f"not done after {self._load_timeout_s} s", transfer_id=transfer_id, attempt=attempt)
