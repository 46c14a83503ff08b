"""How much the engines are given at once: enough that none of them ever idles, and not so much that they keep a queue.

What waits, waits in the router's queue, where it can still be put in order, told a time to come back, or given up.
"""

from pdkv.router.engines.fleet import EngineState, Fleet
from pdkv.router.routing.policies import Side
from pdkv.wire.messages import EngineCard

STEPS_AHEAD = 2
"""Largest steps' worth of prompt tokens for one prefill engine: one is computed while the next is at hand."""

UNKNOWN_STEP = 8192
"""Tokens of an engine's largest step where its card does not say."""

SEQS_AHEAD = 2
"""Generations for each place in the decode engines' batches: as many again are in prefill, or on their way."""


class Capacity:
    """What all generations of one router hold together, against what the fleet can hold."""

    def __init__(self, fleet: Fleet, *, take_over: bool = False) -> None:
        """`take_over`: engines of one role do the other's work where that has none."""
        self._fleet = fleet
        self._take_over = take_over
        self.kv_tokens = 0
        self.num_generations = 0

    def enter(self, kv_tokens: int) -> None:
        """A generation begins."""
        self.kv_tokens += kv_tokens
        self.num_generations += 1

    def leave(self, kv_tokens: int) -> None:
        """It is over."""
        self.kv_tokens -= kv_tokens
        self.num_generations -= 1
        assert self.num_generations >= 0, "more generations are over than began"
        assert self.num_generations or not self.kv_tokens, "KV that is no generation's"

    @property
    def free(self) -> bool:
        """Whether one more generation may begin, however large: so none is too large for ever.

        A prefill engine must have less to compute than STEPS_AHEAD, and all generations together must need less KV than
        the decode engines' pools have, or one of these must say that they do: prompts may share what they need. False
        while a role has no engine that is ready.
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
        num_seqs = sum(_card(e).max_num_seqs for e in decode)
        if self.num_generations >= SEQS_AHEAD * num_seqs:
            return False
        return self.kv_tokens < sum(map(_kv_capacity, decode)) or any(map(_has_slack, decode))

    def _engines(self, side: Side) -> list[EngineState]:
        """Those that can be asked; suspects only where there are no others."""
        engines = self._fleet.engines.values()
        ready = [e for e in engines if e.life == "ready" and e.role in (side, "any") and not e.draining]
        return [e for e in ready if not e.suspicion] or ready


def _card(engine: EngineState) -> EngineCard:
    assert engine.card is not None
    return engine.card


def _step_tokens(engine: EngineState) -> int:
    return _card(engine).max_num_batched_tokens or UNKNOWN_STEP


def _has_slack(engine: EngineState) -> bool:
    """Whether it says that nobody waits there, and that half of its pool is in nobody's use."""
    load = engine.load
    return load is not None and not load.waiting and 2 * (load.blocks.free + load.blocks.cached) > load.blocks.total


def _kv_capacity(engine: EngineState) -> int:
    """Tokens whose KV its pool holds."""
    layout, blocks = _card(engine).layout, engine.blocks
    return max(blocks.total - blocks.quarantined, 0) * layout.block_size // layout.num_groups
