"""Joins the transfer results of an engine's ranks: a transfer has ended when every rank has released its blocks."""

from collections.abc import Iterable
from sys import maxsize

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
        self.num_tokens = maxsize  # if no rank failed
        self.num_damaged = 0
        self.num_expired = 0
        self.ends_at = 0
        self.notes: tuple[bytes, ...] = ()

    def add(self, rank: int, outcome: TransferOutcome, *, failed: bool) -> None:
        self.ranks.add(rank)
        if failed and (not self.failed or outcome.code == KVCorrupted.code):
            self.failed, self.code = True, outcome.code
        if failed:
            self.num_tokens = min(self.num_tokens, outcome.num_tokens)
        self.num_bytes += outcome.num_bytes
        self.seconds = max(self.seconds, outcome.seconds)
        self.num_damaged += outcome.num_damaged
        self.num_expired += outcome.num_expired
        self.ends_at = min(filter(None, (self.ends_at, outcome.ends_at)), default=0)
        self.notes += outcome.notes

    @property
    def outcome(self) -> TransferOutcome:
        """The outcome of all ranks together."""
        num_tokens = self.num_tokens if self.failed else 0
        return TransferOutcome(
            self.code,
            self.num_bytes,
            self.seconds,
            num_tokens,
            self.num_damaged,
            self.notes,
            self.num_expired,
            self.ends_at,
        )


class TransferAggregator:
    """Collects per-rank results. Every rank ends every transfer exactly once, even one in which it took no part.

    A transfer has finished when all ranks finished it. It has failed when all ended it and one failed: until then the
    others may still touch its blocks. The code is that of the rank that failed first, or KVCorrupted's if any rank has
    it, since that is why a peer gives the others up. Bytes, damaged and expired values and notes are summed; the
    seconds are the slowest rank's, and a failed load's number of first tokens is the smallest of all ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._pending: tuple[dict[TransferKey, _Pending], ...] = ({}, {})  # sent, received
        self.num_repeated = 0  # repeated reports of transfers that other ranks have not ended

    @property
    def num_pending(self) -> int:
        """Number of transfers that some ranks have ended and some have not."""
        return sum(map(len, self._pending))

    def add(self, by_rank: Iterable[TransferResults]) -> TransferResults:
        """Take one step's results, rank 0's first; returns the transfers that have ended on all ranks by now."""
        ended: tuple[dict[TransferKey, TransferOutcome], ...] = ({}, {}, {}, {})  # as TransferResults has them
        for rank, results in enumerate(by_rank):
            for which, outcomes in enumerate(results if results else ()):
                for key, outcome in outcomes.items():
                    entry = self._add(rank, which, key, outcome)
                    if entry is not None:
                        ended[which // 2 * 2 + entry.failed][key] = entry.outcome
        return TransferResults(*ended) if any(ended) else NO_TRANSFERS

    def _add(self, rank: int, which: int, key: TransferKey, outcome: TransferOutcome) -> _Pending | None:
        """The reports of all ranks, if this one was the last. `which`: which map of TransferResults."""
        pending = self._pending[which // 2]
        entry = pending.setdefault(key, _Pending())
        if rank in entry.ranks:
            self.num_repeated += 1
            return None
        entry.add(rank, outcome, failed=which % 2 == 1)
        return pending.pop(key) if len(entry.ranks) == self._num_ranks else None
