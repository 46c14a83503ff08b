"""The worker side of every pull: a transport reads the peer's blocks, then their generations are compared.

Each rank reads the heads that it needs from each rank of the peer that holds some of them. The generations are compared
*after* the data was read: what the peer reused meanwhile is refused, never used.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pdkv.connectors.base import KVConnectorMetadata
from pdkv.connectors.peer.pull_scheduler import BlockLoad, PullMetadata
from pdkv.connectors.peer.worker import PeerWorker
from pdkv.connectors.transfer.planning import HeadPart, Ids, as_ids, reader_parts, unit_index
from pdkv.connectors.transfer.units import UnitPart
from pdkv.connectors.transfer.worker import Job, Task
from pdkv.errors import KVNotFound, PdkvError, StaleGeneration
from pdkv.wire.messages import EngineCard, KVLayout


class PullPiece(NamedTuple):
    """What one job reads: some heads of a load, from one rank of the peer."""

    load: BlockLoad
    card: EngineCard
    heads: HeadPart

    @property
    def blocks(self) -> Ids:
        """(len(load.source),): the peer's block of each source entry."""
        return as_ids(self.load.source) // (self.card.layout.block_size // self.load.unit)

    def source_units(self) -> Ids:
        """The peer's units that the tokens lie in, in their order: see `UnitPool`.

        Raises:
            KVNotFound: they are no whole units of the blocks that are named.
        """
        return _units(self.load.source, self.load.unit, self.load)

    def own_units(self, layout: KVLayout) -> Ids:
        """This rank's units for the same tokens. Raises KVNotFound as `source_units`."""
        return _units(self.load.block_ids, layout.block_size, self.load)

    def own_part(self, layout: KVLayout) -> UnitPart:
        """All layers of the piece's heads, as this rank counts them; what the peer calls `peer_part`."""
        return UnitPart(self.heads.first, self.heads.first + self.heads.num_heads, 0, layout.num_layers)

    def peer_part(self, layout: KVLayout) -> UnitPart:
        """The same heads as the peer's rank counts them; an image of a unit has the same bytes on both sides."""
        return UnitPart(self.heads.peer_first, self.heads.peer_first + self.heads.num_heads, 0, layout.num_layers)


class PullWorker(PeerWorker):
    """Worker side above a transport: one job per load and peer rank, in that rank's lane.

    A transport says how a piece is read (`read`) and how the generations of a peer's blocks are (`generations`).
    """

    @abstractmethod
    def read(self, job: Job, piece: PullPiece, scratch: Any) -> int:
        """Read a piece into the own pool, on an I/O thread. Returns the bytes; raises a TransferError."""

    @abstractmethod
    def generations(self, job: Job, piece: PullPiece, blocks: Ids, scratch: Any) -> Ids:
        """The peer's generations of `blocks` now, read after everything that `read` has read."""

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        if isinstance(meta, PullMetadata):
            for load in meta.loads:
                self._start(load)

    def run_job(self, job: Job, scratch: Any) -> int | None:
        """Read, then check that nothing was reused meanwhile. Returns the bytes read.

        Raises:
            KVNotFound: the load names blocks that the peer cannot have.
            StaleGeneration: the peer has reused a block.
            TransferError: what `read` and `generations` raise, and `Job.check`.
        """
        piece: PullPiece = job.order
        blocks = piece.blocks
        num_known = len(piece.load.generations)
        if not blocks.size or blocks.size != num_known or blocks.min() < 0 or blocks.max() >= piece.card.num_blocks:
            raise KVNotFound(f"engine {piece.load.engine} has no such blocks")
        num_bytes = self.read(job, piece, scratch)
        self.check_generations(job, piece, scratch)
        job.check()
        return num_bytes

    def check_generations(self, job: Job, piece: PullPiece, scratch: Any) -> None:
        """Compare the peer's generations with those that were promised.

        Raises:
            StaleGeneration: it has reused a block.
        """
        load, blocks = piece.load, piece.blocks
        stale = np.flatnonzero(self.generations(job, piece, blocks, scratch) != as_ids(load.generations))
        if stale.size:
            raise StaleGeneration(
                f"engine {load.engine} reused {stale.size} of {blocks.size} blocks, the first {blocks[stale[0]]}",
                transfer_id=load.key[0],
                attempt=load.key[1],
            )

    def _start(self, load: BlockLoad) -> None:
        """One job per rank of the peer that has something for this one."""
        try:
            if not load.source:
                raise KVNotFound("no engine was found to have the blocks")
            card = self.peers.card(load.engine, load.epoch)
            heads = self.config.layout.kv_heads_of_all_ranks
            parts = reader_parts(self.config.rank, self.config.tp, card.tp, heads)
        except PdkvError as error:
            self.refuse(load.key, "receive", error.code)
            return
        tasks = [
            Task(PullPiece(load, card, part), lane=self.lane_of(load.engine, load.epoch, part.peer_rank))
            for part in parts
        ]
        self.submit(load.key, "receive", tasks)


def _units(entries: Sequence[int], entry_tokens: int, load: BlockLoad) -> Ids:
    """Units of a load's tokens; `entries` have `entry_tokens` tokens each, and the first one holds token `start`."""
    first = load.start // entry_tokens * entry_tokens
    try:
        return unit_index(entries, entry_tokens, load.start - first, load.stop - first)
    except ValueError as error:
        raise KVNotFound(str(error), transfer_id=load.key[0], attempt=load.key[1]) from None
