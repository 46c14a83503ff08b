"""Drives the flows of all generations of one router: passes engines' messages to them, and carries out the effects."""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from pdkv.base.log_limit import LogLimit
from pdkv.errors import (
    EngineGivenUp,
    EngineUnavailable,
    GrammarGivenUp,
    InvalidRequest,
    MalformedMessage,
    RequestAborted,
    RequestFailed,
    TransferTimeout,
    UnsendableMessage,
)
from pdkv.router.engines.backend import Backend
from pdkv.router.engines.capacity import Capacity
from pdkv.router.engines.fleet import FALLBACK, Counters, Fleet
from pdkv.router.engines.peer_news import PeerNews
from pdkv.router.generations.changes import Changes
from pdkv.router.generations.evidence import Evidence
from pdkv.router.generations.flow import FlowMessage, LenderMessage, RequestFlow, Sends
from pdkv.router.generations.generation import Generation
from pdkv.router.generations.generation_records import GenerationRecords, log_decision
from pdkv.router.generations.given_up_grammars import GivenUpGrammars
from pdkv.router.generations.loan import LOAN_TIMEOUT_S
from pdkv.router.generations.placement import Placement
from pdkv.router.generations.probes import Prober
from pdkv.router.generations.recovery import Recovery
from pdkv.router.generations.timeline import Delays
from pdkv.router.request import NOWHERE, Route
from pdkv.router.routing.holdings import PromptKV
from pdkv.wire.frames import key_of
from pdkv.wire.kv import KVHandoff
from pdkv.wire.messages import EngineToRouter, HandedOff, Loaded, Release, RouterToEngine, Submit, Tokens

logger = logging.getLogger(__name__)

TIMER_SLACK_S = 0.01
"""Seconds by which the event loop's clock may be ahead of the dispatcher's."""

PARKED_PER_TURN = 32
"""Waiting generations that are given engines in one turn of the event loop: ten milliseconds."""


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
        self.recovery = recovery
        self.prober = prober
        self.placing = placing
        self.clock = clock
        self.changes = Changes()  # of engines and their work, and so of the room for more; not notified token by token
        self.delays = Delays()
        self._evidence = Evidence(fleet, counters, self.delays)
        self.given_up = GivenUpGrammars()
        self.backends: dict[str, Backend] = {}
        self.news = PeerNews(fleet.cards)
        self.generations: dict[str, Generation] = {}  # by request_id
        self.transfers: dict[str, Generation] = {}  # by transfer_id
        self.loans: dict[str, Generation] = {}  # by loan_id
        self.records = GenerationRecords()
        self.log_limit = LogLimit()
        self.closed = False  # the router is shutting down
        # ids of generations that readers recently finished: engines may still report on them
        self._cut: deque[str] = deque(maxlen=512)
        self._parked_are_due = False  # about to be placed again

    def close(self) -> None:
        """End all generations, and disconnect from all engines. Idempotent."""
        self.closed = True
        for generation in list(self.generations.values()):
            end = partial(generation.flow.fail, EngineUnavailable("the router is shutting down"))
            self.advance(generation, end, "the shutdown")
        for backend in self.backends.values():
            backend.close()

    def generations_on(self, name: str) -> list[Generation]:
        """Generations for which the engine has or will have work, or holds KV."""
        return [generation for generation in self.generations.values() if name in generation.flow.engines]

    def num_requests_on(self, name: str) -> int:
        """Number of those generations."""
        return sum(name in generation.flow.engines for generation in self.generations.values())

    def find_requests(self, name: str) -> list[dict[str, Any]]:
        """Descriptions of the generations with a client's, a generation's or a trace's id, as JSON-ready data."""
        return self.records.find(name, self.generations.values(), self.clock())

    def engines_changed(self, what: str = "") -> None:
        """Note that the set of usable engines has changed, and what an operator did."""
        if what:
            self.fleet.events.note(self.clock(), "operator", text=what)
        for engine in self.fleet.engines.values():
            self.fleet.look_at(engine)
        self.changed(engines=True)

    def changed(self, *, engines: bool = False) -> None:
        """Tell all that wait for something that it may be there: the one channel of changes but for tokens. `engines`:
        some may be usable that were not.
        """
        self.changes.notify()
        if engines:
            self._place_parked_soon()

    def begin(self, prompt: PromptKV, route: Route, now: float) -> Generation:
        """Begin a generation on these engines."""
        request = prompt.request
        drawn = secrets.token_hex(36)
        own, transfer, loan = drawn[:24], drawn[24:48], drawn[48:]
        flow = RequestFlow(request, route, request_id=own, transfer_id=transfer, loan_id=loan, now=now)
        generation = Generation(flow, self._apply, now)
        if route is not NOWHERE:
            self.placing.give(generation, prompt, route, now)
            self.counters.prompts.add(generation.num_uncached)
        loop = asyncio.get_running_loop()
        generation.timer = loop.call_later(request.patience_s, self.expire, generation)
        self.generations[flow.request_id] = generation
        self.transfers[flow.transfer_id] = generation
        self.loans[flow.loan_id] = generation
        self._apply(generation, flow.start(now))
        return generation

    def move(
        self, generation: Generation, reason: str, *, away_from: str = "", spared: bool = False, alone: bool = False
    ) -> bool:
        """Move a generation from a live engine to another one, which counts as a migration.

        Args:
            away_from: the engine to leave; default: the engine that decodes, or else the one that runs the prompt.
            spared: the move counts towards no limit: nothing is wrong with the engine or the generation.
            alone: the generation may be why the engine is late, so it first runs alone on the next one.

        Returns:
            False if it stays where it is: it has ended, does not depend on that engine, has been moved too often, or
            there is no other engine.
        """
        flow = generation.flow
        engine = away_from or (flow.route.decode if flow.runs_on(flow.route.decode) else flow.route.prefill)
        may_go_on = spared or self.recovery.may_go_on(generation)
        if flow.request.probe or not flow.depends_on(engine) or not may_go_on:
            return False
        if not self.placing.can_leave(generation, engine):
            return False
        if spared:
            self.recovery.spare(generation)
        error = EngineGivenUp(f"{engine} was given up: {reason}", request_id=flow.request_id, retryable=True)
        with self.recovery.leaving(generation, engine, alone=alone):
            self.advance(
                generation, partial(flow.fail, error, retryable=True, engine=engine), f"a move away from {engine}"
            )
        return True

    # --- messages of engines --------------------------------------------------------------------------------------

    def take_tokens(self, engine: str, message: Tokens, now: float, *, is_first: bool) -> None:
        """Pass tokens on. This is the hot path: nothing else changes with them. `is_first`: in its frame."""
        generation = self.generations.get(message.request_id)
        if generation is None or not generation.flow.accepts(engine, message):
            self._drop(message.request_id)
            return
        flow = generation.flow
        if is_first and engine == flow.route.decode:
            self._evidence.stepped(generation, engine, message, now)
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
            self.room.kv_tokens += more * generation.is_in_room
            generation.enter(self.fleet)
            self.changed()
        for receiver, answer in sends:
            self.send(receiver, answer)
        failures = generation.failures
        if failures is not None:
            if failures.doubted and len(flow.output_token_ids) > failures.doubted_at:
                doubted, failures.doubted = failures.doubted, ""  # another engine is making progress with it
                self.fleet.failed(doubted, now)
            if failures.is_suspect and self.recovery.track(generation):
                self._place_parked_soon()
        generation.wake()

    def handle_loan(self, engine: str, message: LenderMessage, now: float) -> None:
        """Take a lender's message about a loan."""
        generation = self.loans[message.request_id]
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
                self._evidence.loan_failed(flow, code, now - generation.loan_asked_at)
        self._apply(generation, sends)

    def _loan_is_late(self, generation: Generation, attempt: int) -> None:
        """End the wait for a lender that has not answered in time; the generation continues without it."""
        flow = generation.flow
        if flow.loan.state == "asked" and flow.prefill_attempt == attempt:
            logger.info(
                "request %s continues without the loan of %s, which has not answered", flow.name, flow.loan.lender
            )
            self.go_without_loan(generation, TransferTimeout.code)

    def go_without_loan(self, generation: Generation, code: str) -> None:
        """Continue without a loan whose lender is gone or silent."""

        def go_on() -> Sends:
            flow, now = generation.flow, self.clock()
            if flow.loan.state == "asked":  # else its load reports how it ended
                self._evidence.loan_failed(flow, code, now - generation.loan_asked_at)
            return flow.go_without_loan(code, now)

        self.advance(generation, go_on, f"a loan's end ({code})")

    def handle(self, generation: Generation | None, engine: str, message: FlowMessage, now: float) -> None:
        """Advance one generation."""
        if generation is None or not generation.flow.accepts(engine, message):
            self._drop(message.transfer_id if isinstance(message, Release) else message.request_id)
            return
        flow = generation.flow
        if isinstance(message, KVHandoff) and not self.placing.takes_part(flow):
            return
        generation.timeline.heard(engine, message, flow, now)
        sends = flow.handle(engine, message, now)
        if isinstance(message, HandedOff) and not flow.output.fault_of_sources(message.sources):
            self._note_prompt(generation, now)
            self._evidence.handed_off(generation, engine, message, now)
        elif isinstance(message, Loaded):
            self._evidence.loaded(flow, engine, message, now)
        self._apply(generation, sends)

    def _drop(self, name: str) -> None:
        """Drop a message about something that has ended; that is remarkable unless the router itself has just finished
        it.
        """
        self.counters.dropped_messages += name not in self._cut

    def _note_prompt(self, generation: Generation, now: float) -> None:
        """Note that its prompt has been run, and is no engine's work any more."""
        if generation.prompt_run_in != generation.flow.attempt:
            generation.prompt_run_in = generation.flow.attempt
            generation.enter(self.fleet)
            self.changed()
            self._evidence.prompt_run(generation, now)

    def _generation_of(self, message: RouterToEngine | EngineToRouter) -> Generation | None:
        """The running generation that a message is about."""
        key = key_of(message)
        return self.generations.get(key[0]) or self.loans.get(key[0]) if key is not None else None

    def mishandled(self, name: str, message: RouterToEngine | EngineToRouter, error: Exception) -> None:
        """Contain a message that this code cannot handle: it costs its own request and nothing else."""
        self.counters.dropped_messages += 1
        generation = self._generation_of(message)
        if self.log_limit.passes():
            kind, whose = type(message).__name__, generation.flow.name if generation is not None else "no request"
            logger.error("dropped a %s from %s about %s after an error", kind, name, whose, exc_info=error)
        if generation is not None:
            self._fail_by_error(generation, f"a {type(message).__name__} of {name}", error)

    def expire(self, generation: Generation) -> None:
        """End a generation whose time is up, unless tokens have come since the timer was set."""
        now = self.clock()
        left_s = generation.expires_at - now
        if left_s > TIMER_SLACK_S and not generation.flow.ended:
            generation.timer = asyncio.get_running_loop().call_later(left_s, self.expire, generation)
        else:
            self._apply(generation, generation.flow.expire(max(now, generation.expires_at)))  # the timer may fire early

    # --- effects --------------------------------------------------------------------------------------------------

    def advance(self, generation: Generation, step: Callable[[], Sends], cause: str) -> None:
        """Advance one of several generations; an error costs that generation and nothing else."""
        try:
            self._apply(generation, step())
        except Exception as error:
            if self.log_limit.passes():
                logger.exception("request %s ends: an error in %s", generation.flow.name, cause)
            self._fail_by_error(generation, cause, error)

    def _apply(self, generation: Generation, sends: Sends) -> None:
        """Send, then update the books: a failed generation continues elsewhere, an ended one is forgotten."""
        flow = generation.flow
        self._send_all(sends)
        if flow.failure is not None and flow.request_id in self.generations:
            fault, engine = self._evidence.blame(generation, self.clock()), flow.failed_engine or ""
            self._send_all(self.recovery.after_failure(generation, fault))
            if not flow.ended:
                self.fleet.events.note(self.clock(), "moved", engine, "its requests go on elsewhere")
        if flow.awaits_route or flow.awaits_decode or flow.may_bind_decode:
            self._send_all(self.placing.place(generation))
        generation.enter(self.fleet)
        self._count_in(generation, not flow.ended and flow.route.prefill != FALLBACK)
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
            if self.log_limit.passes():
                logger.exception("request %s could not be ended in order", flow.name)
            generation.wake()
            self._forget(generation)

    def _count_in(self, generation: Generation, is_in_room: bool) -> None:
        """Count it among those that the engines here hold together, or no longer."""
        if is_in_room != generation.is_in_room:
            generation.is_in_room = is_in_room
            (self.room.enter if is_in_room else self.room.leave)(generation.kv_tokens, generation.flow.request.tenant)

    def _forget(self, generation: Generation) -> None:
        """Count its end, once."""
        flow, counters = generation.flow, self.counters
        if self.generations.pop(flow.request_id, None) is None:
            return
        self.transfers.pop(flow.transfer_id, None)
        self.loans.pop(flow.loan_id, None)
        self._count_in(generation, False)
        self.recovery.unpark(generation)
        if generation.timer is not None:
            generation.timer.cancel()
        if flow.request.probe:
            self.prober.ended(flow, self.clock())
            return
        counters.duplicate_tokens += flow.num_duplicates
        generation.timeline.close(self.clock())
        if generation.choices is not None:
            generation.hindsight = self.placing.look_back(generation)
            log_decision(generation)
        self.records.ended(generation)
        if flow.failure is None:
            counters.finished += 1
            if flow.is_cut:
                self._cut.extend((flow.request_id, flow.transfer_id, flow.loan_id))
            self.delays.finished(generation.timeline)
            self._evidence.finished(generation, self.clock())
        elif isinstance(flow.failure, RequestAborted):
            counters.aborted += 1
        else:
            counters.failed[flow.failure.code] += 1
            if isinstance(flow.failure, GrammarGivenUp) and flow.request.params.grammar is not None:
                self.given_up.add(flow.request.params.grammar, flow.failure, self.clock())

    def _place_parked_soon(self) -> None:
        """Place waiting generations, in order, in a later turn: an engine came up or became free."""
        if self.recovery.parked and not self._parked_are_due:
            self._parked_are_due = True
            asyncio.get_running_loop().call_soon(self._place_parked)

    def _place_parked(self) -> None:
        """Place some of them: the others have their turn soon."""
        self._parked_are_due = False
        in_vain: set[object] = set()  # the same for one of a kind as for all: thousands may wait
        num_placed = 0
        for generation in list(self.recovery.parked.values()):
            kind = self.recovery.kind_of(generation), self.placing.may_leave(generation)
            if kind not in in_vain and not generation.flow.ended:
                self.advance(generation, tuple, "placing it")
                if generation.request_id in self.recovery.parked:
                    in_vain.add(kind)
                elif (num_placed := num_placed + 1) == PARKED_PER_TURN:
                    self._place_parked_soon()
                    return

    def _send_all(self, sends: Sends) -> None:
        for engine, message in sends:
            self.send(engine, message)

    def send(self, engine: str, message: RouterToEngine) -> None:
        """Send a message, behind the news of peers that it may name; a request that fits no frame ends here."""
        if not self.fleet.is_ready(engine):
            return
        if engine in self.news.behind:
            self.send(engine, self.news.take(engine))
        if isinstance(message, Submit) and (generation := self.loans.get(message.request_id)) is not None:
            generation.loan_asked_at = self.clock()
            loop = asyncio.get_running_loop()
            loop.call_later(LOAN_TIMEOUT_S, self._loan_is_late, generation, message.attempt)
        elif isinstance(message, Submit) and (generation := self.generations.get(message.request_id)) is not None:
            for peer in self.news.behind.keys() & generation.flow.route[:2]:
                self.send(peer, self.news.take(peer))
            now, state = self.clock(), self.fleet.engines[engine]
            state.score.begin_trial(now)
            if not state.books.prefill_tokens:
                state.books.worked_since = now
            if message.handoff is None or not message.handoff.more:  # else the prompt's engine is still at work
                generation.asked(state, now)
            generation.timeline.sent(engine, message, now)
        elif isinstance(message, KVHandoff) and not message.more and (generation := self._generation_of(message)):
            generation.asked(self.fleet.engines[engine], self.clock())  # it was bound before: its turn begins now
        try:
            self.backends[engine].send(message)
        except UnsendableMessage as error:
            generation = self._generation_of(message)
            whose = generation.flow.name if generation is not None else "no request"
            logger.warning("dropped a message to %s about %s: %s", engine, whose, error)
            if generation is not None:
                self._apply(generation, generation.flow.fail(InvalidRequest(str(error))))
