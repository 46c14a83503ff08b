"""Limits the work that engines are given at once: enough that none of them ever idles, but not so much that they keep a
queue.

Requests wait in the router's queue instead, where they can still be reordered, refused with a time to retry, or
dropped.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from pdkv.base.clock import MONOTONIC
from pdkv.router.engines.fleet import Fleet
from pdkv.router.engines.members import Members
from pdkv.router.engines.state import EngineState

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
        """`take_over`: if one role has no engine, those of the other do its work."""
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
        """Count out a generation that has ended."""
        if tenant:
            self._places[tenant].running -= 1
        self.kv_tokens -= kv_tokens
        self.num_generations -= 1
        assert self.num_generations >= 0, "more generations ended than began"
        assert self.num_generations or not self.kv_tokens, "KV that belongs to no generation"

    @property
    def free(self) -> bool:
        """Whether one more generation may begin. Its size does not matter, so that no generation is ever too large.

        Some prefill engine must have less than STEPS_AHEAD to compute. All generations together must need less KV than
        the decode engines' pools have, unless one of these engines reports that it has slack: prompts may share KV.
        False while a role has no engine that is ready.
        """
        prefill, decode = self._fleet.sides["prefill"], self._fleet.sides["decode"]
        if self._take_over:
            prefill, decode = prefill if prefill.num_seqs else decode, decode if decode.num_seqs else prefill
        if not prefill.num_seqs or not decode.num_seqs:
            return False
        if not self.num_generations:
            return True
        if prefill.with_room <= self._doubted(prefill).keys():
            return False
        if self.num_generations >= SEQS_AHEAD * self._num_seqs(decode):
            return False
        doubted = self._doubted(decode)
        num_tokens = decode.kv_tokens - sum(e.kv_capacity for e in doubted.values())
        return self.kv_tokens < num_tokens or not decode.with_slack <= doubted.keys()

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
        num_seqs = self._num_seqs(self._fleet.sides["decode"])
        large = {t: p for t, p in self._places.items() if p.most * len(self._places) > num_seqs}
        num_kept = sum(p.most for t, p in self._places.items() if t not in large)
        return large if num_kept and sum(p.running for p in large.values()) >= num_seqs - num_kept else ()

    def _doubted(self, members: Members) -> Mapping[str, EngineState]:
        """Suspects among them, which count only if there are no others."""
        engines = [e for e in self._fleet.doubted if e.name in members.engines and e.suspicion and not e.draining]
        are_all = sum(_num_places(e) for e in engines) == members.num_seqs
        return {} if are_all else {e.name: e for e in engines}

    def _num_seqs(self, members: Members) -> int:
        return members.num_seqs - sum(map(_num_places, self._doubted(members).values()))


def _num_places(engine: EngineState) -> int:
    assert engine.card is not None
    return engine.card.max_num_seqs
