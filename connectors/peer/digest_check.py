"""Compares a load's digests at the source, which may not be finished yet, with those of the landed data."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pdkv.base.clock import MONOTONIC
from pdkv.connectors.peer.checksums import Checksums
from pdkv.connectors.peer.pull_piece import PullPiece
from pdkv.connectors.transfer.digest import Tokens
from pdkv.connectors.transfer.digest_table import DigestRows
from pdkv.connectors.transfer.planning import Ids, as_ids
from pdkv.connectors.transfer.worker import Job
from pdkv.errors import TransferTimeout
from pdkv.kernels.digest import Digests
from pdkv.wire.kv import KVLayout

_LOOK_S = 0.0005
"""Seconds between polls of the source's table, since changes in another process's memory are not announced."""


class Landed(NamedTuple):
    """Tokens of this rank's pool, and their digests, (n, heads of the piece)."""

    tokens: Tokens
    digests: Digests


class DigestCheck:
    """The check of one piece.

    Args:
        layout: the layout of this rank's pool.
        read: reads from the source's table the digests of its units in these generations, for all heads of that rank.
        check_generations: raises StaleGeneration if the source's blocks are no longer what was promised.
    """

    def __init__(
        self,
        piece: PullPiece,
        layout: KVLayout,
        read: Callable[[Ids, Ids], DigestRows],
        check_generations: Callable[[], None],
    ) -> None:
        own, _ = piece.digested(piece.load.block_ids, layout.block_size)
        theirs, entries = piece.digested(piece.load.source, piece.load.unit)
        self._piece = piece
        self._read = read
        self._check_generations = check_generations
        self._units = theirs.units
        self._generations = as_ids(piece.load.generations)[entries]
        self.tokens = Tokens(own.units, np.zeros_like(own.counts), own.skipped + own.counts)
        """Tokens with digests made as they land: a source has seldom digested more of a hash block by then."""

    def compare(self, job: Job, landed: Digests, make: Callable[[Tokens], Digests], checksums: Checksums) -> Landed:
        """After the data has arrived, compare the content of this rank's blocks with the source's digests, once the
        source has all of them.

        Args:
            landed: digests of `tokens`, (n, heads of the piece).
            make: makes digests of the content of this rank's blocks.

        Returns:
            The digested tokens, and their digests.

        Raises:
            StaleGeneration: the source has reused a block.
            KVCorrupted: the content differs.
            TransferTimeout: the source had no digests by the job's deadline.
            TransferError: its table cannot be read, or the job must stop.
        """
        rows, tokens = self._await_source(job), self.tokens
        more = np.flatnonzero(rows.counts != tokens.counts)
        if more.size:  # a cell's digest covers all of its tokens
            tokens, landed = tokens._replace(counts=rows.counts), landed.copy()
            landed[more] = make(tokens.at(more))
        load, heads = self._piece.load, self._piece.heads
        theirs = rows.digests[:, heads.peer_first : heads.peer_first + heads.num_heads]
        wrong = np.flatnonzero((landed != theirs).any(axis=1))
        if wrong.size:
            text = (
                f"{wrong.size} of {len(landed)} hash blocks of tokens [{load.start}, {load.stop}) differ from the "
                f"source's; the first is number {wrong[0]}: hash block {self._units[wrong[0]]} of the source's pool, "
                f"{tokens.units[wrong[0]]} of this one"
            )
            checksums.report(text, load.key, load.engine)
        return Landed(tokens, landed)

    def _await_source(self, job: Job) -> DigestRows:
        """The source's digests, once it has all that are wanted. Raises the same as `compare`.

        A hand-off is faster than the digest of its last tokens, by a whole step where the source queues steps.
        """
        while (missing := (rows := self._read(self._units, self._generations)).counts < self.tokens.counts).any():
            try:
                job.check()
            except TransferTimeout:
                load = self._piece.load
                text = f"engine {load.engine} has no digests of {missing.sum()} of {missing.size} hash blocks"
                raise TransferTimeout(text, key=load.key) from None
            self._check_generations()  # others will never have any
            MONOTONIC.sleep(_LOOK_S)
        return rows
