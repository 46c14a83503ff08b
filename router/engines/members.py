"""The ready engines that can be one side of a request: the least loaded first, and what all of them can hold."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Set
from itertools import count

from pdkv.router.engines.candidate import Side
from pdkv.router.engines.state import EngineState, Versions

FEW = 16
"""Engines of a large fleet that a policy is shown for their little load, and as many for what they have of a prompt."""


class Members:
    """Engines by name, draining ones included. What is kept costs each change the same, however many there are."""

    def __init__(self, side: Side) -> None:
        self.engines: dict[str, EngineState] = {}  # those that are ready
        self.versions: Counter[Versions] = Counter()  # of the connectors' wire formats
        self.num_seqs = 0  # places in the batches of those that are not draining
        self.kv_tokens = 0  # KV that their pools hold
        self.with_slack: set[str] = set()  # those of them that report that they can take more than that
        self._side = side
        self._order: list[tuple[float, int, str]] = []  # (cost, number of its last change, name), not draining
        self._kept: dict[str, tuple[tuple[float, int, str], Versions, int, int]] = {}
        self._with_room: set[str] = set()
        self._numbers = count()
        self._changed: set[str] = set()  # engines with other work than in `_order`

    def __len__(self) -> int:
        return len(self.engines)

    def noticed(self, name: str) -> None:
        """The work of an engine has changed; nothing is done about it before the order is asked for."""
        self._changed.add(name)

    def put(self, engine: EngineState) -> None:
        """Add an engine, or look at it again."""
        self.drop(engine.name)
        if engine.life != "ready" or engine.card is None or engine.role not in (self._side, "any"):
            return
        num_seqs, kv_tokens = (0, 0) if engine.draining else (engine.card.max_num_seqs, engine.kv_capacity)
        self.engines[engine.name] = engine
        self._kept[engine.name] = self._place(engine), engine.versions, num_seqs, kv_tokens
        self.versions[engine.versions] += 1
        self.num_seqs += num_seqs
        self.kv_tokens += kv_tokens
        if engine.has_slack and not engine.draining:
            self.with_slack.add(engine.name)

    def drop(self, name: str) -> None:
        """Remove an engine. Idempotent."""
        if self.engines.pop(name, None) is None:
            return
        place, versions, num_seqs, kv_tokens = self._kept.pop(name)
        self._unplace(place)
        self.versions[versions] -= 1
        if not self.versions[versions]:
            del self.versions[versions]
        self.num_seqs -= num_seqs
        self.kv_tokens -= kv_tokens
        self.with_slack.discard(name)
        self._with_room.discard(name)

    @property
    def with_room(self) -> Set[str]:
        """Engines that may be given more prompt tokens."""
        self._sort()
        return self._with_room

    def by_load(self) -> Iterator[EngineState]:
        """The least loaded first; among equals those whose work changed longest ago. Draining ones are left out."""
        self._sort()
        return (self.engines[name] for _, _, name in self._order)

    def _sort(self) -> None:
        """Put the engines whose work has changed into their places."""
        for name in self._changed & self.engines.keys():
            old, versions, num_seqs, kv_tokens = self._kept[name]
            self._unplace(old)
            self._kept[name] = self._place(self.engines[name]), versions, num_seqs, kv_tokens
        self._changed.clear()

    def _place(self, engine: EngineState) -> tuple[float, int, str]:
        place = (engine.view(self._side).cost, next(self._numbers), engine.name)
        if not engine.draining:
            insort(self._order, place)
        (self._with_room.add if engine.has_room else self._with_room.discard)(engine.name)
        return place

    def _unplace(self, place: tuple[float, int, str]) -> None:
        at = bisect_left(self._order, place)
        if self._order[at : at + 1] == [place]:
            del self._order[at]

    def few(self, near: Collection[str], fits: Callable[[EngineState], bool]) -> list[EngineState]:
        """FEW of the least loaded that fit, and those of `near` that do."""
        found = {name: self.engines[name] for name in near if name in self.engines and fits(self.engines[name])}
        num_left = FEW
        for engine in self.by_load():
            if not num_left:
                break
            if fits(engine):
                found[engine.name] = engine
                num_left -= 1
        return list(found.values())
