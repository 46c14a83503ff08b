"""The worker side of `shared_memory` for KV on devices: copies from pool to pool, verified as in host memory.

The order of events, over two processes: the source's host sees a step end, and only then publishes its blocks. A reader
that learns of them copies on its own stream, digests the landed data there, waits for both, checks that the source
still has its memory, and reads the generations again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pdkv.connectors.arena.arena import Arena
from pdkv.connectors.arena.device_pool import COPY_BYTES, PoolDevice
from pdkv.connectors.arena.peers import PeerArenas
from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.peer.pull_worker import Landed, PullPiece
from pdkv.connectors.shared_memory.worker import Scratch, SharedMemoryWorker
from pdkv.connectors.transfer.digest import QueuedDigests, Tokens
from pdkv.connectors.transfer.lanes import Lane
from pdkv.connectors.transfer.pool_copy import Pieces, block_pieces, unit_pieces
from pdkv.connectors.transfer.units import UnitPart, await_copy
from pdkv.connectors.transfer.worker import Job
from pdkv.errors import ConfigError
from pdkv.kernels.streams import Event, Stream, streams_of

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True)
class _Copies(Scratch):
    """The objects with which an I/O thread copies."""

    stream: Stream
    done: Event  # its last copy


class DeviceSharedMemoryWorker(SharedMemoryWorker):
    """Loads of one rank from peers' devices, or from its own if several engines share that."""

    def __init__(
        self,
        config: ConnectorConfig,
        arena: Arena,
        notify: Callable[[], None],
        *,
        device: PoolDevice,
        io_threads: int,
        load_timeout_s: float,
        peers: PeerArenas | None = None,
    ) -> None:
        super().__init__(config, arena, notify, io_threads=io_threads, load_timeout_s=load_timeout_s, peers=peers)
        self._device = device
        self._data: torch.Tensor | None = None  # the own pool, (bytes,) uint8

    def register_kv_caches(self, kv_cache: "torch.Tensor") -> None:
        exported = self._arena.exported
        if exported is None or kv_cache.data_ptr() != exported.data.data_ptr():
            raise ConfigError("connector shared_memory must allocate the KV pool itself (Built.kv_cache)")
        self._data = exported.data
        self._compile()
        self._start_on(kv_cache)

    def shutdown(self) -> None:
        super().shutdown()
        self._data = None

    # --- I/O threads ----------------------------------------------------------------------------------------------

    def make_scratch(self, lane: Lane) -> _Copies:
        streams = streams_of(self._device.device)
        return _Copies(stream=streams.make_stream(), done=streams.make_event())

    def do_idle_work(self) -> bool:
        return False

    def read(self, job: Job, piece: PullPiece, scratch: Scratch) -> int:
        return self._read(job, piece, scratch).num_bytes

    def read_digested(self, job: Job, piece: PullPiece, scratch: Scratch, tokens: Tokens) -> Landed:
        """As in the base class: digests are made of the landed data right after the copy, with one wait for both."""
        make = partial(self.checksums.pool.queue, tokens, piece.digested_part(self.config.layout))
        return self._read(job, piece, scratch, make)

    def _read(
        self, job: Job, piece: PullPiece, scratch: Scratch, make: Callable[[], QueuedDigests] | None = None
    ) -> Landed:
        """Read a piece. `make`: runs after the last copy, on its stream."""
        assert isinstance(scratch, _Copies)
        peer, pool = self._arenas.pool(*piece.peer_rank, self._device)
        self.check_generations(job, piece, scratch)
        pieces, queued = piece.pieces(self.config.layout), None
        parts = list(pieces.cut(COPY_BYTES))
        for part in parts:
            job.check()
            queued = self._copy(part, pool, scratch, make if part is parts[-1] else None)
        peer.check_owner()
        return Landed(pieces.num_bytes, None if queued is None else queued.read())

    def _copy(
        self, part: Pieces, source: "torch.Tensor", copies: _Copies, make: Callable[[], QueuedDigests] | None = None
    ) -> QueuedDigests | None:
        """Copy, and return when the copy is complete, with the result of `make`: the source blocks may then be reused.

        Raises:
            TransferError: some of it is outside of its pool. Also raises what `make` raises, once the copy is complete.
        """
        assert self._data is not None, "the connector is shut down"
        with copies.stream.on():
            self._device.copy(self._data, source, part)
            try:
                return None if make is None else make()
            finally:
                copies.done.record()
                await_copy(copies.done)

    def _compile(self) -> None:
        """Compile both forms of the copy now, by copies of a block onto itself, so that no load waits for that."""
        layout, copies, block = self.config.layout, self.make_scratch(None), np.zeros(1, dtype=np.int64)
        whole = UnitPart(0, layout.num_kv_heads, 0, layout.num_layers)
        assert self._data is not None
        self._copy(block_pieces(layout, block, block, range(layout.num_layers)), self._data, copies)
        self._copy(unit_pieces(layout, layout, block, 0, block, whole), self._data, copies)
