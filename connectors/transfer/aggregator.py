"""Joins the transfer results of an engine's ranks: a transfer has ended when every rank has let go of its blocks."""

from collections.abc import Iterable, Mapping
from sys import maxsize
from typing import NamedTuple

from pdkv.connectors.base import NO_TRANSFERS, TransferKey, TransferOutcome, TransferResults
from pdkv.errors import KVCorrupted


class _Pending:
    """A transfer that some ranks have ended and others have not."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.failed = False
        self.code = ""
        self.num_bytes = 0
        self.seconds = 0.0
        self.num_tokens = maxsize  # where no rank failed
        self.num_damaged = 0

    def add(self, rank: int, outcome: TransferOutcome, *, failed: bool) -> None:
        self.ranks.add(rank)
        if failed and (not self.failed or outcome.code == KVCorrupted.code):
            self.failed, self.code = True, outcome.code
        if failed:
            self.num_tokens = min(self.num_tokens, outcome.num_tokens)
        self.num_bytes += outcome.num_bytes
        self.seconds = max(self.seconds, outcome.seconds)
        self.num_damaged += outcome.num_damaged

    @property
    def outcome(self) -> TransferOutcome:
        """The outcome of all ranks together."""
        num_tokens = self.num_tokens if self.failed else 0
        return TransferOutcome(self.code, self.num_bytes, self.seconds, num_tokens, self.num_damaged)


class _Ended(NamedTuple):
    """Transfers of one direction that all ranks have ended."""

    finished: dict[TransferKey, TransferOutcome]
    failed: dict[TransferKey, TransferOutcome]


class TransferAggregator:
    """Collects per-rank results. Every rank ends every transfer exactly once, also one that it had no part in.

    A transfer has finished when all ranks finished it. It has failed when all ended it and one failed: until then the
    others may still touch its blocks. The code is that of the one that failed first, or KVCorrupted's, which is why a
    peer gives the others up. Bytes and damaged values are summed; the slowest rank gives the seconds, the one with the
    fewest first tokens gives those of a failed load.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._sending: dict[TransferKey, _Pending] = {}
        self._receiving: dict[TransferKey, _Pending] = {}
        self.num_repeated = 0  # what a rank said twice of a transfer that others have not ended

    @property
    def num_pending(self) -> int:
        """Transfers that some ranks have ended and some have not."""
        return len(self._sending) + len(self._receiving)

    def add(self, by_rank: Iterable[TransferResults]) -> TransferResults:
        """Take one step's results, rank 0's first; returns the transfers that have ended on all ranks by now."""
        sending, receiving = _Ended({}, {}), _Ended({}, {})
        for rank, results in enumerate(by_rank):
            if results:
                self._add(self._sending, rank, results.finished_sending, sending, failed=False)
                self._add(self._sending, rank, results.failed_sending, sending, failed=True)
                self._add(self._receiving, rank, results.finished_receiving, receiving, failed=False)
                self._add(self._receiving, rank, results.failed_receiving, receiving, failed=True)
        if not any((*sending, *receiving)):
            return NO_TRANSFERS
        return TransferResults(*sending, *receiving)

    def _add(
        self,
        pending: dict[TransferKey, _Pending],
        rank: int,
        outcomes: Mapping[TransferKey, TransferOutcome],
        ended: _Ended,
        *,
        failed: bool,
    ) -> None:
        for key, outcome in outcomes.items():
            entry = pending.setdefault(key, _Pending())
            if rank in entry.ranks:
                self.num_repeated += 1
                continue
            entry.add(rank, outcome, failed=failed)
            if len(entry.ranks) == self._num_ranks:
                del pending[key]
                target = ended.failed if entry.failed else ended.finished
                target[key] = entry.outcome
