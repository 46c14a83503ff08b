"""The worker side of every pull: a transport reads the peer's blocks, then their generations are compared.

Each rank reads the heads that it needs from each rank of the peer that holds some of them. The generations are compared
*after* the data was read: data of reused blocks is refused, never used.
"""

from abc import abstractmethod
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from pdkv.connectors.base import KVConnectorMetadata
from pdkv.connectors.peer.checksums import Checksums
from pdkv.connectors.peer.digest_check import DigestCheck
from pdkv.connectors.peer.pull_piece import PullPiece as PullPiece
from pdkv.connectors.peer.pull_scheduler import BlockLoad, PullMetadata
from pdkv.connectors.peer.source_digests import SourceDigests
from pdkv.connectors.peer.worker import PeerWorker
from pdkv.connectors.step_done import ON_HOST, StepDone
from pdkv.connectors.transfer.digest import Tokens
from pdkv.connectors.transfer.digest_table import DigestRows
from pdkv.connectors.transfer.planning import Bytes, Ids, as_ids, reader_parts
from pdkv.connectors.transfer.pool_copy import copy_pieces, unit_pieces
from pdkv.connectors.transfer.worker import Job, Task
from pdkv.errors import KVNotFound, PdkvError, StaleGeneration
from pdkv.kernels.digest import Digests


class Landed(NamedTuple):
    """The data that a `read` has put into own blocks."""

    num_bytes: int
    digests: Digests | None = None  # (n, heads of the piece), if they were made on the way


class PullWorker(PeerWorker):
    """Worker side above a transport: one job per load and peer rank, in that rank's lane.

    A transport implements reading a piece (`read`) and the generations of a peer's blocks (`generations`). One that
    `carries_digests` has `checksums` and `source_digests`, from `register_kv_caches` on, and `read_digests`.
    """

    metadata_type = PullMetadata
    carries_digests: ClassVar[bool] = False
    checksums: Checksums
    source_digests: SourceDigests | None = None

    @abstractmethod
    def read(self, job: Job, piece: PullPiece, scratch: Any) -> int:
        """Read a piece into the own pool, on an I/O thread. Returns the bytes; raises a TransferError."""

    @abstractmethod
    def generations(self, job: Job, piece: PullPiece, blocks: Ids, scratch: Any) -> Ids:
        """The peer's current generations of `blocks`, read after everything that `read` has read."""

    def read_digests(self, job: Job, piece: PullPiece, scratch: Any, units: Ids, generations: Ids) -> DigestRows:
        """The digests in the peer rank's table for its hash blocks `units` in these generations, of all its heads.

        Only called if `carries_digests`.
        """
        raise NotImplementedError

    def read_digested(self, job: Job, piece: PullPiece, scratch: Any, tokens: Tokens) -> Landed:
        """As `read`, for whole hash blocks of the own pool, with digests of their `tokens`."""
        return Landed(self.read(job, piece, scratch))

    def copy_digested(self, job: Job, piece: PullPiece, source: Bytes, tokens: Tokens) -> Landed:
        """An implementation of `read_digested` for a mapped peer's pool, (blocks, bytes): one pass over the bytes.

        Raises:
            TransferError: the job must stop.
        """
        layout, pool, source = self.config.layout, self.checksums.pool, source.reshape(-1)
        theirs = piece.digested(piece.load.source, piece.load.unit)[0].units
        cut = partial(unit_pieces, layout, piece.card.layout, theirs, piece.heads.peer_first, tokens.units)
        part, whole = piece.digested_part(layout), piece.own_part(layout)
        pieces = cut(part)
        digests = pool.copy(tokens, part, source, pieces, job.check)
        if whole == part:
            return Landed(pieces.num_bytes, digests)
        rest = cut(whole._replace(layer_start=part.layer_stop))
        assert pool.flat is not None
        copy_pieces(pool.flat, source, rest)
        return Landed(pieces.num_bytes + rest.num_bytes, digests)

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        if isinstance(meta, PullMetadata):
            if meta.digests and self.source_digests is not None:
                self.source_digests.put(meta.digests, meta.earlier_steps or ON_HOST)
            for load in meta.loads:
                self._start(load, meta.earlier_steps or ON_HOST)

    def run_job(self, job: Job, scratch: Any) -> int | None:
        """Read, then check that nothing was reused in the meantime. Returns the bytes read.

        Raises:
            KVNotFound: the load names blocks that the peer cannot have.
            StaleGeneration: the peer has reused a block.
            TransferTimeout: the step that last used the own blocks does not end.
            KVCorrupted: the own blocks' content differs from the peer's.
            TransferError: raised by `read`, `generations` and `Job.check`.
        """
        piece: PullPiece = job.order
        blocks = piece.blocks
        num_known = as_ids(piece.load.generations).size
        if not blocks.size or blocks.size != num_known or blocks.min() < 0 or blocks.max() >= piece.card.num_blocks:
            raise KVNotFound(f"engine {piece.load.engine} has no such blocks")
        piece.after.wait(job.remaining_s())
        check_generations = partial(self.check_generations, job, piece, scratch)
        if self._is_checked(piece):
            read = partial(self.read_digests, job, piece, scratch)
            check = DigestCheck(piece, self.config.layout, read, check_generations)
            landed = self.read_digested(job, piece, scratch, check.tokens)
            check_generations()
            self._compare(job, piece, check, landed.digests)
        else:
            landed = Landed(self.read(job, piece, scratch))
            check_generations()
        job.check()
        return landed.num_bytes

    def shutdown(self) -> None:
        super().shutdown()
        if self.source_digests is not None:
            self.source_digests.close()
            self.checksums.close()  # its view of the pool keeps an arena mapped
        self.source_digests = None

    def _compare(self, job: Job, piece: PullPiece, check: DigestCheck, digests: Digests | None) -> None:
        """Compare landed data with the source. If it is all of a rank's heads, the digests become its blocks' own."""
        make = partial(self.checksums.pool.digests, part=piece.digested_part(self.config.layout))
        digests = make(check.tokens) if digests is None else digests
        tokens, digests = check.compare(job, digests, make, self.checksums)
        own, load = self.source_digests, piece.load
        if own is not None and load.own_generations and digests.shape[1] == self.config.layout.num_kv_heads:
            blocks = piece.digested(load.block_ids, self.config.layout.block_size)[1]
            own.table.write(tokens.units, as_ids(load.own_generations)[blocks], tokens.counts, digests)

    def _is_checked(self, piece: PullPiece) -> bool:
        """Whether both ends have digests of the load; for KV found by content, a sampling source has none."""
        load, theirs = piece.load, piece.card.kv_checksum
        if not self.carries_digests:
            return False
        if not load.is_handoff and "sample" in (self.config.kv_checksum, theirs):
            return False
        return self.checksums.are_wanted(theirs, load.key.transfer_id)

    def check_generations(self, job: Job, piece: PullPiece, scratch: Any) -> None:
        """Compare the peer's generations with the promised ones.

        Raises:
            StaleGeneration: it has reused a block.
        """
        load, blocks = piece.load, piece.blocks
        stale = np.flatnonzero(self.generations(job, piece, blocks, scratch) != as_ids(load.generations))
        if stale.size:
            raise StaleGeneration(
                f"engine {load.engine} reused {stale.size} of {blocks.size} blocks, the first {blocks[stale[0]]}",
                key=load.key,
            )

    def _start(self, load: BlockLoad, after: StepDone) -> None:
        """Queue one job per rank of the peer that has data for this one."""
        try:
            if not load.source:
                raise KVNotFound("no engine has the blocks")
            card = self.peers.card(load.engine, load.epoch)
            heads = self.config.layout.kv_heads_of_all_ranks
            parts = reader_parts(self.config.rank, self.config.tp, card.tp, heads)
        except PdkvError as error:
            if load.continues:
                self.drop(load.key, "receive")
            else:
                self.refuse(load.key, "receive", error.code)
            return
        number = next(self._load_numbers)
        tasks = [
            Task(PullPiece(load, card, part, after), lane=self.lane_of(load.engine, load.epoch, part.peer_rank, number))
            for part in parts
        ]
        self.submit(load.key, "receive", tasks, last=not load.more, continues=load.continues)
