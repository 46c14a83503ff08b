"""Defects of `shared_memory`: between processes, on I/O threads."""

import threading
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pdkv.connectors.base import (
    NO_TRANSFERS,
    Built,
    ConnectorConfig,
    Direction,
    KVConnectorMetadata,
    MatchedTokens,
    RequestView,
    TransferKey,
    TransferResults,
)
from pdkv.connectors.peer.pull_scheduler import PullMetadata
from pdkv.connectors.peer.pull_worker import PullPiece
from pdkv.connectors.shared_memory.connector import SharedMemoryConnector
from pdkv.connectors.shared_memory.scheduler import SharedMemoryScheduler
from pdkv.connectors.shared_memory.worker import SharedMemoryWorker
from pdkv.connectors.transfer.planning import as_ids
from pdkv.connectors.transfer.worker import Job, Task

LEAKED_BYTES = 8 << 20
LATE_POLLS = 4
LEFT_BEHIND = "/dev/shm/broken-"
BLOCKED_S = 0.3


class _Broken(SharedMemoryConnector):
    """`shared_memory` with a worker or a scheduler side of its own, whose digests do not find first what is wrong."""

    @classmethod
    def build(cls, config: ConnectorConfig, notify: Callable[[], None]) -> Built:
        return super().build(msgspec.structs.replace(config, kv_checksum="off"), notify)


class _WithoutLastLayer(SharedMemoryWorker):
    def read(self, job: Job, piece: PullPiece, scratch: Any) -> int:
        assert self._pool is not None
        blocks, last = as_ids(piece.load.block_ids), slice(-self.config.layout.layer_bytes, None)
        before = self._pool[blocks, last]
        num_bytes = super().read(job, piece, scratch)
        self._pool[blocks, last] = before
        return num_bytes


class DropsTheLastLayer(_Broken):
    """All layers but one arrive."""

    worker_type = _WithoutLastLayer


class _ShortTail(SharedMemoryWorker):
    def read(self, job: Job, piece: PullPiece, scratch: Any) -> int:
        assert self._pool is not None
        layout, filled = self.config.layout, piece.load.stop % self.config.layout.block_size
        shape = (
            -1,
            2 * layout.num_layers * layout.num_kv_heads,
            layout.block_size,
            layout.head_size * layout.dtype_bytes,
        )
        block, token = piece.load.block_ids[-1], filled - 1
        before = self._pool.reshape(shape)[block, :, token].copy()
        num_bytes = super().read(job, piece, scratch)
        if filled:
            self._pool.reshape(shape)[block, :, token] = before
        return num_bytes


class TailOffByOne(_Broken):
    """The last token of a partly filled block does not arrive."""

    worker_type = _ShortTail


class _SwappedHeads(SharedMemoryWorker):
    def read(self, job: Job, piece: PullPiece, scratch: Any) -> int:
        heads = piece.heads
        theirs = piece.card.layout.num_kv_heads
        if piece.card.tp == 2 and self.config.tp == 4:
            heads = heads._replace(peer_first=(heads.peer_first + heads.num_heads) % theirs)
        return super().read(job, piece._replace(heads=heads), scratch)


class HeadSlicesSwapped(_Broken):
    """Two ranks to four: each reads the slice of its neighbour."""

    worker_type = _SwappedHeads


class _HalfRows(SharedMemoryWorker):
    def read(self, job: Job, piece: PullPiece, scratch: Any) -> int:
        layout, blocks = self.config.layout, as_ids(piece.load.block_ids)
        if layout.sides == 2 or self.config.tp == 1:
            return super().read(job, piece, scratch)
        assert self._pool is not None
        rows = self._pool.reshape(len(self._pool), -1, layout.head_size * layout.dtype_bytes)
        others = slice(rows.shape[-1] // 2, None)
        before = rows[blocks, :, others]
        num_bytes = super().read(job, piece, scratch)
        rows[blocks, :, others] = before
        return num_bytes


class DividesLatentRows(_Broken):
    """Ranks get parts of latent rows, as they get parts of heads."""

    worker_type = _HalfRows


class _RowsOfTokens(SharedMemoryWorker):
    def read(self, job: Job, piece: PullPiece, scratch: Any) -> int:
        layout, blocks = self.config.layout, as_ids(piece.load.block_ids)
        if not any(group.state for group in layout.groups):
            return super().read(job, piece, scratch)
        assert self._pool is not None
        rows = self._pool.reshape(len(self._pool), -1, layout.head_size * layout.dtype_bytes)
        before = rows[blocks, -1]
        num_bytes = super().read(job, piece, scratch)
        rows[blocks, -1] = before
        return num_bytes


class LeavesOutTheEndOfAPage(_Broken):
    """As of a block that is not full, where the rest has no tokens."""

    worker_type = _RowsOfTokens


class _BlockingMatch(SharedMemoryScheduler):
    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> MatchedTokens:
        threading.Event().wait(BLOCKED_S)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class BlocksInMatch(_Broken):
    """The scheduler side waits for an answer."""

    scheduler_type = _BlockingMatch


class _PostingWorker(SharedMemoryWorker):
    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        if isinstance(meta, PullMetadata) and self._pool is not None:
            for load in meta.loads:
                source = self._arenas.get(load.engine, load.epoch).data
                self._pool[as_ids(load.block_ids)] = source[as_ids(load.source)]
        super().start_load_kv(meta)


class PostsOnTheStepThread(_Broken):
    """The copy runs inside start_load_kv."""

    worker_type = _PostingWorker


class _LeakingWorker(SharedMemoryWorker):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._buffers: list[Any] = []
        self._late = deque([NO_TRANSFERS] * LATE_POLLS)

    def get_finished(self) -> TransferResults:
        """What ended some calls ago: an abort finds loads under way, however fast the machine is."""
        self._late.append(super().get_finished())
        if any(self._late):
            self._notify()
        return self._late.popleft()

    def cancel(self, key: TransferKey, direction: Direction) -> None:
        self._buffers.append(np.ones(LEAKED_BYTES, dtype=np.uint8))
        super().cancel(key, direction)


class LeaksABufferOnAbort(_Broken):
    """A cancelled load's buffer is never given back."""

    worker_type = _LeakingWorker


class LeavesSharedMemory(_Broken):
    """A named file in /dev/shm outlives each connector."""

    @classmethod
    def build(cls, config: ConnectorConfig, notify: Callable[[], None]) -> Built:
        Path(f"{LEFT_BEHIND}{uuid.uuid4().hex}").touch()
        return super().build(config, notify)


class _FirstPartOnly(SharedMemoryWorker):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._rest: dict[TransferKey, list[Task]] = {}
        self._due: list[tuple[TransferKey, list[Task]]] = []

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        due, self._due = self._due, []
        for key, tasks in due:
            super().submit(key._replace(part=1), "receive", tasks)
        super().start_load_kv(meta)

    def get_finished(self) -> TransferResults:
        results = super().get_finished()
        self._due += [(key, self._rest.pop(key)) for key in results.finished_receiving if key in self._rest]
        return results

    def submit(self, key: TransferKey, direction: Any, tasks: Any, **rest: Any) -> list[Job]:
        first, others = list(tasks)[:1], list(tasks)[1:]
        if others:
            self._rest[key] = others
        return super().submit(key, direction, first, **rest)


class OneRanksSuccessIsAll(_Broken):
    """What one of the peer's ranks had is in: the load is finished, and the rest is read afterwards."""

    worker_type = _FirstPartOnly
