"""One generation as a state machine: messages in, messages and deltas out. No socket, no clock, no event loop.

docs/request-states.md draws the states. Whoever drives it sends what the methods return and takes the deltas.
"""

from collections.abc import Sequence
from typing import Literal

from pdkv.errors import EngineDied, InvalidRequest, PdkvError, RequestAborted, RequestFailed, RequestTimeout
from pdkv.router.request import Delta, GenerateRequest, Route
from pdkv.wire.messages import (
    Abort,
    Allocated,
    Continue,
    Failed,
    Finished,
    FinishReason,
    HandedOff,
    KVHandoff,
    KVReady,
    KVTicket,
    Loaded,
    Release,
    RouterToEngine,
    SourceCounts,
    Submit,
    TokenLogprob,
    Tokens,
)

Sends = Sequence[tuple[str, RouterToEngine]]
"""(engine, message) in the order in which they must leave."""

FlowMessage = Tokens | Finished | HandedOff | Allocated | KVReady | Loaded | Failed | Release
"""What an engine says about one request."""

_NOTHING: Sends = ()

SideState = Literal["idle", "running", "done"]
"""Of one engine's part: not submitted, submitted, over (it said its last word, or it is gone)."""

_FAILURES: dict[str, type[RequestFailed]] = {e.code: e for e in (RequestTimeout, RequestAborted, EngineDied)}


class RequestFlow:
    """One generation from its first Submit to its end. Only here is `attempt` raised."""

    def __init__(
        self, request: GenerateRequest, route: Route, *, request_id: str, transfer_id: str, now: float
    ) -> None:
        """`now` is the driver's monotonic clock, in seconds; the deadline is `now + request.timeout_s`."""
        self.request = request
        self.request_id = request_id
        self.transfer_id = transfer_id
        self.deadline = now + request.timeout_s
        self.attempt = 0
        self.output_token_ids: list[int] = []
        self.num_duplicates = 0  # tokens that both sides produced
        self._end_taken = False
        self._pending: list[int] = []
        self._pending_logprobs: list[TokenLogprob] | None = None
        self._pending_prompt_logprobs: list[TokenLogprob | None] | None = None
        self._begin(route)

    def _begin(self, route: Route) -> None:
        self.route = route
        self.prefill: SideState = "idle"
        self.decode: SideState = "idle"
        self.declined = False  # decode prefills by itself
        self.prompt_engine: str | None = None  # the one that ran the prompt, once a token or a hand-off came of it
        self.sources: SourceCounts | None = None  # of that engine, as it said last
        self.decode_sources: SourceCounts | None = None
        self.load: Loaded | None = None  # how decode's remote load ended
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None
        self.failure: PdkvError | None = None
        self.retryable = False
        self.failed_engine: str | None = None
        self._released = False
        self._prefill_gone = False
        self._ticket: bytes | None = None
        self._handoff: KVHandoff | None = None
        self._kv_ready: KVReady | None = None

    # --- what the driver asks -------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether all has been said: `finish_reason` or `failure` tells how."""
        return self.finish_reason is not None or self.failure is not None

    @property
    def may_restart(self) -> bool:
        """Whether it failed in a way that other engines may mend, before the client has seen a token."""
        return self.failure is not None and self.retryable and not (self.output_token_ids or self.request.probe)

    @property
    def prefill_pending(self) -> bool:
        """Whether the prefill engine still has, or will have, work to do for it."""
        return not self.ended and not self.route.aggregated and self.prefill != "done"

    @property
    def prefill_gone(self) -> bool:
        """Whether the prefill engine died after its part was over."""
        return self._prefill_gone

    @property
    def awaits_kv(self) -> bool:
        """Whether a hand-off is made, and decode has neither loaded its KV nor gone on without; at the end: had."""
        return self._handoff is not None and not self.declined and self.load is None and len(self.output_token_ids) < 2

    @property
    def engines(self) -> tuple[str, ...]:
        """Engines that work on it, will, or hold something for it: a prefill engine until its lease may end."""
        if self.ended:
            return ()
        over = self.route.aggregated or (self.prefill == "done" and self._released)
        return (self.route.decode,) if over else (self.route.prefill, self.route.decode)

    def take_delta(self) -> Delta | None:
        """All that piled up since the last call; None where nothing did. The end comes once, with or without tokens."""
        reason = self.finish_reason
        if not self._pending and (reason is None or self._end_taken):
            return None
        delta = Delta(self._pending, self._pending_logprobs, self._pending_prompt_logprobs, reason, self.stop_token_id)
        self._pending, self._pending_logprobs, self._pending_prompt_logprobs = [], None, None
        self._end_taken = reason is not None
        return delta

    # --- what happens ---------------------------------------------------------------------------------------------

    def start(self, now: float) -> Sends:
        """The first messages."""
        route = self.route
        if route.aggregated:
            return [self._submit_decode(now)]
        match route.order:
            case "prefill_first":
                return [self._submit_prefill(now)]
            case "concurrent":
                return [self._submit_decode(now), self._submit_prefill(now)]
            case "needs_peer_first" | "decode_first":
                return [self._submit_decode(now)]

    def restart(self, route: Route, now: float) -> Sends:
        """Begin again on other engines after a failure, behind the tokens that are out; raises `attempt`."""
        assert self.failure is not None
        self.attempt += 1
        self._begin(route)
        return self.start(now)

    def handle(self, engine: str, message: FlowMessage, now: float) -> Sends:
        """A message of this (request_id, attempt), or a Release of its transfer, from `engine`."""
        if self.ended:
            return _NOTHING
        match message:
            case Tokens():
                return self._on_tokens(engine, message)
            case Finished():
                return self._on_finished(engine, message)
            case HandedOff():
                return self._on_handed_off(message, now)
            case Allocated():
                return self._on_allocated(message, now)
            case KVReady():
                return self._on_kv_ready(message)
            case Loaded():
                self.load = message
                return _NOTHING
            case Release():
                return self._release()
            case Failed():
                return self._on_failed(engine, message)

    def engine_died(self, engine: str, *, suspect: bool = False) -> Sends:
        """An engine of the route is gone; nothing more will come from it.

        `suspect`: it went while it handled a message of this request, which is not sent to another engine then.
        """
        if self.ended:
            return _NOTHING
        if suspect:
            text = f"engine {engine} died while handling a message of this request, so it is not sent to another one"
            return self.fail(EngineDied(text, request_id=self.request_id), engine=engine)
        route = self.route
        if engine == route.prefill and not route.aggregated and (self.prefill == "done" or self.declined):
            # Its part was over. Decode finds out about the KV by its peers, but only a prefill engine that writes into
            # decode's blocks can say that nothing will come any more, and it cannot say so now.
            self.prefill, self._released, self._prefill_gone = "done", True, True
            return self._never() if self._ticket is not None else _NOTHING
        if engine == route.prefill:
            self.prefill, self._released = "done", True
        if engine == route.decode:
            self.decode = "done"
        error = EngineDied(f"engine {engine} died", request_id=self.request_id, retryable=True)
        return self.fail(error, retryable=True, engine=engine)

    def replace_decode(self, engine: str) -> None:
        """Another decode engine takes over a part that has not begun."""
        assert self.decode == "idle"
        assert not self.route.aggregated
        self.route = self.route._replace(decode=engine)

    def abort(self) -> Sends:
        """The client gave up, or has all it wants. Idempotent."""
        return self.fail(RequestAborted("the request was aborted", request_id=self.request_id))

    def expire(self) -> Sends:
        """The deadline is over. Idempotent."""
        message = f"the request took longer than {self.request.timeout_s:g} s"
        # The engine that had the word is the one that was too slow.
        engine = self.route.prefill if self.prefill == "running" and not self.output_token_ids else self.route.decode
        return self.fail(RequestTimeout(message, request_id=self.request_id), engine=engine)

    def fail(self, error: PdkvError, *, retryable: bool = False, engine: str | None = None) -> Sends:
        """End the generation with an error, by the fault of `engine` if one is named. Idempotent."""
        if self.ended:
            return _NOTHING
        self.failure, self.retryable, self.failed_engine = error, retryable, engine
        return self._close()

    # --- messages from engines ------------------------------------------------------------------------------------

    def _on_tokens(self, engine: str, message: Tokens) -> Sends:
        output = self.output_token_ids
        num_known = len(output) - message.position
        token_ids, logprobs = message.token_ids, message.logprobs
        if num_known < 0:
            text = f"engine {engine} sent token {message.position} before {len(output)}"
            return self.fail(RequestFailed(text, request_id=self.request_id), engine=engine)
        fault = self._fault_of(message)
        if fault:
            return self.fail(RequestFailed(f"engine {engine} sent {fault}", request_id=self.request_id), engine=engine)
        if num_known:
            self.num_duplicates += min(num_known, len(token_ids))
            if num_known >= len(token_ids):
                return _NOTHING
            token_ids = token_ids[num_known:]
            logprobs = None if logprobs is None else logprobs[num_known:]
        if message.sources is not None:
            self.prompt_engine, self.sources = engine, message.sources
        output.extend(token_ids)
        self._pending.extend(token_ids)
        if logprobs is not None:
            self._pending_logprobs = logprobs if self._pending_logprobs is None else self._pending_logprobs + logprobs
        if message.prompt_logprobs is not None:
            self._pending_prompt_logprobs = message.prompt_logprobs
        if engine == self.route.decode:
            return self._give_up_prefill() if self.declined else _NOTHING
        sends = []
        if self.decode == "running" and not self.declined and not self._is_last(len(output)):
            sends.append((self.route.decode, Continue(self.request_id, self.attempt, token_ids)))
        return sends

    def _fault_of(self, message: Tokens) -> str:
        """What is wrong with tokens that no engine in order would send; empty: nothing."""
        max_tokens, prompt = self.request.params.max_tokens, self.request.prompt_token_ids
        num_tokens = len(message.token_ids)
        if max_tokens is not None and message.position + num_tokens > max_tokens:
            return f"token {message.position + num_tokens} of at most {max_tokens}"
        if message.logprobs is not None and len(message.logprobs) != num_tokens:
            return f"{len(message.logprobs)} logprobs for {num_tokens} tokens"
        if message.prompt_logprobs is not None and len(message.prompt_logprobs) != len(prompt):
            return f"{len(message.prompt_logprobs)} prompt logprobs for {len(prompt)} tokens"
        return ""

    def _on_finished(self, engine: str, message: Finished) -> Sends:
        if engine == self.route.decode:
            self.decode = "done"
            self.decode_sources = message.sources
            if self.prompt_engine in (None, engine):
                self.sources = message.sources
        else:
            self.prefill = "done"
            self._released = True  # the first token was the last: there was no hand-off
            self.prompt_engine, self.sources = engine, message.sources
        self.finish_reason, self.stop_token_id = message.reason, message.stop_token_id
        return self._close()

    def _on_handed_off(self, message: HandedOff, now: float) -> Sends:
        self.prefill = "done"
        if self.declined or self._released:  # nobody wants the KV; a Release before the lease has ended nothing
            self._released = False
            return self._release()
        self.prompt_engine, self.sources = self.route.prefill, message.sources
        self._handoff = message.handoff
        if self.decode == "running":
            return [(self.route.decode, message.handoff)]
        sends = [self._submit_decode(now)]
        if self._kv_ready is not None:
            sends.append((self.route.decode, self._kv_ready))
        return sends

    def _on_allocated(self, message: Allocated, now: float) -> Sends:
        if self.route.aggregated:
            return _NOTHING
        # An empty range says that nothing is needed from prefill, except the first token where the hit is the whole
        # prompt: what comes behind it cannot be computed without it.
        whole_prompt = message.stop >= len(self.request.prompt_token_ids)
        if message.start == message.stop and (self.output_token_ids or not whole_prompt):
            self.declined = True
            return self._give_up_prefill() if self.output_token_ids or self.prefill == "idle" else _NOTHING
        self.declined = False
        self._ticket = message.ticket
        if self.prefill == "idle":
            return [self._submit_prefill(now)]
        if message.ticket is not None:
            if self._prefill_gone:
                return self._never()
            lease = self.attempt if self._handoff is None else self._handoff.attempt
            return [(self.route.prefill, KVTicket(self.request_id, lease, message.ticket))]
        return _NOTHING

    def _on_kv_ready(self, message: KVReady) -> Sends:
        self._kv_ready = message
        if self.decode == "running" and not self.declined:
            return [(self.route.decode, message)]
        return _NOTHING

    def _on_failed(self, engine: str, message: Failed) -> Sends:
        if engine == self.route.decode:
            self.decode = "done"
        else:
            self.prefill, self._released = "done", True
            if self.declined:
                return _NOTHING
        if message.code == InvalidRequest.code:
            return self.fail(InvalidRequest(message.message, param=message.param or None))
        kind = _FAILURES.get(message.code, RequestFailed)
        error = kind(message.message, request_id=self.request_id, retryable=message.retryable)
        error.code = message.code
        return self.fail(error, retryable=message.retryable, engine=engine)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _submit_prefill(self, now: float) -> tuple[str, RouterToEngine]:
        self.prefill = "running"
        return self.route.prefill, self._submit(now, until="first_token", kv="handoff", ticket=self._ticket)

    def _submit_decode(self, now: float) -> tuple[str, RouterToEngine]:
        self.decode = "running"
        if self.route.aggregated:
            return self.route.decode, self._submit(now, kv="local")
        conditional = self.route.order == "decode_first"
        return self.route.decode, self._submit(now, kv="await_peer", conditional=conditional, handoff=self._handoff)

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
        request = self.request
        return Submit(
            request_id=self.request_id,
            transfer_id=self.transfer_id,
            attempt=self.attempt,
            choice=request.choice,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=list(self.output_token_ids),
            params=request.params,
            cache_salt=request.cache_salt,
            priority=request.priority,
            timeout_s=max(self.deadline - now, 0.001),
            until=until,
            kv=kv,
            conditional=conditional,
            handoff=handoff,
            ticket=ticket,
        )

    def _is_last(self, num_output: int) -> bool:
        max_tokens = self.request.params.max_tokens
        return max_tokens is not None and num_output >= max_tokens

    def _never(self) -> Sends:
        """The KV that decode gave a ticket for will not come, unless it was said to be there."""
        if self._kv_ready is not None or self.declined:
            return _NOTHING
        return self._on_kv_ready(KVReady(self.request_id, self.attempt, ok=False, code="peer_gone"))

    def _release(self) -> Sends:
        """The lease may end, if there is one and it was not said already."""
        if self._released or self.route.aggregated or self.prefill == "idle":
            return _NOTHING
        self._released = True
        return [(self.route.prefill, Release(self.transfer_id, self.attempt))]

    def _give_up_prefill(self) -> Sends:
        """Nothing is wanted from prefill any more."""
        if self.prefill != "running":
            return self._release()
        self.prefill = "done"
        return [(self.route.prefill, Abort(self.request_id, self.attempt)), *self._release()]

    def _close(self) -> Sends:
        """The attempt is over: whoever still works on it stops, and the lease ends."""
        sends = list(self._give_up_prefill())
        if self.decode == "running":
            self.decode = "done"
            sends.append((self.route.decode, Abort(self.request_id, self.attempt)))
        return sends
