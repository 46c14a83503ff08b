"""Takes requests off engines that are suspects: a few at a time, and only where there is room. No clock, no socket."""

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from pdkv.router.generation import Generation
from pdkv.router.health import TICK_S
from pdkv.router.state import EngineState, Fleet

MOVED_SHARE, MIN_MOVES_PER_S = 0.1, 10.0
"""Share of all running requests that may be moved in a second, and how many may be moved where those are few."""


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

    def tick(self, suspects: Mapping[str, str], generations: Collection[Generation]) -> None:
        """TICK_S have passed. Of the requests that depend on suspects those go first whose deadlines are nearest.

        `suspects`: engine -> why. `generations`: all that have not ended.
        """
        rate = max(MOVED_SHARE * len(generations), MIN_MOVES_PER_S)
        self._allowance = min(self._allowance + rate * TICK_S, rate)
        if not suspects:
            return
        stuck = [(g.flow.deadline, g.request_id, g) for g in generations if not g.flow.request.probe]
        takers = [e for e in self._fleet.engines.values() if e.life == "ready" and not e.draining]
        rooms = [_Room(e) for e in takers if e.name not in suspects]
        for _, _, generation in sorted(entry for entry in stuck if _stuck_on(entry[2], suspects)):
            if self._allowance < 1.0:
                return
            engine = _stuck_on(generation, suspects)
            assert engine is not None
            room = _find_room(rooms, self._fleet.engines[engine].role, generation)
            if room is not None and self._move(generation, suspects[engine], away_from=engine):
                room.take(generation)
                self._allowance -= 1.0
                self.num_moved += 1


def _stuck_on(generation: Generation, suspects: Iterable[str]) -> str | None:
    """The suspect that it cannot go on without; of two, the one that decodes."""
    flow = generation.flow
    route = (flow.route.decode, flow.route.prefill)
    return next((name for name in route if name in suspects and flow.depends_on(name)), None)


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
