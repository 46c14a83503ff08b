"""Pull over NIXL: decode reads leased blocks, then the generations; small or differently cut pieces are gathered."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.nixl_endpoint import NixlEndpoint
from pdkv.connectors.nixl_fetch import Wanted
from pdkv.connectors.nixl_gather import expand_blocks, no_offer
from pdkv.connectors.nixl_memory import GENERATION_BYTES, GenerationTable
from pdkv.connectors.nixl_options import NixlOptions
from pdkv.connectors.nixl_peers import NixlPeers
from pdkv.connectors.nixl_rank import NixlRank
from pdkv.connectors.nixl_wire import RankBlob
from pdkv.connectors.planning import Ids, Run, as_ids, split_runs, unit_index
from pdkv.connectors.pull import PullPiece, PullWorker
from pdkv.connectors.transfer_worker import Job
from pdkv.connectors.units import UnitPart
from pdkv.errors import KVNotFound, TransferError
from pdkv.messages import EngineCard

if TYPE_CHECKING:
    import torch

POST_BYTES = 8 * 1024 * 1024
"""Of one post: between two of them a cancel, the deadline and a shutdown are seen."""

Post = tuple[Ids, Ids, Ids]
"""Byte offsets at the source, at the destination, and sizes, of what is posted at once."""


class NixlPullWorker(PullWorker):
    """Worker side of mode=pull."""

    def __init__(
        self,
        config: ConnectorConfig,
        notify: Callable[[], None],
        peers: NixlPeers,
        endpoint: NixlEndpoint,
        table: GenerationTable,
        options: NixlOptions,
    ) -> None:
        super().__init__(config, notify, peers, timeout_s=options.transfer_timeout_s, lanes=options.lanes)
        self.rank = NixlRank(endpoint)
        self._ranks = peers
        self._table = table
        self._options = options

    def register_kv_caches(self, kv_cache: "torch.Tensor") -> None:
        """Register the pool with NIXL. Raises ConfigError."""
        self.rank.open(kv_cache, self._table if self.config.rank == 0 else None, no_offer, self.wake_if_late)
        self.rank.endpoint.start()
        self.start_threads()

    def handshake(self) -> bytes:
        return self.rank.endpoint.blob()

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        update = super().update_peers
        self.rank.update_peers(added, removed, lambda: update(added, removed))

    def shutdown(self) -> None:
        super().shutdown()
        self.rank.close()

    def read(self, job: Job, piece: PullPiece, scratch: Any) -> int:
        load, layout, peer = piece.load, self.config.layout, piece.card.layout
        blob = self._ranks.rank(load.engine, load.epoch, piece.heads.peer_rank)
        if load.unit != peer.block_size:
            raise KVNotFound(f"engine {load.engine} is read by whole blocks only")
        if layout == peer and load.start % layout.block_size == 0:
            return self._read_blocks(job, blob, as_ids(load.source), as_ids(load.block_ids))
        try:
            theirs = unit_index(load.source, peer.block_size, *_within(load.start, load.stop, peer.block_size))
            ours = unit_index(load.block_ids, layout.block_size, *_within(load.start, load.stop, layout.block_size))
        except ValueError as error:
            raise TransferError(str(error)) from None
        first, num_heads = piece.heads.first, piece.heads.num_heads
        part = UnitPart(first, first + num_heads, 0, layout.num_layers)
        return self.rank.reader.fetch(job, blob, Wanted(theirs, piece.heads.peer_first, ours, part))

    def generations(self, job: Job, piece: PullPiece, blocks: Ids, scratch: Any) -> Ids:
        """Read the span of rank 0's table that the blocks lie in."""
        blob = self._ranks.rank(piece.load.engine, piece.load.epoch, 0)
        table = blob.generations
        if table is None:
            raise KVNotFound(f"engine {piece.load.engine} shows no generations")
        endpoint = self.rank.endpoint
        found = np.empty(blocks.size, dtype=np.int64)
        first, stop = int(blocks.min()), int(blocks.max()) + 1
        with endpoint.buffers.take(job.remaining_s()) as buffer:
            step = buffer.size // GENERATION_BYTES
            for start in range(first, stop, step):
                size = (min(start + step, stop) - start) * GENERATION_BYTES
                endpoint.read(
                    blob,
                    (endpoint.buffer_region, as_ids([endpoint.buffer_offset(buffer)])),
                    (table, as_ids([start * GENERATION_BYTES])),
                    size,
                    deadline=job.deadline,
                    check=job.check,
                )
                here = (blocks >= start) & (blocks < start + step)
                found[here] = buffer[:size].view(np.int64)[blocks[here] - start]
        return found

    def _read_blocks(self, job: Job, blob: RankBlob, theirs: Ids, ours: Ids) -> int:
        """Large runs as they lie; the others, if they are many, by gathering."""
        min_blocks = -(-self._options.gather_below // blob.block_bytes)
        split = split_runs(theirs, ours, min_blocks)
        rest = split_runs(theirs[split.rest], ours[split.rest], 1).runs
        if len(rest) < self._options.gather_min_pieces:
            self._read_runs(job, blob, [*split.runs, *rest])
        else:
            self._read_runs(job, blob, split.runs)
            units = self.rank.units
            small = [expand_blocks(blocks[split.rest], units.units_per_block) for blocks in (theirs, ours)]
            self.rank.reader.fetch(job, blob, Wanted(small[0], 0, small[1], units.whole))
        return int(theirs.size) * blob.block_bytes

    def _read_runs(self, job: Job, blob: RankBlob, runs: Sequence[Run]) -> None:
        endpoint = self.rank.endpoint
        assert endpoint.pool is not None
        for theirs, ours, sizes in cut_runs(runs, blob.block_bytes):
            job.check()
            endpoint.read(
                blob, (endpoint.pool, ours), (blob.pool, theirs), sizes, deadline=job.deadline, check=job.check
            )


def cut_runs(runs: Sequence[Run], block_bytes: int) -> list[Post]:
    """Runs of blocks as posts of about POST_BYTES."""
    pieces: list[tuple[int, int, int]] = []
    for run in runs:
        size = run.num_blocks * block_bytes
        for offset in range(0, size, POST_BYTES):
            source, destination = run.source * block_bytes + offset, run.destination * block_bytes + offset
            pieces.append((source, destination, min(POST_BYTES, size - offset)))
    if not pieces:
        return []
    table = np.asarray(pieces, dtype=np.int64)
    posts = (np.cumsum(table[:, 2]) - 1) // POST_BYTES
    cuts = np.flatnonzero(np.diff(posts)) + 1
    return [(batch[:, 0], batch[:, 1], batch[:, 2]) for batch in np.split(table, cuts)]


def _within(start: int, stop: int, block_size: int) -> tuple[int, int]:
    """Tokens [start, stop) as counted from the block that holds the first of them."""
    first = start // block_size * block_size
    return start - first, stop - first
