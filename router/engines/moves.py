"""Takes requests off engines that are suspects: a few at a time, and only where there is room. No clock, no socket."""

import heapq
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

from pdkv.router.engines.fleet import EngineState, Fleet
from pdkv.router.engines.health import TICK_S
from pdkv.router.generations.generation import Generation

MOVED_SHARE, MIN_MOVES_PER_S = 0.1, 10.0
"""Share of all running requests that may be moved in a second, and how many may be moved where those are few."""

MAX_TRIES = 64
"""Requests that are looked at closely in one tick."""


class Move(Protocol):
    """`Dispatcher.move`."""

    def __call__(self, generation: Generation, reason: str, *, away_from: str) -> bool:
        """Take a generation off an engine and go on on another one. False: it stays where it is."""


class Mover:
    """Looks once per tick for requests that depend on suspects."""

    def __init__(self, fleet: Fleet, move: Move) -> None:
        self.num_moved = 0
        self._fleet = fleet
        self._move = move
        self._allowance = MIN_MOVES_PER_S
        self._staying: set[str] = set()  # requests that could not be moved off these suspects

    def tick(self, suspects: Mapping[str, str], generations: Collection[Generation]) -> None:
        """TICK_S have passed. Of the requests that depend on suspects those go first whose deadlines are nearest.

        `suspects`: engine -> why. `generations`: all that have not ended.
        """
        rate = max(MOVED_SHARE * len(generations), MIN_MOVES_PER_S)
        self._allowance = min(self._allowance + rate * TICK_S, rate)
        if not suspects:
            self._staying.clear()
            return
        takers = [e for e in self._fleet.engines.values() if e.life == "ready" and not e.draining]
        rooms = [_Room(e) for e in takers if e.name not in suspects]
        if rooms and self._allowance >= 1.0:
            stuck = (s for g in generations if (s := _find_stuck(g, suspects)) and g.request_id not in self._staying)
            for item in heapq.nsmallest(MAX_TRIES, stuck):
                self._try(item, suspects[item.engine], rooms)

    def _try(self, stuck: "_Stuck", reason: str, rooms: Iterable["_Room"]) -> None:
        room = _find_room(rooms, self._fleet.engines[stuck.engine].role, stuck.generation)
        if room is None or self._allowance < 1.0:
            return
        if self._move(stuck.generation, reason, away_from=stuck.engine):
            room.take(stuck.generation)
            self._allowance -= 1.0
            self.num_moved += 1
        else:
            self._staying.add(stuck.request_id)


class _Stuck(NamedTuple):
    """A request that cannot go on without a suspect; the nearest deadline is the smallest."""

    deadline: float
    request_id: str
    engine: str
    generation: Generation


def _find_stuck(generation: Generation, suspects: Collection[str]) -> _Stuck | None:
    """Of two suspects the one that decodes."""
    flow = generation.flow
    for name in (flow.route.decode, flow.route.prefill):
        if name in suspects and flow.depends_on(name) and not flow.request.probe:
            return _Stuck(flow.deadline, generation.request_id, name, generation)
    return None


class _Room:
    """Blocks that an engine can give, less those that this tick has promised."""

    def __init__(self, engine: EngineState) -> None:
        self.role = engine.role
        self.block_size = engine.card.layout.block_size if engine.card is not None else 1
        self.num_free = engine.blocks.free + engine.blocks.cached

    def needs(self, generation: Generation) -> int:
        """Blocks for what the request has, and one to go on in."""
        flow = generation.flow
        return (len(flow.request.prompt_token_ids) + len(flow.output_token_ids)) // self.block_size + 2

    def take(self, generation: Generation) -> None:
        """The request may come here."""
        self.num_free -= self.needs(generation)


def _find_room(rooms: Iterable[_Room], role: str, generation: Generation) -> _Room | None:
    """The engine of that role with most room, if it is enough for the request."""
    fitting = [room for room in rooms if room.role in (role, "any") and room.num_free >= room.needs(generation)]
    return max(fitting, key=lambda room: room.num_free, default=None)
