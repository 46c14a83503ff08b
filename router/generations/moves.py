"""Moves requests off suspect engines: a few at a time, and only if there is room. No clock, no socket."""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pdkv.router.engines.candidate import SIDES, Side
from pdkv.router.engines.health import TICK_S
from pdkv.router.engines.state import EngineState
from pdkv.router.generations.driver import Driver
from pdkv.router.generations.generation import Generation

MOVED_SHARE, MIN_MOVES_PER_S = 0.1, 10.0
"""Share of all running requests that may be moved per second, and a minimum for when few are running."""

MAX_TRIES = 64
"""Requests examined closely in one tick."""

STAY_TICKS = 30
"""Seconds for which a request that could not be moved stays, unless other engines have room sooner."""


HELD_UP_S = 60.0
"""Seconds before a grammar that seems to hold up an engine is moved: within its limits, no grammar takes as long."""


class Mover:
    """Looks for requests that depend on suspects, once per tick."""

    def __init__(self, driver: Driver, *, take_over: bool = False) -> None:
        """`take_over`: if no engine can be used for one side, those of the other side do its work, too."""
        self.num_moved = 0
        self._take_over = take_over
        self._driver, self._fleet = driver, driver.fleet
        self._allowance = MIN_MOVES_PER_S
        self._num_ticks = 0
        self._staying: dict[str, int] = {}  # requests that could not be moved -> the tick in which to try again
        self._takers: frozenset[tuple[str, str, str]] = frozenset()  # the engines that had no room for them

    def tick(self, suspects: Mapping[str, str], generations: Collection[Generation]) -> None:
        """One tick of TICK_S. Of the requests that depend on suspects, those with the nearest deadlines are moved
        first.

        `suspects`: engine -> why. `generations`: all that have not ended.
        """
        rate = max(MOVED_SHARE * len(generations), MIN_MOVES_PER_S)
        self._allowance = min(self._allowance + rate * TICK_S, rate)
        self._num_ticks += 1
        if not suspects:
            self._staying.clear()
            return
        engines = self._fleet.engines.values()
        takers = [e for e in engines if e.life == "ready" and not e.draining and e.name not in suspects]
        self._review_staying(takers, generations)
        all_rooms = [_Room(e) for e in takers]
        rooms = {side: [r for r in all_rooms if r.role in (side, "any")] for side in SIDES}
        if self._take_over:
            rooms = {side: rooms[side] or all_rooms for side in SIDES}
        if self._driver.placing.goes_elsewhere:
            self._send_away(suspects, generations)
        elif all_rooms and self._allowance >= 1.0:
            for item in heapq.nsmallest(MAX_TRIES, self._find_movable(suspects, generations, rooms)):
                self._try(item, suspects[item.engine], rooms)

    def _send_away(self, suspects: Mapping[str, str], generations: Iterable[Generation]) -> None:
        """Requests go on in another deployment, while it takes them."""
        placing = self._driver.placing
        for item in sorted(s for g in generations if (s := _find_stuck(g, suspects)) and placing.may_leave(g)):
            if self._allowance < 1.0 or not placing.goes_elsewhere:
                return
            if self._driver.move(item.generation, suspects[item.engine], away_from=item.engine):
                self._allowance -= 1.0
                self.num_moved += 1

    def _review_staying(self, takers: Iterable[EngineState], generations: Collection[Generation]) -> None:
        """If engines have become free, allow all requests to be tried again; forget those that ended."""
        known = frozenset((e.name, e.role, e.card.epoch) for e in takers if e.card is not None)
        if known != self._takers:
            self._takers = known
            self._staying.clear()
        elif self._staying and self._num_ticks % STAY_TICKS == 0:
            live = {g.request_id for g in generations}
            self._staying = {request_id: tick for request_id, tick in self._staying.items() if request_id in live}

    def _find_movable(
        self, suspects: Collection[str], generations: Collection[Generation], rooms: "_Rooms"
    ) -> Iterator["_Stuck"]:
        """The requests for which there is room. One that could not be moved before does not hold up the others."""
        most = {side: max((r.num_tokens for r in rooms[side]), default=0) for side in SIDES}
        held_up = [name for name in suspects if (s := self._fleet.engines[name].health.late_s) and s < HELD_UP_S]
        grammars = {n: {g.flow.request.params.grammar for g in generations if n in g.flow.engines} for n in held_up}
        for generation in generations:
            stuck = _find_stuck(generation, suspects)
            if stuck is None or any(most[side] < stuck.num_tokens for side in stuck.sides):
                continue
            if stuck.has_grammar and stuck.engine in grammars:
                failures = generation.failures
                if len(grammars[stuck.engine] - {None}) == 1 or (failures is not None and failures.is_suspect):
                    continue  # it is the reason why the engine is late, and would hold up the next one, too
            next_try = self._staying.get(stuck.request_id)
            if next_try is None:
                yield stuck
            elif next_try <= self._num_ticks:
                yield stuck._replace(stayed=True)

    def _try(self, stuck: "_Stuck", reason: str, rooms: "_Rooms") -> None:
        if self._allowance < 1.0:
            return
        found = [_find_room(rooms[side], stuck.num_tokens) for side in stuck.sides]
        if None in found:
            return
        alone = stuck.has_grammar and self._fleet.engines[stuck.engine].health.late_s is not None
        if self._driver.move(stuck.generation, reason, away_from=stuck.engine, alone=alone):
            for room in {id(room): room for room in found if room is not None}.values():
                room.take(stuck.num_tokens)
            self._allowance -= 1.0
            self.num_moved += 1
        else:
            self._staying[stuck.request_id] = self._num_ticks + STAY_TICKS


class _Stuck(NamedTuple):
    """A request that cannot continue without a suspect; ordered by deadline."""

    stayed: bool  # it could not be moved before
    deadline: float
    request_id: str
    engine: str
    sides: tuple[Side, ...]  # the engine's part in it, whatever its role is by now
    generation: Generation

    @property
    def has_grammar(self) -> bool:
        """Whether the request's grammar may be why its engine is late."""
        return self.generation.flow.request.params.grammar is not None

    @property
    def num_tokens(self) -> int:
        """Tokens that would have to be computed or sent again."""
        flow = self.generation.flow
        return len(flow.request.prompt_token_ids) + len(flow.output_token_ids)


def _find_stuck(generation: Generation, suspects: Collection[str]) -> _Stuck | None:
    """Requests that depend on suspects; if two engines of one are suspects, the decode engine counts."""
    flow = generation.flow
    for name in (flow.route.decode, flow.route.prefill):
        if name in suspects and flow.depends_on(name) and not flow.request.probe:
            side: Side = "decode" if name == flow.route.decode else "prefill"
            sides = SIDES if flow.route.aggregated else (side,)
            return _Stuck(False, generation.expires_at, generation.request_id, name, sides, generation)
    return None


class _Room:
    """Blocks that an engine can give, less those already promised in this tick."""

    def __init__(self, engine: EngineState) -> None:
        self.role = engine.role
        self.block_size = engine.card.layout.block_size if engine.card is not None else 1
        self.num_free = engine.blocks.free + engine.blocks.cached

    @property
    def num_tokens(self) -> int:
        """The largest request that fits, in tokens; it gets one extra block to continue in."""
        return (self.num_free - 1) * self.block_size - 1

    def take(self, num_tokens: int) -> None:
        """Reserve room for a request of this many tokens."""
        self.num_free -= num_tokens // self.block_size + 2


_Rooms = Mapping[Side, Sequence[_Room]]
"""Room by side, on the engines that can be used for it."""


def _find_room(rooms: Iterable[_Room], num_tokens: int) -> _Room | None:
    """The engine with the most room, if it is enough for the request."""
    fitting = [room for room in rooms if room.num_tokens >= num_tokens]
    return max(fitting, key=lambda room: room.num_free, default=None)
