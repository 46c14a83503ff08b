"""Drives the flows of all generations of one router: passes engines' messages to them, and carries out the effects."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from pdkv.base.log_limit import LogLimit
from pdkv.errors import (
    GrammarGivenUp,
    InvalidRequest,
    KVNotFound,
    MalformedMessage,
    RequestAborted,
    RequestFailed,
    StaleGeneration,
    TransferTimeout,
    UnsendableMessage,
)
from pdkv.router.engines.backend import Backend
from pdkv.router.engines.books import kv_tokens
from pdkv.router.engines.capacity import Capacity
from pdkv.router.engines.faults import fault_of
from pdkv.router.engines.fleet import Counters, Fleet
from pdkv.router.engines.peer_news import PeerNews
from pdkv.router.generations.changes import Changes
from pdkv.router.generations.failure_record import is_final
from pdkv.router.generations.flow import FlowMessage, LenderMessage, RequestFlow, Sends
from pdkv.router.generations.generation import Generation
from pdkv.router.generations.generation_records import GenerationRecords, log_decision
from pdkv.router.generations.given_up_grammars import GivenUpGrammars
from pdkv.router.generations.loan import LOAN_TIMEOUT_S
from pdkv.router.generations.placement import Placement
from pdkv.router.generations.probes import Prober
from pdkv.router.generations.recovery import Recovery
from pdkv.router.generations.timeline import Delays
from pdkv.wire.frames import key_of
from pdkv.wire.messages import EngineToRouter, HandedOff, Loaded, Release, RouterToEngine, Submit, Tokens

logger = logging.getLogger(__name__)

TIMER_SLACK_S = 0.01
"""Seconds by which the event loop's clock may be ahead of the dispatcher's."""

CACHE_MISSES = (KVNotFound.code, StaleGeneration.code)
"""How a load ends if its KV was evicted in the meantime from a lender's cache or a store: neither engine is at
fault.
"""

PARKED_PER_TURN = 32
"""Waiting generations that are given engines in one turn of the event loop: ten milliseconds."""

PROVEN_S = 5.0
"""Seconds: an engine where something succeeded within this time is not blamed for a request that another one failed,
too.
"""

TELLING_TIMEOUT_S = 5.0
"""Seconds: a deadline that passes sooner after an engine's last message says more about the client than the engine."""


class Driver:
    """The running generations. Sends their messages to engines and counts their ends. Lives in one event loop."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        counters: Counters,
        room: Capacity,
        recovery: Recovery,
        placing: Placement,
        prober: Prober,
        clock: Callable[[], float],
    ) -> None:
        self.fleet = fleet
        self.counters = counters
        self.room = room
        self.on_room: Callable[[], None] = lambda: None
        """Called when there may be more room for generations than before."""
        self.recovery = recovery
        self.prober = prober
        self.changes = Changes()  # of engines and their work; not notified token by token
        self.delays = Delays()
        self.given_up = GivenUpGrammars()
        self._placing = placing
        self._clock = clock
        self._backends: dict[str, Backend] = {}
        self._news = PeerNews(fleet.cards)
        self._generations: dict[str, Generation] = {}  # by request_id
        self._transfers: dict[str, Generation] = {}  # by transfer_id
        self._loans: dict[str, Generation] = {}  # by loan_id
        self.records = GenerationRecords()
        self._cut: deque[str] = deque(
            maxlen=512
        )  # ids of generations that readers recently finished: engines may still report on them
        self._parked_are_due = False  # about to be placed again
        self._log_limit = LogLimit()

    @property
    def num_generations(self) -> int:
        """Generations that have not ended."""
        return len(self._generations)

    @property
    def num_parked(self) -> int:
        """Generations that wait for an engine."""
        return self.recovery.num_parked

    def generations_on(self, name: str) -> list[Generation]:
        """Generations for which the engine has or will have work, or holds KV."""
        return [generation for generation in self._generations.values() if name in generation.flow.engines]

    def num_requests_on(self, name: str) -> int:
        """Number of those generations."""
        return sum(name in generation.flow.engines for generation in self._generations.values())

    def find_requests(self, name: str) -> list[dict[str, Any]]:
        """Descriptions of the generations with a client's, a generation's or a trace's id, as JSON-ready data."""
        return self.records.find(name, self._generations.values(), self._clock())

    def engines_changed(self, what: str = "") -> None:
        """Note that the set of usable engines has changed, and what an operator did."""
        if what:
            self.fleet.events.note(self._clock(), "operator", text=what)
        for engine in self.fleet.engines.values():
            self.fleet.look_at(engine)
        self.changed(engines=True)

    def changed(self, *, engines: bool = False) -> None:
        """Tell all that wait for something that it may be there: the one channel of changes but for tokens. `engines`:
        some may be usable that were not.
        """
        self.changes.notify()
        self.on_room()
        if engines:
            self._place_parked_soon()

    # --- messages of engines --------------------------------------------------------------------------------------

    def _take_tokens(self, engine: str, message: Tokens, now: float) -> None:
        """Pass tokens on. This is the hot path: nothing else changes with them."""
        generation = self._generations.get(message.request_id)
        if generation is None or not generation.flow.accepts(engine, message):
            self._drop(message.request_id)
            return
        flow = generation.flow
        if generation.timeline.first_token is None:
            generation.timeline.heard(engine, message, flow, now)
        sends = flow.handle(engine, message, now)
        generation.arrived(now)
        if generation.prompt_run_in != flow.attempt:
            self._note_prompt(generation, now)
        if flow.ended:
            self._apply(generation, sends)
            return
        if len(flow.output_token_ids) > generation.num_expected and (more := generation.expect_more()):
            self.room.kv_tokens += more
            self._enter(generation)
        for receiver, answer in sends:
            self._send(receiver, answer)
        failures = generation.failures
        if failures is not None:
            if failures.doubted and len(flow.output_token_ids) > failures.doubted_at:
                doubted, failures.doubted = failures.doubted, ""  # another engine is making progress with it
                self.fleet.failed(doubted, now)
            if failures.is_suspect and self.recovery.track(generation):
                self._place_parked_soon()
        generation.wake()

    def _handle_loan(self, engine: str, message: LenderMessage, now: float) -> None:
        """Take a lender's message about a loan."""
        generation = self._loans[message.request_id]
        if not generation.flow.accepts_loan(engine, message):
            self._drop(message.request_id)
            return
        flow = generation.flow
        is_answer = flow.loan.state == "asked"
        sends = flow.handle_loan(message, now)
        if is_answer:
            self.fleet.speeds.answered(now - generation.loan_asked_at)
            if flow.loan.state == "over":
                code = MalformedMessage.code if isinstance(message, HandedOff) else message.code
                self._loan_failed(flow, code, now - generation.loan_asked_at)
        self._apply(generation, sends)

    def _loan_is_late(self, generation: Generation, attempt: int) -> None:
        """End the wait for a lender that has not answered in time; the generation continues without it."""
        flow = generation.flow
        if flow.loan.state == "asked" and flow.prefill_attempt == attempt:
            logger.info(
                "request %s continues without the loan of %s, which has not answered", flow.name, flow.loan.lender
            )
            self._go_without_loan(generation, TransferTimeout.code)

    def _go_without_loan(self, generation: Generation, code: str) -> None:
        """Continue without a loan whose lender is gone or silent."""

        def go_on() -> Sends:
            flow, now = generation.flow, self._clock()
            if flow.loan.state == "asked":  # else its load reports how it ended
                self._loan_failed(flow, code, now - generation.loan_asked_at)
            return flow.go_without_loan(code, now)

        self._advance(generation, go_on, f"a loan's end ({code})")

    def _loan_failed(self, flow: RequestFlow, code: str, seconds: float) -> None:
        """Count a loan that failed: its KV is computed after all."""
        self.counters.loans[code] += 1
        self.fleet.speeds.lost(seconds + flow.loan.compute_s)

    def _handle(self, generation: Generation | None, engine: str, message: FlowMessage, now: float) -> None:
        """Advance one generation."""
        if generation is None or not generation.flow.accepts(engine, message):
            self._drop(message.transfer_id if isinstance(message, Release) else message.request_id)
            return
        flow = generation.flow
        generation.timeline.heard(engine, message, flow, now)
        sends = flow.handle(engine, message, now)
        if isinstance(message, HandedOff):
            self._note_prompt(generation, now)
            self._note_handoff(generation, engine, message, now)
            self.fleet.speeds.computed(engine, message.sources.computed + message.sources.recomputed, message.ran_s)
        elif isinstance(message, Loaded):
            self._note_load(flow, engine, message, now)
        self._apply(generation, sends)

    def _drop(self, name: str) -> None:
        """Drop a message about something that has ended; that is remarkable unless the router itself has just finished
        it.
        """
        self.counters.dropped_messages += name not in self._cut

    def _note_prompt(self, generation: Generation, now: float) -> None:
        """Note that its prompt has been run, and is no engine's work any more, and how long that took if nothing but
        computing held it up.
        """
        flow, sources = generation.flow, generation.sources
        if generation.prompt_run_in == flow.attempt:
            return
        generation.prompt_run_in = flow.attempt
        self._enter(generation)
        if (state := self.fleet.engines.get(generation.prefill_engine)) is not None:
            state.books.worked_since = now
        is_plain = flow.route.offer is None and flow.request.params.grammar is None
        if is_plain and not (flow.attempt or flow.request.probe or sources.remote or sources.store):
            engine, work, seconds = generation.prefill_engine, generation.asked_work, now - generation.asked_at
            self.fleet.speeds.worked(engine, work, seconds, now)
            if self.fleet.engines[engine].role != "prefill":  # which says itself how long it took
                self.fleet.speeds.computed(engine, work, seconds)

    def _note_handoff(self, generation: Generation, engine: str, message: HandedOff, now: float) -> None:
        """Note how long the engine took for a prompt, if nothing but computing held it up. Not of a decode engine:
        its answers are tokens.
        """
        flow, sources = generation.flow, message.sources
        is_prompt = self.fleet.engines[engine].role != "decode" and not sources.remote + sources.store
        if is_prompt and flow.route.offer is None and flow.request.params.grammar is None:
            self.fleet.answered(engine, generation.asked_work, now - generation.asked_at)
        self.fleet.succeeded(engine, now)

    def _note_gap(self, engine: str, message: Tokens, now: float) -> None:
        """Note how long an engine took from one token of a stream to the next; one stream stands for its step. Not of a
        prefill engine: its answers are prompts.
        """
        generation = self._generations.get(message.request_id)
        if generation is None or engine != generation.flow.route.decode or generation.flow.is_new_on(engine):
            return
        state = self.fleet.engines[engine]
        if state.role != "prefill" and generation.flow.accepts(engine, message):
            num_tokens = max(len(message.token_ids), 1)
            seconds = (now - generation.last_token_at) / num_tokens
            self.fleet.answered(engine, state.books.requests, seconds)
            self.fleet.speeds.stepped(engine, state.books.requests, seconds, num_tokens)

    def _note_load(self, flow: RequestFlow, reader: str, loaded: Loaded, now: float) -> None:
        """Count the end of a KV load for or against the pair, unless its source is gone, which explains it."""
        source, is_loan = flow.source_of(reader), reader != flow.route.decode
        is_gone = not self.fleet.is_ready(source) or (not is_loan and flow.prefill_gone)
        card = self.fleet.engines[reader].card
        may_be_evicted = is_loan or (card is not None and card.kind == "store")
        if not is_gone and not (may_be_evicted and loaded.code in CACHE_MISSES):
            self.fleet.pairs.loaded(source, reader, loaded.ok, now)
        if is_loan and loaded.ok:
            self.counters.loans["ok"] += 1
            self.fleet.speeds.lent()
        elif is_loan:  # an engine that stops waiting does not say how long it waited
            is_late = loaded.code == TransferTimeout.code
            self._loan_failed(flow, loaded.code, flow.loan.load_timeout_s if is_late else loaded.seconds)
        if loaded.ok:
            self.delays.transferred(loaded)
            self.fleet.speeds.loaded(loaded.num_bytes, loaded.seconds, (source, reader))
        else:
            self.counters.load_failures += 1
            logger.warning("KV load from %s to %s for request %s failed: %s", source, reader, flow.name, loaded.code)

    def _generation_of(self, message: RouterToEngine | EngineToRouter) -> Generation | None:
        """The running generation that a message is about."""
        key = key_of(message)
        return self._generations.get(key[0]) or self._loans.get(key[0]) if key is not None else None

    def _mishandled(self, name: str, message: RouterToEngine | EngineToRouter, error: Exception) -> None:
        """Contain a message that this code cannot handle: it costs its own request and nothing else."""
        self.counters.dropped_messages += 1
        generation = self._generation_of(message)
        if self._log_limit.passes():
            kind, whose = type(message).__name__, generation.flow.name if generation is not None else "no request"
            logger.error("dropped a %s from %s about %s after an error", kind, name, whose, exc_info=error)
        if generation is not None:
            self._fail_by_error(generation, f"a {type(message).__name__} of {name}", error)

    def _expire(self, generation: Generation) -> None:
        """End a generation whose time is up, unless tokens have come since the timer was set."""
        now = self._clock()
        left_s = generation.expires_at - now
        if left_s > TIMER_SLACK_S and not generation.flow.ended:
            generation.timer = asyncio.get_running_loop().call_later(left_s, self._expire, generation)
        else:
            self._apply(generation, generation.flow.expire(max(now, generation.expires_at)))  # the timer may fire early

    # --- effects --------------------------------------------------------------------------------------------------

    def _advance(self, generation: Generation, step: Callable[[], Sends], cause: str) -> None:
        """Advance one of several generations; an error costs that generation and nothing else."""
        try:
            self._apply(generation, step())
        except Exception as error:
            if self._log_limit.passes():
                logger.exception("request %s ends: an error in %s", generation.flow.name, cause)
            self._fail_by_error(generation, cause, error)

    def _apply(self, generation: Generation, sends: Sends) -> None:
        """Send, then update the books: a failed generation continues elsewhere, an ended one is forgotten."""
        flow = generation.flow
        self._send_all(sends)
        if flow.failure is not None and flow.request_id in self._generations:
            self._blame(generation)
            engine = flow.failed_engine or ""
            self._send_all(self.recovery.after_failure(generation))
            if not flow.ended:
                self.fleet.events.note(self._clock(), "moved", engine, "its requests go on elsewhere")
        if flow.awaits_route or flow.awaits_decode:
            self._send_all(self._placing.place(generation))
        self._enter(generation)
        if self.recovery.track(generation):
            self._place_parked_soon()
        if flow.ended:
            self._forget(generation)
        generation.wake()
        self.changed()

    def _fail_by_error(self, generation: Generation, cause: str, error: Exception) -> None:
        """End a generation that this code could not handle, even if it cannot end in order."""
        flow = generation.flow
        text = f"{cause} caused an error in the router: {type(error).__name__}"
        failure = RequestFailed(text, request_id=flow.request_id)
        try:
            sends = flow.fail(failure)
            if flow.failure is not None and flow.retryable:  # the error came while it was being moved elsewhere
                flow.failure, flow.retryable = failure, False
                sends = flow.give_up()
            self._apply(generation, sends)
        except Exception:
            if self._log_limit.passes():
                logger.exception("request %s could not be ended in order", flow.name)
            generation.wake()
            self._forget(generation)

    def _blame(self, generation: Generation) -> None:
        """Note that a failed attempt was an engine's fault, or a pair's. The fleet notes each death once, a load's end
        is noted with it, and why an engine is left is known.
        """
        flow, now, failures = generation.flow, self._clock(), generation.failures
        name, is_left = flow.failed_engine, failures is not None and failures.leaving
        if flow.failure is None or flow.request.probe or name is None or is_left or not self.fleet.is_ready(name):
            return
        fault = fault_of(flow.failure)
        if fault == "deadline":
            evident = self.fleet.engines[name].health.explains_timeout()
            if evident or generation.is_overdue(now, TELLING_TIMEOUT_S):
                fault = "pair" if flow.awaits_kv and not evident else "engine"
            if fault == "pair" and self.fleet.is_ready(flow.route.prefill):  # which of the two was too slow?
                self.fleet.pairs.loaded(flow.route.prefill, flow.route.decode, False, now)
        elif fault == "engine" and is_final(flow.failure):
            is_second = failures is not None and failures.doubted
            is_proven = now - self.fleet.engines[name].health.last_good < PROVEN_S
            fault = "engine" if is_second and not is_proven else "client"
        if fault == "engine":
            self.fleet.failed(name, now)

    def _enter(self, generation: Generation) -> None:
        generation.enter(self.fleet)
        self.on_room()

    def _forget(self, generation: Generation) -> None:
        """Count its end, once."""
        flow, counters = generation.flow, self.counters
        if self._generations.pop(flow.request_id, None) is None:
            return
        self._transfers.pop(flow.transfer_id, None)
        self._loans.pop(flow.loan_id, None)
        self.room.leave(generation.kv_tokens, flow.request.tenant)
        self.recovery.unpark(generation)
        if generation.timer is not None:
            generation.timer.cancel()
        if flow.request.probe:
            self.prober.ended(flow, self._clock())
            return
        counters.duplicate_tokens += flow.num_duplicates
        generation.timeline.close(self._clock())
        if generation.choices is not None:
            generation.hindsight = self._placing.look_back(generation)
            log_decision(generation)
        self.records.ended(generation)
        if flow.failure is None:
            counters.finished += 1
            if flow.is_cut:
                self._cut.extend((flow.request_id, flow.transfer_id, flow.loan_id))
            self.delays.finished(generation.timeline)
            self._count_hits(generation)
            self._note_step(generation)
            for name in self.fleet.engines.keys() & flow.route[:2]:  # one may have been removed meanwhile
                if name != flow.route.decode or not flow.is_new_on(name):
                    self.fleet.succeeded(name, self._clock())
        elif isinstance(flow.failure, RequestAborted):
            counters.aborted += 1
        else:
            counters.failed[flow.failure.code] += 1
            if isinstance(flow.failure, GrammarGivenUp) and flow.request.params.grammar is not None:
                self.given_up.add(flow.request.params.grammar, flow.failure, self._clock())

    def _count_hits(self, generation: Generation) -> None:
        """Count what of its prompt was cached anywhere, and what its engine had and loaded of that."""
        engine = self.fleet.engines.get(generation.prefill_engine)
        if engine is not None and not generation.flow.attempt:
            achieved = generation.sources.local_hit, generation.sources.store
            for tier, could, had in zip(("pool", "store"), generation.reachable, achieved, strict=True):
                self.counters.reachable_hits[engine.role, tier] += could
                self.counters.achieved_hits[engine.role, tier] += had

    def _note_step(self, generation: Generation) -> None:
        """Note how long the tokens of a generation took that ended well where it began to decode."""
        flow, times = generation.flow, generation.timeline
        decode, num_steps = self.fleet.engines.get(flow.route.decode), len(flow.output_token_ids) - 1
        if decode is None or flow.attempt or num_steps <= 0 or times.first_token is None or times.ended is None:
            return
        seconds = (times.ended - times.first_token) / num_steps
        books = decode.books
        had_prompts = books.prefill_tokens or books.worked_since > times.first_token
        held = 0 if had_prompts else books.kv_tokens + kv_tokens(flow.request)
        self.fleet.speeds.decoded(decode.name, books.requests + 1, seconds, held)

    def _place_parked_soon(self) -> None:
        """Place waiting generations, in order, in a later turn: an engine came up or became free."""
        if self.recovery.num_parked and not self._parked_are_due:
            self._parked_are_due = True
            asyncio.get_running_loop().call_soon(self._place_parked)

    def _place_parked(self) -> None:
        """Place some of them: the others have their turn soon."""
        self._parked_are_due = False
        in_vain: set[object] = set()  # the same for one of a kind as for all: thousands may wait
        num_placed = 0
        for generation in self.recovery.parked():
            kind = self.recovery.kind_of(generation)
            if kind not in in_vain and not generation.flow.ended:
                self._advance(generation, tuple, "placing it")
                if self.recovery.is_parked(generation):
                    in_vain.add(kind)
                elif (num_placed := num_placed + 1) == PARKED_PER_TURN:
                    self._place_parked_soon()
                    return

    def _send_all(self, sends: Sends) -> None:
        for engine, message in sends:
            self._send(engine, message)

    def _expect_loan(self, generation: Generation, attempt: int) -> None:
        """Note that a lender has been asked."""
        generation.loan_asked_at = self._clock()
        asyncio.get_running_loop().call_later(LOAN_TIMEOUT_S, self._loan_is_late, generation, attempt)

    def _send(self, engine: str, message: RouterToEngine) -> None:
        """Send a message, behind the news of peers that it may name; a request that fits no frame ends here."""
        if not self.fleet.is_ready(engine):
            return
        if engine in self._news.behind:
            self._send(engine, self._news.take(engine))
        if isinstance(message, Submit) and (generation := self._loans.get(message.request_id)) is not None:
            self._expect_loan(generation, message.attempt)
        elif isinstance(message, Submit) and (generation := self._generations.get(message.request_id)) is not None:
            for peer in self._news.behind.keys() & generation.flow.route[:2]:
                self._send(peer, self._news.take(peer))
            now, state = self._clock(), self.fleet.engines[engine]
            state.score.begin_trial(now)
            if not state.books.prefill_tokens:
                state.books.worked_since = now
            generation.asked_at = now
            generation.asked_work = state.tokens_left(now) + generation.num_uncached
            generation.timeline.sent(engine, message, now)
        try:
            self._backends[engine].send(message)
        except UnsendableMessage as error:
            generation = self._generation_of(message)
            whose = generation.flow.name if generation is not None else "no request"
            logger.warning("dropped a message to %s about %s: %s", engine, whose, error)
            if generation is not None:
                self._apply(generation, generation.flow.fail(InvalidRequest(str(error))))
