"""The requests of an engine, from Submit to their end."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from pdkv.base.log_fields import RequestName
from pdkv.connectors.base import TransferKey
from pdkv.engine.grammar_wait import GrammarWait
from pdkv.engine.hooks import PrefillHooks
from pdkv.engine.intake import Prepared, root_of
from pdkv.engine.lending import lend
from pdkv.engine.outbox import Outbox
from pdkv.engine.plan import StepOutput
from pdkv.engine.reports import Counters
from pdkv.engine.request import Request, name_of
from pdkv.engine.scheduler import Drawn, Scheduler
from pdkv.engine.stopping import StopRules
from pdkv.errors import GrammarGivenUp, InvalidRequest, KVNotFound, PdkvError, RequestTimeout, ServerBusy
from pdkv.wire.frames import key_of
from pdkv.wire.kv import EngineCard, KVHandoff
from pdkv.wire.messages import (
    MAX_ERROR_CHARS,
    PROBE_SALT,
    Continue,
    Failed,
    Finished,
    KVReady,
    KVTicket,
    PromptLogprobs,
    RouterToEngine,
    Submit,
    Tokens,
)
from pdkv.wire.reports import SourceCounts
from pdkv.wire.types import RequestKey

logger = logging.getLogger(__name__)

MAX_TOMBSTONES = 4096
"""The number of remembered ended attempts, and of Aborts that overtook their Submit."""

_FAILURE_LEVELS = dict.fromkeys((RequestTimeout.code, InvalidRequest.code, GrammarGivenUp.code), logging.INFO)
"""Log level of failed requests: as far as an engine can tell, clients cause them."""


class RequestBook:
    """Live requests, and ended attempts, for which later messages are dropped."""

    def __init__(
        self,
        card: EngineCard,
        scheduler: Scheduler,
        prefill: PrefillHooks,
        grammars: GrammarWait,
        stop_rules: StopRules,
        outbox: Outbox,
        counters: Counters,
    ) -> None:
        self.live: dict[RequestKey, Request] = {}
        self.counters = counters
        self._card = card
        self._scheduler = scheduler
        self._prefill = prefill
        self._grammars = grammars
        self._stop_rules = stop_rules
        self._outbox = outbox
        self._attempts: dict[str, int] = {}  # live requests' attempt
        self._transfers: dict[TransferKey, RequestKey] = {}  # live requests' transfers
        self._ended: OrderedDict[RequestKey, None] = OrderedDict()
        self._deadlines: list[tuple[float, RequestKey]] = []  # a heap: of live requests, and of others that are over

    def submit(self, router_id: str, submit: Submit, now: float, prepared: Prepared | None) -> None:
        """Accept a request, or answer why not."""
        key = (submit.request_id, submit.attempt)
        live = self._attempts.get(submit.request_id)
        if key in self._ended or (live is not None and live >= submit.attempt):
            self.counters.dropped_messages += 1
            return
        older = None if live is None else self.live[(submit.request_id, live)]
        try:
            self._check(router_id, submit, older, prepared)
        except InvalidRequest as error:
            self._refuse(router_id, key, error)
            return
        if older is not None:
            self.abort(older)
        root, keys = (root_of(self._card, submit), ()) if prepared is None else prepared[:2]
        request = Request(submit, router_id, root, now, keys)
        request.end_at = min(request.end_at, self._stop_rules.max_len)
        if logger.isEnabledFor(logging.DEBUG):
            sizes = len(submit.prompt_token_ids), len(submit.output_token_ids)
            logger.debug("request %s: %d prompt and %d output tokens, kv %s", request.name, *sizes, submit.kv)
        reason, stop_token_id = self._stop_rules.ended(request)
        if reason is not None:
            self._outbox(router_id, Finished(*key, reason, SourceCounts(), stop_token_id))
            self._remember(key)
            return
        if submit.until == "cached":
            try:
                lend(request, self._scheduler, self._prefill, now)
            except KVNotFound as error:
                self._refuse(router_id, key, error)
            self._remember(key)
            return
        try:
            may_start = self._grammars.add(request)
        except PdkvError as error:
            self._refuse(router_id, key, error)
            return
        self.live[key] = request
        self._attempts[submit.request_id] = submit.attempt
        self._transfers[request.transfer_key] = key
        self._watch(request)
        if may_start:
            self._scheduler.add(request)

    def _refuse(self, router_id: str, key: RequestKey, error: PdkvError) -> None:
        """Answer a Submit that cannot be served."""
        self._outbox(router_id, _failed(key, error))

    def take_grammars(self) -> None:
        """Queue requests whose grammar is ready; let those whose mask is ready continue."""
        for request, error in self._grammars.take_answers():
            if error is None:
                self._scheduler.add(request)
            else:
                logger.info("request %s failed: %s: %s", request.name, error.code, error)
                self._outbox(request.router_id, _failed(request.key, error))
                self.abort(request)
        if self._grammars.resume():
            self._scheduler.go_on()

    def _check(self, router_id: str, submit: Submit, older: Request | None, prepared: Prepared | None) -> None:
        """Raise InvalidRequest for a Submit that can never work, or that would take something of another request."""
        bounds = None if prepared is None else (prepared.lowest, prepared.highest)
        self._stop_rules.check(submit, has_connector=self._scheduler.external.connector is not None, bounds=bounds)
        if older is not None and older.router_id != router_id:
            raise InvalidRequest(f"request {submit.request_id} belongs to another router", param="request_id")
        transfer = TransferKey(submit.transfer_id, submit.attempt, lent=submit.until == "cached")
        if transfer in self._transfers or self._prefill.holds(transfer):
            raise InvalidRequest(f"transfer {submit.transfer_id} belongs to another request", param="transfer_id")
        if submit.handoff is not None and submit.handoff.transfer_id != submit.transfer_id:
            text = f"the hand-off is for transfer {submit.handoff.transfer_id}, expected {submit.transfer_id}"
            raise InvalidRequest(text, param="handoff")
        if submit.handoff is not None and submit.handoff.lent != (submit.kv == "handoff"):
            text = "a prompt that is handed off must read a loan, and any other one a hand-off"
            raise InvalidRequest(text, param="handoff")
        if submit.handoff is not None and submit.handoff.attempt > submit.attempt:
            text = f"the hand-off is of attempt {submit.handoff.attempt}, which is later than attempt {submit.attempt}"
            raise InvalidRequest(text, param="handoff")

    def receiver(self, message: Continue | KVTicket | KVHandoff | KVReady) -> Request | None:
        """The live request that a message is for. A hand-off, which keeps its attempt, is for any later one, too."""
        live = self._attempts.get(message.request_id, -1)
        is_for_live = live == message.attempt or (isinstance(message, KVHandoff) and live > message.attempt)
        return self.live[message.request_id, live] if live >= 0 and is_for_live else None

    def go_on(self, request: Request, token_ids: Sequence[int]) -> None:
        """Continue after the first token, which is known now; later tokens are drawn here."""
        try:
            self._stop_rules.check_continue(request, token_ids)
        except InvalidRequest as error:
            self.fail(request, error.code, str(error), False)
            return
        request.output_token_ids += token_ids
        self._scheduler.loads.wake(request)
        self._scheduler.go_on()  # it may be among the waiting ones

    def abort_attempt(self, router_id: str, key: RequestKey) -> None:
        """End that attempt, whether it is live, has ended, or is still to come."""
        request = self.live.get(key)
        if request is not None and request.router_id != router_id:
            self.counters.dropped_messages += 1
        elif request is not None:
            self.abort(request)
        elif self._attempts.get(key[0], -1) < key[1]:
            self._remember(key)

    def abort(self, request: Request) -> None:
        """End a request without an answer."""
        self._scheduler.external.aborted(request.transfer_key, cancel_sending=True)
        self._forget(request)

    def fail(self, request: Request, code: str, message: str, retryable: bool) -> None:
        """Tell the request's router why, and abort it."""
        logger.log(_FAILURE_LEVELS.get(code, logging.WARNING), "request %s failed: %s: %s", request.name, code, message)
        self._outbox(request.router_id, Failed(*request.key, code, message[:MAX_ERROR_CHARS], retryable))
        self.abort(request)

    def fail_rejected(self) -> None:
        """Fail requests whose load failed under the policy "fail"."""
        rejected, self._scheduler.loads.rejected = self._scheduler.loads.rejected, []
        for request, outcome in rejected:
            self.fail(request, outcome.code, f"the KV of the prompt could not be loaded: {outcome.code}", True)

    def _forget(self, request: Request) -> None:
        is_there = request.num_confirmed >= len(request.prompt_token_ids)  # the KV of all of its prompt
        if is_there and request.submit.cache_salt != PROBE_SALT:
            self.counters.add(request.sources())
        if not self._grammars.remove(request):
            self._scheduler.remove(request)
        del self.live[request.key]
        del self._attempts[request.submit.request_id]
        self._transfers.pop(request.transfer_key, None)
        self._remember(request.key)

    def _remember(self, key: RequestKey) -> None:
        self._ended[key] = None
        if len(self._ended) > MAX_TOMBSTONES:
            self._ended.popitem(last=False)

    def advance(self, drawn: Drawn, output: StepOutput, now: float) -> None:
        """Send out new tokens; the request ends, is handed off, or continues."""
        request, sampled, position, reason = drawn.request, drawn.sampled, drawn.position, drawn.reason
        key = request.key
        token_ids = request.output_token_ids[position:]
        logprobs = sampled.logprobs[: len(token_ids)] if sampled.logprobs is not None else None
        sources = request.sources() if position == 0 else None
        found = output.of_prompts.get(key, b"") if output.of_prompts else b""
        prompt_logprobs, pooled = (PromptLogprobs.of(found), b"") if isinstance(found, list) else (None, found)
        tokens = Tokens(key[0], key[1], position, token_ids, logprobs, prompt_logprobs, sources, pooled)
        self._outbox(request.router_id, tokens)
        if reason is not None:
            self._scheduler.external.finished(request)
            if request.ticket is not None:  # the KV is no longer needed
                self._scheduler.external.aborted(request.transfer_key, cancel_sending=True)
            guesses = request.num_accepted, request.num_rejected
            self._outbox(
                request.router_id,
                Finished(*key, reason, request.sources(), drawn.stop_token_id, *request.times(now), *guesses),
            )
            self._forget(request)
        elif request.submit.until == "first_token":
            self._scheduler.external.report_confirmed(request, last=True)
            decision = self._scheduler.external.finished(request)
            self._prefill.handed_off(request, decision, now)
            self._forget(request)

    def name_of(self, message: RouterToEngine) -> "RequestName | str":
        """The subject of a message, for a log line."""
        key = key_of(message)
        request = self.live.get(key) if key is not None else None
        if request is not None:
            return request.name
        if isinstance(message, Submit):
            return name_of(message)
        return RequestName(*key) if key is not None else "no request"

    def router_left(self, router_id: str) -> None:
        """Abort all requests of that router."""
        for request in [r for r in self.live.values() if r.router_id == router_id]:
            self.abort(request)

    def expire(self, now: float) -> None:
        """Fail requests past their deadline."""
        while self.next_deadline() <= now:
            request = self.live[heappop(self._deadlines)[1]]
            self.fail(request, RequestTimeout.code, f"the deadline of {request.submit.timeout_s} s passed", False)

    def next_deadline(self) -> float:
        """The earliest deadline of a live request; infinite: none has one."""
        while self._deadlines:
            deadline, key = self._deadlines[0]
            if key in self.live and self.live[key].deadline == deadline:
                return deadline
            heappop(self._deadlines)
        return inf

    def _watch(self, request: Request) -> None:
        """Enter a request's deadline. Deadlines of ended requests are removed once they are the majority."""
        heappush(self._deadlines, (request.deadline, request.key))
        if len(self._deadlines) > 2 * len(self.live) + 64:
            self._deadlines = sorted((request.deadline, request.key) for request in self.live.values())


def _failed(key: RequestKey, error: PdkvError) -> Failed:
    """Why a request cannot be served here. Another engine may have less to do."""
    param = error.param or "" if isinstance(error, InvalidRequest) else ""
    return Failed(*key, error.code, str(error)[:MAX_ERROR_CHARS], isinstance(error, ServerBusy), param)
