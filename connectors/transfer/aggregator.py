"""Joins the transfer results of an engine's ranks: a transfer has ended when every rank has released its blocks."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from pdkv.connectors.base import NO_TRANSFERS, TransferKey, TransferOutcome, TransferResults
from pdkv.errors import KVCorrupted


class _Ended(NamedTuple):
    """One rank's end of a transfer."""

    outcome: TransferOutcome
    failed: bool


def _merged(ends: Collection[_Ended]) -> TransferOutcome:
    """The outcome of all ranks together, from their ends in order."""
    outcomes = [end.outcome for end in ends]
    failed = [end.outcome for end in ends if end.failed]
    codes = [outcome.code for outcome in failed]
    return TransferOutcome(
        code=KVCorrupted.code if KVCorrupted.code in codes else next(iter(codes), ""),
        num_bytes=sum(outcome.num_bytes for outcome in outcomes),
        seconds=max(outcome.seconds for outcome in outcomes),
        num_tokens=min((outcome.num_tokens for outcome in failed), default=0),
        num_damaged=sum(outcome.num_damaged for outcome in outcomes),
        notes=tuple(note for outcome in outcomes for note in outcome.notes),
        num_expired=sum(outcome.num_expired for outcome in outcomes),
        ends_at=min((outcome.ends_at for outcome in outcomes if outcome.ends_at), default=0),
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
        self._pending: tuple[dict[TransferKey, dict[int, _Ended]], ...] = ({}, {})  # by rank; sent, received
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
                    ends = self._add(rank, which, key, _Ended(outcome, which % 2 == 1))
                    if ends:
                        ended[which // 2 * 2 + any(end.failed for end in ends)][key] = _merged(ends)
        return TransferResults(*ended) if any(ended) else NO_TRANSFERS

    def _add(self, rank: int, which: int, key: TransferKey, end: _Ended) -> Collection[_Ended]:
        """The ends of all ranks, if this one was the last. `which`: which map of TransferResults."""
        pending = self._pending[which // 2]
        ends = pending.setdefault(key, {})
        if rank in ends:
            self.num_repeated += 1
            return ()
        ends[rank] = end
        return pending.pop(key).values() if len(ends) == self._num_ranks else ()
