"""One generation as a state machine: messages in, messages and deltas out. No socket, no clock, no event loop.

docs/request-states.md draws the states. The driver sends what the methods return and takes the deltas. After a failure
that other engines may mend (`retryable`) the driver calls one of `resume`, `reset` and `give_up`.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from pdkv.base.log_fields import RequestName
from pdkv.errors import (
    EngineDied,
    InvalidRequest,
    MalformedMessage,
    PdkvError,
    RequestAborted,
    RequestFailed,
    RequestTimeout,
)
from pdkv.router.generations.loan import Loan
from pdkv.router.generations.output import Output
from pdkv.router.request import NOWHERE, Delta, GenerateRequest, Route
from pdkv.wire.failures import error_of
from pdkv.wire.kv import KVHandoff
from pdkv.wire.messages import (
    MAX_TIMEOUT_S,
    Abort,
    Allocated,
    Continue,
    Failed,
    Finished,
    FinishReason,
    HandedOff,
    KVReady,
    KVTicket,
    Loaded,
    Release,
    RouterToEngine,
    Submit,
    Tokens,
)
from pdkv.wire.reports import SourceCounts

FlowMessage = Tokens | Finished | KVHandoff | HandedOff | Allocated | KVReady | Loaded | Failed | Release
"""A message of an engine about one request."""

LenderMessage = HandedOff | Failed | KVReady
"""A message of an engine that was asked for a loan."""

SideState = Literal["idle", "running", "done"]
"""State of one engine's part: not submitted, submitted, or over (it sent its last message, or is gone)."""

Sends = Sequence[tuple[str, RouterToEngine]]
"""Pairs of (engine, message), in the order in which they must be sent."""

_NOTHING: Sends = ()


class RequestFlow:
    """One generation from its first Submit to its end. `attempt` is incremented only here."""

    def __init__(
        self, request: GenerateRequest, route: Route, *, request_id: str, transfer_id: str, loan_id: str, now: float
    ) -> None:
        """`loan_id` is the request id of its loans. `now` is the driver's monotonic clock, in seconds; the deadline is
        `now + request.timeout_s`.
        """
        self.request = request
        self.request_id = request_id
        self.transfer_id = transfer_id
        self.loan_id = loan_id
        self.deadline = now + request.timeout_s
        self.attempt = 0  # of the next Submit, and of the decode part
        self.prefill_attempt = 0  # of the prefill part and of its lease
        self.output = Output(request)
        # the engine that ran the prompt, once a token or a hand-off has come of it
        self.prompt_engine: str | None = None
        self.sources: SourceCounts | None = None  # of that engine, as last reported
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None
        self.guesses = (0, 0)  # right and wrong ones, that the engine verified which ended it
        self.is_cut = False  # its reader finished it: engines may still send messages about it for a moment
        self.trial_tokens = 0  # new tokens that it must produce alone on the engines asked from now on
        self._sources_known = False  # an earlier attempt brought tokens: its prompt sources count
        self._begin(route)

    def _begin(self, route: Route) -> None:
        self._take_route(route)
        self.prefill: SideState = "idle"
        self.decode: SideState = "idle"
        self.declined = False  # decode runs the prompt itself
        self.load: Loaded | None = None  # how decode's remote load ended
        self._num_before_decode = 0  # tokens that did not come from the decode part
        self._recovered()
        self._released = False
        self.prefill_gone = False  # the prefill engine died after its part was over
        self._pushes = False  # an earlier decode part gave a ticket
        self._ticket: bytes | None = None
        self._ticket_number = 0  # of the latest ticket, or the next one if none has come yet
        self._handoff: KVHandoff | None = None
        self._first_part: KVHandoff | None = None  # of a prompt that prefill is still computing, all that is named
        self._kv_ready: KVReady | None = None

    def _take_route(self, route: Route) -> None:
        self.route = route
        self.loan = Loan(route, self.loan_id, self.transfer_id, self.prefill_attempt)

    def _recovered(self) -> None:
        self.failure: PdkvError | None = None
        self.retryable = False
        self.failed_engine: str | None = None

    def start(self, now: float) -> Sends:
        """The first messages of the route."""
        route = self.route
        if route is NOWHERE:
            return _NOTHING
        if route.aggregated:
            return [self._submit_decode(now)]
        match route.order:
            case "prefill_first":
                return self._submit_prefill(now)
            case "concurrent":
                return [self._submit_decode(now), *self._submit_prefill(now)]
            case "needs_peer_first" | "decode_first":
                return [self._submit_decode(now)]

    def begin(self, route: Route, now: float) -> Sends:
        """Start a flow that awaited engines."""
        assert self.awaits_route
        self._take_route(route)
        return self.start(now)

    def bind_decode(self, engine: str, now: float) -> Sends:
        """Set the decode engine, which gets the hand-off, or its first part, and the tokens so far."""
        assert self.awaits_decode or self.may_bind_decode
        self.route = self.route._replace(decode=engine)
        return self._hand_over(now)

    def resume(self) -> Sends:
        """Continue after a failure of decode: another decode engine gets what prefill has done, or is doing."""
        assert self.can_resume
        sends = self._abort_decode()
        self._recovered()
        self.attempt += 1
        self.decode, self.load = "idle", None
        self.route = self.route._replace(decode="")
        if self._ticket is not None:
            self._ticket, self._kv_ready, self._pushes = None, None, True
            self._ticket_number += 1
        if self.prefill == "running":
            self._released = False  # said before there was a lease
        return sends

    def reset(self) -> Sends:
        """Drop everything of this attempt except its tokens; the flow then awaits another route."""
        assert self.failure is not None or self.awaits_decode
        sends = self._close()
        self.attempt += 1
        self.prefill_attempt = self.attempt
        if self.output.token_ids:
            self._sources_known = self.sources is not None
        else:
            self.prompt_engine = self.sources = None
        self._begin(NOWHERE)
        return sends

    def give_up(self) -> Sends:
        """End the generation after a failure."""
        assert self.failure is not None
        return self._close()

    def handle(self, engine: str, message: FlowMessage, now: float) -> Sends:
        """Handle a message from `engine` that `accepts` allows."""
        if self.ended:
            return _NOTHING
        match message:
            case Tokens():
                return self._on_tokens(engine, message)
            case Finished():
                return self._on_finished(engine, message)
            case KVHandoff():
                return self._on_part(message)
            case HandedOff():
                return self._on_handed_off(message, now)
            case Allocated() if engine != self.route.decode:
                return self.loan.forward(message.ticket) if message.ticket is not None else _NOTHING
            case Allocated():
                return self._on_allocated(message, now)
            case KVReady():
                return self._on_kv_ready(message)
            case Loaded() if engine != self.route.decode:
                return self.loan.end()
            case Loaded():
                self.load = message
                return _NOTHING
            case Release():
                return self._release()
            case Failed():
                return self._on_failed(engine, message)

    def handle_loan(self, message: LenderMessage, now: float) -> Sends:
        """Handle a lender's message, if `accepts_loan`."""
        if self.ended:
            return _NOTHING
        match message:
            case HandedOff() if self.loan.grant(message):
                return self._ask_prefill(now)
            case HandedOff() if self.loan.state == "asked":  # it names something other than was asked for
                return self.go_without_loan(MalformedMessage.code, now)
            case Failed(code=code) | KVReady(ok=False, code=code):
                return self.go_without_loan(code, now)
        return _NOTHING

    def go_without_loan(self, code: str, now: float) -> Sends:
        """Compute the KV that was to be lent, since the lender has none, is gone, or takes too long. Idempotent."""
        state, sends = self.loan.state, self.loan.end()
        if self.ended or state in ("wanted", "over"):
            return sends
        if state == "asked":
            return [*sends, *self._ask_prefill(now)]
        return [*sends, (self.route.prefill, KVReady(self.request_id, self.prefill_attempt, ok=False, code=code))]

    def engine_died(self, engine: str) -> Sends:
        """Note that an engine of the route is gone; nothing more will come from it."""
        route = self.route
        if self.ended:
            if engine == route.prefill:  # the generation must not return to it
                self.prefill, self._released, self.prefill_gone = "done", True, True
            return _NOTHING
        if engine == route.prefill and not route.aggregated and (self.prefill == "done" or self.declined):
            # Its part was over. Decode learns about the KV from its peers. But only a prefill engine that writes into
            # decode's blocks can say that nothing more will come, and it can no longer do so.
            self.prefill, self._released, self.prefill_gone = "done", True, True
            return self._never() if self._ticket is not None else _NOTHING
        if engine == route.prefill:
            self.prefill, self._released = "done", True
        if engine == route.decode:
            self.decode = "done"
        error = EngineDied(f"engine {engine} died", request_id=self.request_id, retryable=True)
        return self.fail(error, retryable=True, engine=engine)

    def finish(self) -> Sends:
        """End the generation because the client has everything: a stop string or a tool call ended its text.
        Idempotent.
        """
        if self.ended:
            return _NOTHING
        self.finish_reason, self.is_cut = "stop", True
        return self._close()

    def abort(self) -> Sends:
        """End the generation because the client gave up. Idempotent."""
        return self.fail(RequestAborted("the request was aborted", request_id=self.request_id), engine=self._awaited)

    def expire(self, now: float) -> Sends:
        """End the generation because its deadline has passed, or no token has come for too long. Idempotent."""
        message = f"the request took longer than {self.request.timeout_s:g} s"
        if now < self.deadline:
            message = f"no token came for {self.request.stall_timeout_s:g} s"
        if self.awaits_route or self.awaits_decode:
            message += "; it was last waiting for an engine that was gone"
        return self.fail(RequestTimeout(message, request_id=self.request_id), engine=self._awaited)

    @property
    def _awaited(self) -> str | None:
        """The engine whose turn it is: the one that is too slow, if any is. None while a lender is asked."""
        if self.loan.state == "asked":
            return None
        is_prefill = self.prefill == "running" and not self.output.token_ids
        return (self.route.prefill if is_prefill else self.route.decode) or None

    def fail(self, error: PdkvError, *, retryable: bool = False, engine: str | None = None) -> Sends:
        """End the generation with an error, through the fault of `engine` if one is named. Idempotent.

        If the error is retryable, the driver decides next whether and how it continues, even if the engine calls it
        final, since that may be the engine's own fault.
        """
        if self.ended:
            return _NOTHING
        self.failure, self.retryable, self.failed_engine = error, retryable, engine
        return _NOTHING if retryable else self._close()

    # --- messages from engines ------------------------------------------------------------------------------------

    def _fail_by(self, engine: str, fault: str) -> Sends:
        """Fail because an engine sent what no correct one would."""
        error = RequestFailed(f"engine {engine} sent {fault}", request_id=self.request_id)
        return self.fail(error, retryable=True, engine=engine)

    def _on_tokens(self, engine: str, message: Tokens) -> Sends:
        output = self.output
        if fault := output.fault_of(message):
            return self._fail_by(engine, fault)
        token_ids = output.add(message)
        if not token_ids:
            return _NOTHING
        if message.sources is not None and not self._sources_known:
            self.prompt_engine, self.sources = engine, message.sources
        if engine == self.route.decode:
            return self._give_up_prefill() if self.declined else _NOTHING
        self._num_before_decode = len(output.token_ids)
        sends = self.loan.end()  # it has all it wanted of it
        if self.decode == "running" and not self.declined and not output.is_last(len(output.token_ids)):
            sends.append((self.route.decode, Continue(self.request_id, self.attempt, list(token_ids))))
        return sends

    def _on_finished(self, engine: str, message: Finished) -> Sends:
        is_decode = engine == self.route.decode
        if is_decode:
            self.decode = "done"
        else:
            self.prefill = "done"
            self._released = True  # the first token was the last: there was no hand-off
        if fault := self.output.fault_of_end(message):
            return self._fail_by(engine, fault)
        if not self._sources_known and not is_decode:
            self.prompt_engine, self.sources = engine, message.sources
        elif not self._sources_known and self.prompt_engine in (None, engine):
            self.sources = message.sources
        self.finish_reason, self.stop_token_id = message.reason, message.stop_token_id
        self.guesses = message.accepted_guesses, message.rejected_guesses
        return self._close()

    def _on_handed_off(self, message: HandedOff, now: float) -> Sends:
        self.prefill = "done"
        if self.declined or self._released:  # the KV is not needed; a Release before the lease has ended nothing
            self._released = False
            return self._release()
        if fault := self.output.fault_of_sources(message.sources):
            return self._fail_by(self.route.prefill, fault)
        if not self._sources_known:
            self.prompt_engine, self.sources = self.route.prefill, message.sources
        self._handoff = message.handoff
        if self.decode == "running":
            return [(self.route.decode, message.handoff)]
        return self._hand_over(now) if self.route.decode else _NOTHING

    def _on_part(self, message: KVHandoff) -> Sends:
        """Note that more of the prompt's KV can be read while prefill computes the rest."""
        is_own = message.transfer_id == self.transfer_id and message.more and not message.lent
        if not is_own or self.prefill != "running" or self.output.token_ids or self.declined or self._released:
            return _NOTHING
        self._first_part = message if self._first_part is None else self._first_part.joined(message)
        return [(self.route.decode, message)] if self.decode == "running" else _NOTHING

    def _hand_over(self, now: float) -> Sends:
        """Send the hand-off and the tokens so far to the decode engine."""
        sends = [self._submit_decode(now)]
        if self._kv_ready is not None:
            sends.append((self.route.decode, self._forwarded(self._kv_ready)))
        return sends

    def _on_allocated(self, message: Allocated, now: float) -> Sends:
        if self.route.aggregated:
            return _NOTHING
        # An empty range says that nothing is needed from prefill, except the first token if the hit is the whole
        # prompt: the tokens after it cannot be computed without it.
        whole_prompt = message.stop >= len(self.request.prompt_token_ids)
        if message.start == message.stop and (self.output.token_ids or not whole_prompt):
            self.declined = True
            return self._give_up_prefill() if self.output.token_ids or self.prefill == "idle" else _NOTHING
        self.declined = False
        self._ticket = message.ticket
        if self.prefill == "idle":
            return self._submit_prefill(now)
        if self.loan.state == "asked":
            return _NOTHING  # prefill gets the ticket with its Submit
        if message.ticket is not None:
            if self.prefill_gone:
                return self._never()
            ticket = KVTicket(self.request_id, self.prefill_attempt, message.ticket, self._ticket_number)
            return [(self.route.prefill, ticket)]
        return _NOTHING

    def _on_kv_ready(self, message: KVReady) -> Sends:
        if (self._pushes and self._ticket is None) or message.ticket not in (None, self._ticket_number):
            return _NOTHING  # for a ticket of a decode engine that no longer takes part
        self._kv_ready = message
        if self.decode == "running" and not self.declined:
            return [(self.route.decode, self._forwarded(message))]
        return _NOTHING

    def _on_failed(self, engine: str, message: Failed) -> Sends:
        if engine == self.route.decode:
            self.decode = "done"
        else:
            self.prefill, self._released = "done", True
            if self.declined:
                return _NOTHING
        error = error_of(message)
        if isinstance(error, InvalidRequest):
            return self.fail(error)
        is_over = isinstance(error, RequestTimeout | RequestAborted)  # whatever another engine might do
        return self.fail(error, retryable=message.retryable or not is_over, engine=engine)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _submit_prefill(self, now: float) -> Sends:
        """Start prefill's part; if another engine lends what prefill lacks, that engine is asked first."""
        self.prefill = "running"
        offer = self.route.offer
        if offer is None or self.loan.state != "wanted":
            return self._ask_prefill(now)
        return [(offer.lender, self.loan.ask(self.request, offer.num_tokens, self.deadline - now))]

    def _ask_prefill(self, now: float) -> Sends:
        lent, ticket = self.loan.handoff, self._ticket
        return [(self.route.prefill, self._submit(now, until="first_token", kv="handoff", handoff=lent, ticket=ticket))]

    def _submit_decode(self, now: float) -> tuple[str, RouterToEngine]:
        self.decode = "running"
        self._num_before_decode = len(self.output.token_ids)
        if self.route.aggregated:
            return self.route.decode, self._submit(now, kv="local")
        conditional = self.route.order == "decode_first" and self.prefill == "idle"
        handoff = self._handoff or self._first_part
        return self.route.decode, self._submit(now, kv="await_peer", conditional=conditional, handoff=handoff)

    def _submit(
        self,
        now: float,
        *,
        kv: Literal["local", "handoff", "await_peer"],
        until: Literal["first_token", "end"] = "end",
        conditional: bool = False,
        handoff: KVHandoff | None = None,
        ticket: bytes | None = None,
    ) -> Submit:
        request, params, is_first = self.request, self.request.params, kv == "handoff"
        if self.output.prompt_logprobs_known and params.prompt_logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return Submit(
            request_id=self.request_id,
            transfer_id=self.transfer_id,
            attempt=self.prefill_attempt if is_first else self.attempt,
            choice=request.choice,
            seed_drawn=request.seed_drawn,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=list(self.output.token_ids),
            params=params,
            cache_salt=request.cache_salt,
            priority=request.priority,
            timeout_s=min(max(self.deadline - now, 0.001), MAX_TIMEOUT_S),
            until=until,
            kv=kv,
            conditional=conditional,
            handoff=handoff,
            ticket=ticket,
            trial_tokens=self.trial_tokens,
            label=request.label,
            traceparent=request.traceparent,
            load_timeout_s=self.loan.load_timeout_s if is_first and handoff is not None else 0.0,
            kv_terms=request.kv_terms,
            tenant=request.tenant,
            prediction_token_ids=request.prediction_token_ids if until == "end" else [],
        )

    def _forwarded(self, message: KVReady) -> KVReady:
        """The hand-off under the attempt of the decode engine."""
        return message if message.attempt == self.attempt else msgspec.structs.replace(message, attempt=self.attempt)

    def _never(self) -> Sends:
        """Tell decode that the KV of its ticket will not come, unless it was said to be there."""
        if self._kv_ready is not None or self.declined:
            return _NOTHING
        return self._on_kv_ready(KVReady(self.request_id, self.attempt, ok=False, code="peer_gone"))

    def _release(self) -> Sends:
        """Allow the lease to end, if there is one and this was not done already."""
        if self._released or self.route.aggregated or self.prefill == "idle":
            return _NOTHING
        self._released = True
        return [(self.route.prefill, Release(self.transfer_id, self.prefill_attempt))]

    def _give_up_prefill(self) -> Sends:
        """Stop prefill's part: nothing more is needed from it."""
        returned = self.loan.end()
        if self.prefill != "running":
            return [*returned, *self._release()]
        self.prefill = "done"
        return [*returned, (self.route.prefill, Abort(self.request_id, self.prefill_attempt)), *self._release()]

    def _abort_decode(self) -> Sends:
        if self.decode != "running":
            return _NOTHING
        self.decode = "done"
        return [(self.route.decode, Abort(self.request_id, self.attempt))]

    def _close(self) -> Sends:
        """End the attempt: engines that still work on it stop, and the lease ends."""
        return [*self._give_up_prefill(), *self._abort_decode()]

    # --- what the driver asks -------------------------------------------------------------------------------------

    @property
    def name(self) -> RequestName:
        """The generation's name in log lines."""
        request = self.request
        return RequestName(self.request_id, self.attempt, label=request.label, traceparent=request.traceparent)

    @property
    def output_token_ids(self) -> list[int]:
        """All tokens so far."""
        return self.output.token_ids

    @property
    def num_duplicates(self) -> int:
        """Tokens that arrived more than once."""
        return self.output.num_duplicates

    @property
    def ended(self) -> bool:
        """Whether the generation has ended: `finish_reason` or `failure` tells how."""
        return self.finish_reason is not None or self.failure is not None

    @property
    def awaits_route(self) -> bool:
        """Whether `begin` must be called with its engines."""
        return self.route is NOWHERE and not self.ended

    @property
    def awaits_decode(self) -> bool:
        """Whether the prompt has been handed off and `bind_decode` must name the decode engine."""
        return self._handoff is not None and not self.route.decode and not self.ended

    @property
    def may_bind_decode(self) -> bool:
        """Whether `bind_decode` may name a decode engine already: it reads what prefill has of the prompt meanwhile. A
        suspect runs on one engine at a time.
        """
        may_read = self._first_part is not None and self.prefill == "running" and not self.output.token_ids
        return may_read and not (self.route.decode or self._released or self.trial_tokens or self.ended)

    @property
    def can_resume(self) -> bool:
        """Whether, after a failure, the prefill part continues, or its hand-off can still be read."""
        if self.route.aggregated or self.declined or self.failed_engine == self.route.prefill:
            return False
        if self.prefill == "running":
            return True
        readable = self._ticket is not None or self._kv_ready is None or self._kv_ready.ok
        return self._handoff is not None and readable and not self._released

    @property
    def engines_in_use(self) -> tuple[str, ...]:
        """Engines that run a part of the generation, or will."""
        route = self.route
        if self.ended or route is NOWHERE:
            return ()
        if route.aggregated:
            return (route.decode,)
        prefill = (route.prefill,) if self.prefill != "done" else ()
        return (*prefill, route.decode) if self.decode == "running" else prefill

    def runs_on(self, engine: str) -> bool:
        """Whether the engine has been given a part that has not ended."""
        route = self.route
        return (engine == route.decode and self.decode == "running") or (
            engine == route.prefill and self.prefill == "running"
        )

    def attempt_on(self, engine: str) -> int:
        """The attempt number under which the engine knows its part."""
        return self.attempt if engine == self.route.decode else self.prefill_attempt

    def depends_on(self, engine: str) -> bool:
        """Whether the generation cannot continue without this engine: a part runs there, or KV is read from there."""
        return engine != "" and engine in self.engines

    def is_new_on(self, engine: str) -> bool:
        """Whether this engine's part has produced no token yet."""
        if engine == self.route.decode:
            return len(self.output.token_ids) <= self._num_before_decode
        return True

    def accepts(self, engine: str, message: FlowMessage) -> bool:
        """Whether the message is about a part that this engine runs."""
        route = self.route
        if engine == route.decode and message.attempt == self.attempt:
            return True
        if message.attempt != self.prefill_attempt:
            return False
        return engine == route.prefill or (engine == route.decode and isinstance(message, Release))

    def accepts_loan(self, engine: str, message: LenderMessage) -> bool:
        """Whether a lender's message is about this attempt."""
        return engine == self.loan.lender and message.attempt == self.prefill_attempt

    def source_of(self, reader: str) -> str:
        """The engine from which `reader` has its KV, or will."""
        borrows = reader == self.route.prefill and not self.route.aggregated
        return self.loan.lender if borrows else self.route.prefill

    @property
    def awaits_kv(self) -> bool:
        """Whether a hand-off was made and decode has neither loaded its KV nor continued without it; at the end:
        whether that was so.
        """
        return self._handoff is not None and not self.declined and self.load is None and len(self.output_token_ids) < 2

    @property
    def engines(self) -> tuple[str, ...]:
        """Engines that work on the generation, will, or hold something for it: a prefill engine until its lease may
        end.
        """
        if self.ended:
            return ()
        over = self.route.aggregated or (self.prefill == "done" and self._released)
        return (self.route.decode,) if over else (self.route.prefill, self.route.decode)

    def take_delta(self) -> Delta | None:
        """All output since the last call (`Output.take`)."""
        return self.output.take(self.finish_reason, self.stop_token_id)
