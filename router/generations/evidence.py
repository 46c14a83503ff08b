"""What the course of generations says about engines: how fast they are, and whose fault failures are. No clock."""

import logging

from pdkv.errors import KVNotFound, RequestAborted, StaleGeneration, TransferTimeout
from pdkv.router.engines.books import kv_tokens
from pdkv.router.engines.faults import Fault, fault_of
from pdkv.router.engines.fleet import FALLBACK, Counters, Fleet
from pdkv.router.engines.health import EngineHealth
from pdkv.router.engines.outliers import SLOW
from pdkv.router.generations.failure_record import is_final
from pdkv.router.generations.flow import RequestFlow
from pdkv.router.generations.generation import Generation
from pdkv.router.generations.timeline import Delays
from pdkv.wire.failures import known_code
from pdkv.wire.messages import HandedOff, Loaded, Tokens

logger = logging.getLogger(__name__)

CACHE_MISSES = (KVNotFound.code, StaleGeneration.code)
"""How a load ends if its KV was evicted in the meantime from a lender's cache or a store: neither engine is at
fault.
"""

PROVEN_S = 5.0
"""Seconds: an engine where something succeeded within this time is not blamed for a request that another one failed,
too.
"""

TELLING_TIMEOUT_S = 5.0
"""Seconds: a deadline that passes sooner after an engine's last message says more about the client than the engine."""

IMPATIENT_S = 1.0
"""Seconds: a client that gives up sooner after an engine was asked says nothing about the engine."""


class Evidence:
    """Tells the fleet, the counters and the delays of one router what its generations show."""

    def __init__(self, fleet: Fleet, counters: Counters, delays: Delays) -> None:
        self._fleet, self._counters, self._delays = fleet, counters, delays

    def prompt_run(self, generation: Generation, now: float) -> None:
        """Note how long a prompt took, if nothing but computing held it up."""
        flow, sources = generation.flow, generation.sources
        if (state := self._fleet.engines.get(generation.prefill_engine)) is not None:
            state.books.worked_since = now
        is_plain = flow.route.offer is None and flow.request.params.grammar is None
        if is_plain and not (flow.attempt or flow.request.probe or sources.remote or sources.store):
            engine, work, seconds = generation.prefill_engine, generation.asked_work, now - generation.asked_at
            self._fleet.speeds.worked(engine, work, seconds, now)
            if self._fleet.engines[engine].role != "prefill":  # which says itself how long it took
                self._fleet.speeds.computed(engine, work, seconds)

    def handed_off(self, generation: Generation, engine: str, message: HandedOff, now: float) -> None:
        """Note how long the engine took for a prompt, if nothing but computing held it up. Not of a decode engine:
        its answers are tokens.
        """
        flow, sources = generation.flow, message.sources
        is_prompt = self._fleet.engines[engine].role != "decode" and not sources.remote + sources.store
        if is_prompt and flow.route.offer is None and flow.request.params.grammar is None:
            self._fleet.answered(engine, generation.asked_work, now - generation.asked_at)
        self._fleet.succeeded(engine, now)
        self._fleet.speeds.computed(engine, sources.computed + sources.recomputed, message.ran_s)

    def stepped(self, generation: Generation, engine: str, message: Tokens, now: float) -> None:
        """Note how long a decode engine took from one token of a stream to the next; one stream stands for its step.
        Not of a prefill engine: its answers are prompts.
        """
        state = self._fleet.engines[engine]
        if state.role != "prefill" and not generation.flow.is_new_on(engine):
            num_tokens = max(len(message.token_ids), 1)
            seconds = (now - generation.last_token_at) / num_tokens
            self._fleet.answered(engine, state.books.requests, seconds)
            self._fleet.speeds.stepped(engine, state.books.requests, seconds, num_tokens)

    def loaded(self, flow: RequestFlow, reader: str, loaded: Loaded, now: float) -> None:
        """Count the end of a KV load for or against the pair, unless its source is gone, which explains it."""
        source, is_loan = flow.source_of(reader), reader != flow.route.decode
        is_gone = not self._fleet.is_ready(source) or (not is_loan and flow.prefill_gone)
        card = self._fleet.engines[reader].card
        may_be_evicted = is_loan or (card is not None and card.kind == "store")
        if not is_gone and not (may_be_evicted and loaded.code in CACHE_MISSES):
            self._fleet.pairs.loaded(source, reader, loaded.ok, now)
        if is_loan and loaded.ok:
            self._counters.loans["ok"] += 1
            self._fleet.speeds.lent()
        elif is_loan:  # an engine that stops waiting does not say how long it waited
            is_late = loaded.code == TransferTimeout.code
            self.loan_failed(flow, loaded.code, flow.loan.load_timeout_s if is_late else loaded.seconds)
        if loaded.ok:
            self._delays.transferred(loaded)
            self._fleet.speeds.loaded(loaded.num_bytes, loaded.seconds, (source, reader))
        else:
            self._counters.load_failures += 1
            logger.warning("KV load from %s to %s for request %s failed: %s", source, reader, flow.name, loaded.code)

    def loan_failed(self, flow: RequestFlow, code: str, seconds: float) -> None:
        """Count a loan that failed: its KV is computed after all."""
        self._counters.loans[known_code(code)] += 1
        self._fleet.speeds.lost(seconds + flow.loan.compute_s)

    def blame(self, generation: Generation, now: float) -> Fault:
        """Note that a failed attempt was an engine's fault, or a pair's; returns whose it was. The fleet notes each
        death once, a load's end is noted with it, and why an engine is left is known.
        """
        flow, failures = generation.flow, generation.failures
        name, is_left = flow.failed_engine, failures is not None and failures.leaving
        assert flow.failure is not None
        fault = fault_of(flow.failure)
        if flow.request.probe or name is None or is_left or not self._fleet.is_ready(name):
            return fault
        health = self._fleet.engines[name].health
        if isinstance(flow.failure, RequestAborted):
            if self._kept_waiting(generation, health, now):  # what waits for KV does nothing, but sends beats
                fault = "pair" if flow.awaits_kv and health.beats and not health.suspicion else "engine"
        elif fault == "deadline":
            evident = health.explains_timeout()
            if evident or generation.is_overdue(now, TELLING_TIMEOUT_S):
                fault = "pair" if flow.awaits_kv and not evident else "engine"
        elif fault == "engine" and is_final(flow.failure):
            if failures is None or not failures.doubted:
                return fault  # as far as its code tells: a second engine shows it
            fault = "client" if now - health.last_good < PROVEN_S else "engine"
        if fault == "pair" and self._fleet.is_ready(flow.route.prefill):  # which of the two was too slow?
            self._fleet.pairs.loaded(flow.route.prefill, flow.route.decode, False, now)
        if fault == "engine" or (fault == "capacity" and name == FALLBACK):
            self._fleet.failed(name, now)
        return fault

    def _kept_waiting(self, generation: Generation, health: EngineHealth, now: float) -> bool:
        """Whether a client gave up on an engine that does nothing, far beyond the usual time of such a prompt."""
        usual_s = self._fleet.speeds.usual_work_s(generation.asked_work)
        least_s = max(SLOW * usual_s, IMPATIENT_S) if usual_s else TELLING_TIMEOUT_S
        has_grammar = generation.flow.request.params.grammar is not None
        return health.explains_timeout() and not has_grammar and generation.is_overdue(now, least_s)

    def finished(self, generation: Generation, now: float) -> None:
        """Note what a generation that ended well says of its last engines, as far as they are still there."""
        flow = generation.flow
        self._count_hits(generation)
        self._note_step(generation)
        for name in self._fleet.engines.keys() & flow.route[:2]:
            if name != flow.route.decode or not flow.is_new_on(name):
                self._fleet.succeeded(name, now)

    def _count_hits(self, generation: Generation) -> None:
        """Count what of its prompt was cached anywhere, and what its engine had and loaded of that."""
        engine = self._fleet.engines.get(generation.prefill_engine)
        if engine is not None and not generation.flow.attempt:
            achieved = generation.sources.local_hit, generation.sources.store
            for tier, could, had in zip(("pool", "store"), generation.reachable, achieved, strict=True):
                self._counters.reachable_hits[engine.role, tier] += could
                self._counters.achieved_hits[engine.role, tier] += had

    def _note_step(self, generation: Generation) -> None:
        """Note how long the tokens of a generation took that ended well where it began to decode."""
        flow, times = generation.flow, generation.timeline
        decode, num_steps = self._fleet.engines.get(flow.route.decode), len(flow.output_token_ids) - 1
        if decode is None or flow.attempt or num_steps <= 0 or times.first_token is None or times.ended is None:
            return
        seconds = (times.ended - times.first_token) / num_steps
        books = decode.books
        had_prompts = books.prefill_tokens or books.worked_since > times.first_token
        held = 0 if had_prompts else books.kv_tokens + kv_tokens(flow.request)
        self._fleet.speeds.decoded(decode.name, books.requests + 1, seconds, held)
