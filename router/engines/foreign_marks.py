"""What other routers say of engines: they pass them over, too, while the word is fresh. No clock, no socket."""

from collections.abc import Iterable

from pdkv.wire.messages import EngineCard

Incarnation = tuple[str, str]
"""(name, epoch) of an engine: names are the same in every launch, epochs are not."""

Subject = tuple[Incarnation, ...]
"""An engine, or a (prefill, decode) pair."""

MAX_SUBJECTS = 4096


class ForeignMarks:
    """Marks of other routers; each ends by itself unless it is told again."""

    def __init__(self, ticks: int) -> None:
        """A mark lasts for so many ticks."""
        self._ticks = ticks
        self._left: dict[Subject, int] = {}

    def hear(self, subject: Subject, reason: str) -> None:
        """Another router marks it; with an empty reason it does no longer."""
        self._left.pop(subject, None)
        if reason and len(self._left) < MAX_SUBJECTS:
            self._left[subject] = self._ticks

    def tick(self) -> None:
        """Time passes."""
        if self._left:
            self._left = {subject: left - 1 for subject, left in self._left.items() if left > 1}

    def engines(self, cards: Iterable[EngineCard]) -> frozenset[str]:
        """Names of those of these engines that are marked."""
        if not self._left:
            return frozenset()
        return frozenset(card.engine for card in cards if ((card.engine, card.epoch),) in self._left)

    def pairs(self, cards: Iterable[EngineCard]) -> frozenset[tuple[str, str]]:
        """Pairs of these engines that are marked, by name."""
        if not self._left:
            return frozenset()
        live = {(card.engine, card.epoch) for card in cards}
        return frozenset((s[0][0], s[1][0]) for s in self._left if len(s) == 2 and live.issuperset(s))
