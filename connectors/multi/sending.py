"""Hand-offs from an engine with several connectors: tracks when all connectors that send a hand-off have ended."""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pdkv.connectors.base import BlockHold, TransferKey, TransferOutcome

MAX_EARLY_FAILURES = 1024
"""Failures of hand-offs, unknown as yet or forgotten, that are remembered."""


@dataclass(slots=True)
class _Sending:
    """A hand-off: the children that will report its end, and the reports so far."""

    waiting: set[int]
    tells_failure: bool
    outcome: TransferOutcome


def _merge(first: TransferOutcome, second: TransferOutcome) -> TransferOutcome:
    """The outcome of both: bytes add up, times overlap, the first error stays."""
    return TransferOutcome(
        first.code or second.code, first.num_bytes + second.num_bytes, max(first.seconds, second.seconds)
    )


class SendingTable:
    """Tracks hand-offs. One has been sent, or has failed, once all children that send it have ended."""

    def __init__(self) -> None:
        self._sendings: dict[TransferKey, _Sending] = {}
        self._early: OrderedDict[TransferKey, dict[int, TransferOutcome]] = OrderedDict()
        self._holds: dict[TransferKey, TransferKey] = {}  # a hold's tagged key -> the transfer that it belongs to
        self._ended: dict[TransferKey, TransferOutcome] = {}

    def __len__(self) -> int:
        return len(self._sendings)

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` has something that no result will announce."""
        return bool(self._ended)

    def add_holds(self, holds: Iterable[BlockHold]) -> None:
        """Add the engine's holds, under their tagged keys."""
        self._holds.update((hold.key, hold.owner) for hold in holds)

    def end_hold(self, tagged: TransferKey) -> TransferKey | None:
        """The transfer that an ended hold belonged to; None: it is not a hold."""
        return self._holds.pop(tagged, None)

    def begin(self, key: TransferKey, children: Collection[int], *, tells_failure: bool) -> None:
        """Begin a hand-off, the end of which these children will report.

        Args:
            tells_failure: False: other children hand the KV off, too, so the reader need only know that no more will
                come.
        """
        sending = _Sending(set(children), tells_failure, TransferOutcome())
        early = self._early.pop(key, {})
        if not sending.waiting:
            return
        self._sendings[key] = sending
        for child, outcome in early.items():
            self.end(key, child, outcome)

    def begin_again(self, key: TransferKey, child: int) -> None:
        """Let one child send the hand-off again, to another reader; an earlier failure to reach the first reader does
        not count.
        """
        sending = self._sendings.setdefault(key, _Sending(set(), True, TransferOutcome()))
        sending.waiting.add(child)
        sending.outcome = sending.outcome._replace(code="")

    def end(self, key: TransferKey, child: int, outcome: TransferOutcome) -> None:
        """End a child's part of a hand-off."""
        sending = self._sendings.get(key)
        if sending is None:
            if outcome.code:
                self._early.setdefault(key, {})[child] = outcome
                if len(self._early) > MAX_EARLY_FAILURES:
                    self._early.popitem(last=False)
            return
        if child not in sending.waiting:
            return
        sending.waiting.remove(child)
        sending.outcome = _merge(sending.outcome, outcome)
        if not sending.waiting:
            del self._sendings[key]
            self._ended[key] = sending.outcome if sending.tells_failure else sending.outcome._replace(code="")

    def forget(self, key: TransferKey) -> None:
        """Forget a hand-off that was released or given up."""
        self._sendings.pop(key, None)
        self._early.pop(key, None)
        self._ended.pop(key, None)

    def take_ended(self) -> dict[TransferKey, TransferOutcome]:
        """Hand-offs that all children have ended since the last call."""
        ended, self._ended = self._ended, {}
        return ended
