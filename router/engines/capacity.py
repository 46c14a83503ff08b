"""Limits the work that engines are given at once: enough that none of them ever idles, but not so much that they keep a
queue.

Requests wait in the router's queue instead, where they can still be reordered, refused with a time to retry, or
dropped.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from pdkv.base.clock import MONOTONIC
from pdkv.router.engines.candidate import Side
from pdkv.router.engines.fleet import EngineState, Fleet
from pdkv.wire.kv import EngineCard

STEPS_AHEAD = 2
"""Prompt tokens for one prefill engine, in multiples of its largest step: one step runs while the next is at hand."""

UNKNOWN_STEP = 8192
"""Tokens of an engine's largest step if its card does not say."""

SEQS_AHEAD = 2
"""Generations per place in the decode engines' batches: as many again are in prefill or on their way."""

LATELY_S = 10.0
"""Seconds for which a tenant's places are kept free after it had them."""


@dataclass(slots=True)
class _Places:
    """Generations of one tenant."""

    running: int = 0
    most: int = 0  # recently
    most_at: float = 0.0


class Capacity:
    """All that the generations of one router hold together, compared with what the fleet can hold."""

    def __init__(self, fleet: Fleet, *, take_over: bool = False, clock: Callable[[], float] = MONOTONIC.now) -> None:
        """`take_over`: engines of one role do the other's work where that has none."""
        self._fleet = fleet
        self._take_over = take_over
        self.kv_tokens = 0
        self.num_generations = 0
        self._clock = clock
        self._places: dict[str, _Places] = {}  # by tenant

    def enter(self, kv_tokens: int, tenant: str = "") -> None:
        """Count a generation that begins; `tenant`: of a client with a key. Probes have none."""
        self.kv_tokens += kv_tokens
        self.num_generations += 1
        if tenant:
            places = self._places.setdefault(tenant, _Places())
            places.running += 1
            if places.running >= places.most:
                places.most, places.most_at = places.running, self._clock()

    def leave(self, kv_tokens: int, tenant: str = "") -> None:
        """Count a generation that is over."""
        if tenant:
            self._places[tenant].running -= 1
        self.kv_tokens -= kv_tokens
        self.num_generations -= 1
        assert self.num_generations >= 0, "more generations ended than began"
        assert self.num_generations or not self.kv_tokens, "KV that belongs to no generation"

    @property
    def free(self) -> bool:
        """Whether one more generation may begin, whatever its size, so that none is ever too large.

        Some prefill engine must have less than STEPS_AHEAD to compute. All generations together must need less KV than
        the decode engines' pools have, unless one of these engines reports that it has slack: prompts may share KV.
        False while a role has no engine that is ready.
        """
        prefill, decode = self._engines("prefill"), self._engines("decode")
        if self._take_over:
            prefill, decode = prefill or decode, decode or prefill
        if not prefill or not decode:
            return False
        if not self.num_generations:
            return True
        if all(e.books.prefill_tokens >= STEPS_AHEAD * _step_tokens(e) for e in prefill):
            return False
        if self.num_generations >= SEQS_AHEAD * _num_seqs(decode):
            return False
        return self.kv_tokens < sum(map(_kv_capacity, decode)) or any(map(_has_slack, decode))

    def held_back(self) -> Collection[str]:
        """Tenants that may not begin another generation now, because places in batches are kept free for others.

        A tenant that recently had at most an equal share of the decode engines' places has as many kept free; the
        others share the rest. Generations beyond the batches wait in the engines, where turns are not fair.
        """
        if len(self._places) < 2:
            return ()
        now = self._clock()
        for tenant, places in list(self._places.items()):
            if now - places.most_at > LATELY_S:
                places.most, places.most_at = places.running, now
                if not places.running:
                    del self._places[tenant]
        num_seqs = _num_seqs(self._engines("decode"))
        large = {t: p for t, p in self._places.items() if p.most * len(self._places) > num_seqs}
        num_kept = sum(p.most for t, p in self._places.items() if t not in large)
        return large if num_kept and sum(p.running for p in large.values()) >= num_seqs - num_kept else ()

    def _engines(self, side: Side) -> list[EngineState]:
        """Engines that can be used; suspects only if there are no others."""
        engines = self._fleet.engines.values()
        ready = [e for e in engines if e.life == "ready" and e.role in (side, "any") and not e.draining]
        return [e for e in ready if not e.suspicion] or ready


def _card(engine: EngineState) -> EngineCard:
    assert engine.card is not None
    return engine.card


def _num_seqs(engines: list[EngineState]) -> int:
    return sum(_card(e).max_num_seqs for e in engines)


def _step_tokens(engine: EngineState) -> int:
    return _card(engine).max_num_batched_tokens or UNKNOWN_STEP


def _has_slack(engine: EngineState) -> bool:
    """Whether the engine reports that nothing waits there and half of its pool is unused."""
    load = engine.load
    return load is not None and not load.waiting and 2 * (load.blocks.free + load.blocks.cached) > load.blocks.total


def _kv_capacity(engine: EngineState) -> int:
    """Tokens of KV that its pool holds."""
    layout, blocks = _card(engine).layout, engine.blocks
    return max(blocks.total - blocks.quarantined, 0) * layout.block_size // layout.num_groups
