"""What the ready engines have yet to be told of each other: cards of those that came, names of those that went."""

from collections.abc import Callable

from pdkv.wire.kv import EngineCard
from pdkv.wire.messages import Peers

MAX_CHANGES = 4096
"""Changes after which those are dropped that all engines have been told."""


class PeerNews:
    """The changes of the fleet in order, and how many of them each engine has been told. No socket, no clock.

    Engines that have been told equally much get one and the same message, which is made once.
    """

    def __init__(self, cards: Callable[[], list[EngineCard]]) -> None:
        """`cards`: of the engines that are ready now."""
        self._cards = cards
        self._changed: list[str] = []  # names
        self._told: dict[str, int] = {}  # by engine: its place in `_changed`; -1: it has been told nothing
        self.behind: dict[str, None] = {}  # engines that have yet to be told something, in turn
        self._made: dict[int, Peers] = {}  # by such a place, as long as nothing changes
        self._by_name: dict[str, EngineCard] = {}

    def came_up(self, card: EngineCard) -> None:
        """An incarnation is ready."""
        self._told[card.engine] = -1
        self._change(card.engine)

    def went_down(self, engine: str) -> None:
        """An engine is gone."""
        del self._told[engine]
        self.behind.pop(engine, None)
        self._change(engine)

    def take(self, engine: str) -> Peers:
        """What to tell an engine that is behind; it counts as told."""
        del self.behind[engine]
        if not self._made:
            self._by_name = {card.engine: card for card in self._cards()}
        place = self._told[engine] if self._by_name[engine].peer_changes else -1
        self._told[engine] = len(self._changed)
        if place not in self._made:
            self._made[place] = self._make(set(self._changed[place:]) if place >= 0 else None)
        return self._made[place]

    def _make(self, changed: set[str] | None) -> Peers:
        if changed is None:
            return Peers(list(self._by_name.values()))
        cards = [self._by_name[name] for name in changed if name in self._by_name]
        return Peers(cards, removed=[name for name in changed if name not in self._by_name])

    def _change(self, engine: str) -> None:
        self._made.clear()
        if len(self._changed) >= MAX_CHANGES:
            least = min((place for place in self._told.values() if place >= 0), default=len(self._changed))
            del self._changed[:least]
            self._told = {name: max(place - least, -1) for name, place in self._told.items()}
        self._changed.append(engine)
        self.behind.update(dict.fromkeys(self._told))
