"""A load's digests: those of the source, which may still be on their way, against those of what has landed."""

import threading
import time
from collections.abc import Callable

import numpy as np

from pdkv.connectors.peer.checksums import Checksums
from pdkv.connectors.peer.pull_piece import PullPiece
from pdkv.connectors.transfer.digest import Tokens
from pdkv.connectors.transfer.digest_table import DigestRows
from pdkv.connectors.transfer.planning import Ids, as_ids
from pdkv.connectors.transfer.worker import Job
from pdkv.kernels.digest import Digests
from pdkv.wire.messages import KVLayout

WAIT_S = 2.0
"""A hand-off may be faster than the digest of its last tokens, which is on its way when it leaves."""

_LOOK_S = 0.0005
"""Another process' memory tells nobody that it has changed."""


class DigestCheck:
    """Of one piece.

    Args:
        layout: of the own pool.
        read: what the source's table says of its units in these generations; digests of all heads of that rank.
    """

    def __init__(self, piece: PullPiece, layout: KVLayout, read: Callable[[Ids, Ids], DigestRows]) -> None:
        own, _ = piece.digested(piece.load.block_ids, layout.block_size)
        theirs, entries = piece.digested(piece.load.source, piece.load.unit)
        self._piece = piece
        self._read = read
        self._units = theirs.units
        self._generations = as_ids(piece.load.generations)[entries]
        self._least = own.skipped + own.counts
        self.tokens = own

    def await_source(self, job: Job, checksums: Checksums, check_generations: Callable[[], None]) -> None:
        """Return when the source has digests of all that is wanted; `tokens` says then what they are of.

        Raises:
            StaleGeneration: of `check_generations`: there will be none.
            KVCorrupted: it has not, and seems to make none.
            TransferError: its table cannot be read, or the job has to stop.
        """
        deadline, pause = time.monotonic() + WAIT_S, threading.Event()
        while (missing := (counts := self._read(self._units, self._generations).counts) < self._least).any():
            job.check()
            check_generations()
            if time.monotonic() >= deadline:
                text = f"engine {self._piece.load.engine} has no digest of {int(missing.sum())} hash blocks"
                checksums.report(text, self._piece.load.key, self._piece.load.engine)
            pause.wait(_LOOK_S)
        self.tokens = Tokens(self.tokens.units, np.zeros_like(counts), counts)

    def compare(self, landed: Digests, checksums: Checksums) -> None:
        """Compare with what the source says now, behind the data.

        Args:
            landed: of `tokens`, (n, heads of the piece).

        Raises:
            KVCorrupted: it is something else.
        """
        load, heads = self._piece.load, self._piece.heads
        rows = self._read(self._units, self._generations)
        theirs = rows.digests[:, heads.peer_first : heads.peer_first + heads.num_heads]
        wrong = np.flatnonzero((rows.counts != self.tokens.counts) | (landed != theirs).any(axis=1))
        if wrong.size:
            text = (
                f"{wrong.size} of {len(landed)} hash blocks of tokens [{load.start}, {load.stop}) are not what they "
                f"were there; the first is number {wrong[0]}: hash block {self._units[wrong[0]]} of the source's pool, "
                f"{self.tokens.units[wrong[0]]} of this one"
            )
            checksums.report(text, load.key, load.engine)
