"""One engine: messages in, steps, messages out. The loop around it owns the clock and the sockets."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pdkv.base.log_fields import RequestName
from pdkv.base.log_limit import LogLimit
from pdkv.connectors.base import TransferKey, TransferOutcome
from pdkv.engine.grammar_wait import GrammarWait
from pdkv.engine.hooks import DecodeHooks, PrefillHooks
from pdkv.engine.intake import Prepared, root_of
from pdkv.engine.lending import lend
from pdkv.engine.outside.cache_orders import CacheOrders
from pdkv.engine.outside.external import EndedSend, ExternalKV
from pdkv.engine.outside.lower_tiers import LowerTiers
from pdkv.engine.plan import StepOutput, StepPlan
from pdkv.engine.request import Request, name_of
from pdkv.engine.scheduler import Drawn, Scheduler
from pdkv.engine.stopping import StopRules
from pdkv.engine.worker.executor import Ended, Executor
from pdkv.errors import (
    GrammarGivenUp,
    InvalidRequest,
    KVNotFound,
    NonFiniteLogits,
    PdkvError,
    RankError,
    RequestTimeout,
    ServerBusy,
)
from pdkv.wire.frames import key_of
from pdkv.wire.lending import lent_id
from pdkv.wire.messages import (
    MAX_ERROR_CHARS,
    PROBE_SALT,
    Abort,
    AskReport,
    CacheCleared,
    CacheOrder,
    Continue,
    EngineCard,
    EngineToRouter,
    Failed,
    Finished,
    KVEvent,
    KVEvents,
    KVHandoff,
    KVReady,
    KVTicket,
    LoadReport,
    Peers,
    PromptLogprobs,
    Release,
    RequestKey,
    Resync,
    RouterToEngine,
    SourceCounts,
    Submit,
    Tokens,
    Trial,
)
from pdkv.wire.step_watch import StepWatch

logger = logging.getLogger(__name__)

MAX_KEYS_PER_EVENTS = 16_384
"""Block keys that one KVEvents tells; more are told in parts."""

MAX_TOMBSTONES = 4096
"""Aborts that overtook their Submit, and ended attempts, that are remembered."""

EXPIRY_INTERVAL_S = 0.02
"""Deadlines are looked at this often while steps follow each other; an idle engine sleeps until the next one."""

TRANSFER_POLL_S = 0.5
"""While transfers are pending, an empty step at least this often lets the connector see its own deadlines."""

LOAD_INTERVAL_S = 0.1
"""How often a busy engine reports its load."""


_FAILURE_LEVELS = dict.fromkeys((RequestTimeout.code, InvalidRequest.code, GrammarGivenUp.code), logging.INFO)
"""Of the log line of a request that failed: those are the client's doing, as far as an engine can tell."""


class Outbox:
    """Messages by router, in order."""

    def __init__(self) -> None:
        self._messages: dict[str, list[EngineToRouter]] = {}

    def __call__(self, router_id: str, message: EngineToRouter) -> None:
        self._messages.setdefault(router_id, []).append(message)

    def take(self) -> list[tuple[str, list[EngineToRouter]]]:
        """All messages since the last call."""
        messages, self._messages = self._messages, {}
        return list(messages.items())


@dataclass(slots=True)
class Counters:
    """Since start."""

    computed: int = 0
    recomputed: int = 0
    local_hit: int = 0
    remote: int = 0
    store: int = 0
    dropped_messages: int = 0
    steps: int = 0
    non_finite: int = 0  # requests

    def add(self, sources: SourceCounts) -> None:
        """Count one choice's prompt tokens by source."""
        self.computed += sources.computed
        self.recomputed += sources.recomputed
        self.local_hit += sources.local_hit
        self.remote += sources.remote
        self.store += sources.store


class Workers(Protocol):
    """Who is told which engines came and went: the executor, or who passes it on to the executor's thread."""

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None: ...


class EngineCore:
    """Schedule → execute → update over the requests of any number of routers. Single-threaded."""

    def __init__(
        self,
        *,
        card: EngineCard,
        scheduler: Scheduler,
        executor: Executor,
        prefill: PrefillHooks,
        decode: DecodeHooks,
        outbox: Outbox,
        stop_rules: StopRules,
        grammars: GrammarWait,
        watch: StepWatch,
        shutdown: Callable[[], None],
    ) -> None:
        self.card = card
        self.scheduler = scheduler
        self.executor = executor
        self.workers: Workers = executor
        self.prefill = prefill
        self.decode = decode
        self.grammars = grammars
        self.counters = Counters()
        self.watch = watch
        self.requests: dict[RequestKey, Request] = {}
        self._attempts: dict[str, int] = {}  # live requests' attempt
        self._transfers: dict[TransferKey, RequestKey] = {}  # live requests' transfers
        self._ended: OrderedDict[RequestKey, None] = OrderedDict()
        self._outbox = outbox
        self._stop_rules = stop_rules
        self._shutdown = shutdown
        self._routers: dict[str, str] = {}
        self._cards: dict[str, Sequence[EngineCard]] = {}  # by router, the last that spoke at the end
        self._peers: dict[str, EngineCard] = {}
        self._dirty = False
        self._next_expiry = 0.0
        self._next_load = 0.0
        self._log_limit = LogLimit()
        self._preemption_log_limit = LogLimit()
        self._last_step = 0.0
        self._last_load: LoadReport | None = None
        self._event_number = 0
        self._lower_tiers = LowerTiers()
        self._cache_orders = CacheOrders(scheduler.kv, scheduler.external, card.connector)
        self._asked_reports: dict[str, int] = {}  # number of the last AskReport, by router
        self._begun_reports: dict[str, int] | None = None  # of those that the ranks' answer is awaited for
        self._told: set[str] = set()  # routers that were told the whole cache since messages left last

    # --- the loop's view ------------------------------------------------------------------------------------------

    @property
    def external(self) -> ExternalKV:
        """Loads, holds and quarantine."""
        return self.scheduler.external

    @property
    def has_work(self) -> bool:
        """Whether a step would change something now; otherwise wait for a message, `wake` or the next deadline."""
        scheduled = self.scheduler.queues.needs_step or self.external.has_news
        return self._dirty or scheduled or self.grammars.has_answers

    def wake(self) -> None:
        """The connector's notify: what has ended is settled now. A step follows only where somebody may go on.

        Raises what the executor raises: the engine is then lost.
        """
        self.settle(self.executor.ask_finished())
        self.scheduler.ask_again()

    def next_deadline(self) -> float | None:
        """The earliest time at which `step` must be called although nothing else happens."""
        deadlines = [r.deadline for r in self.requests.values()]
        others = self.scheduler.loads.next_deadline(), self.prefill.next_deadline(), self.scheduler.trials.deadline
        deadlines += [d for d in (*others, self._cache_orders.deadline) if d is not None]
        if not self.external.is_idle:
            deadlines.append(self._last_step + TRANSFER_POLL_S)
        return max(min(deadlines), self._next_expiry) if deadlines else None

    def step(self, now: float) -> None:
        """One step: schedule, execute, update. Raises what the executor raises: the engine is then lost."""
        self.finish_step(self.begin_step(now), now)

    def begin_step(self, now: float) -> StepOutput:
        """Schedule and execute."""
        self.settle_finished()
        return self.executor.execute(self.plan_step(now))

    def settle_finished(self) -> None:
        """Before a plan, where the executor is idle: what transfers bring is in this step, not behind an empty one."""
        ended = self.executor.take_finished()
        if ended.transfers:
            self.settle(ended)

    def plan_step(self, now: float) -> StepPlan:
        """What the executor shall do next, in the order in which this says it. Two steps may have been planned that are
        not finished yet.
        """
        self.expire(now)
        self._take_grammars()
        self._dirty = False
        self._last_step = now
        self.scheduler.queues.needs_step = False
        num_preemptions = self.scheduler.num_preemptions
        plan = self.grammars.complete(self.scheduler.schedule(now))
        if self.scheduler.num_preemptions > num_preemptions:
            self._note_preemption(now)
        for new in plan.new:
            self.requests[new.key].begins(now)
        self._fail_rejected()
        self.watch.begin(plan.num_tokens, now)
        return plan

    def _note_preemption(self, now: float) -> None:
        """Say, now and then, who lost its KV blocks: the pool is too small for what runs."""
        request, count = self.scheduler.last_preempted, self.scheduler.num_preemptions
        self.scheduler.last_preempted = None
        if request is not None and self._preemption_log_limit.passes(now):
            text = "request %s waits again: no KV block was left for more urgent ones (preemption %d since the start)"
            logger.info(text, request.name, count)

    def finish_step(self, output: StepOutput, now: float) -> None:
        """Update: tokens leave, requests end or are handed off, transfers are settled."""
        self.counters.steps += 1
        if output.connector_stats is not None:
            self.external.worker_stats = output.connector_stats
        result = self.scheduler.update(output)
        for drawn in result.drawn:
            self._advance(drawn, output, now)
        for request in result.late:
            self.grammars.left_out(request)
        for request, failure in result.failed:
            self.counters.non_finite += failure.code == NonFiniteLogits.code
            self._fail(request, failure.code, failure.message, False)
        self._sends_ended(result.sends)
        self._fail_rejected()
        if result.computed:
            self.scheduler.compute_on()
        self.watch.end(now)

    def settle(self, ended: Ended) -> None:
        """What ended between two steps."""
        if ended.stats is not None:
            self.external.worker_stats = ended.stats
        self._sends_ended(self.scheduler.settle(ended.transfers))
        self._fail_rejected()
        if ended.is_report:
            load, routers = self._make_load(), self._begun_reports or {}
            for router_id, number in routers.items():
                self._outbox(router_id, msgspec.structs.replace(load, answers=number))
            self._begun_reports = None

    def begin_report(self) -> bool:
        """Whether routers wait for a report, and none is under way: `settle` is to get one answer of the ranks."""
        if not self._asked_reports or self._begun_reports is not None:
            return False
        self._begun_reports, self._asked_reports = self._asked_reports, {}
        return True

    def _sends_ended(self, sends: Sequence[EndedSend]) -> None:
        for send in sends:
            self.prefill.sending_ended(*send)

    def take_messages(self, now: float) -> list[tuple[str, list[EngineToRouter]]]:
        """Messages for each router since the last call, cache events and load among them."""
        self._flush_events()
        if now >= self._next_load or not (self.has_work or self.watch.num_under_way):
            self._next_load = now + LOAD_INTERVAL_S
            self._report_load()
        self._told.clear()
        for router_id, answer in self._cache_orders.take_answers(now):
            self._outbox(router_id, answer)
        for router_id, message in self.scheduler.trials.take_messages(now):
            self._outbox(router_id, message)
        return self._outbox.take()

    def shutdown(self) -> None:
        """Stop workers and connector. Idempotent."""
        self.grammars.close()
        self._shutdown()

    # --- messages in ----------------------------------------------------------------------------------------------

    def router_joined(self, router_id: str, epoch: str) -> None:
        """A router said Hello; a new epoch ends only its own predecessor's requests and leases."""
        known = self._routers.get(router_id)
        if known is not None and known != epoch:
            self.router_left(router_id)
        self._routers.pop(router_id, None)  # it needs no events from before its snapshot
        self._flush_events()
        self._routers[router_id] = epoch
        self._send_snapshot(router_id)
        self._outbox(router_id, self._make_load())

    def router_left(self, router_id: str) -> None:
        """End everything of that router."""
        self._routers.pop(router_id, None)
        for request in [r for r in self.requests.values() if r.router_id == router_id]:
            self._abort(request)
        self.prefill.router_left(router_id)
        self.scheduler.trials.router_left(router_id)
        self._cache_orders.router_left(router_id)
        for numbers in (self._asked_reports, self._begun_reports or {}):
            numbers.pop(router_id, None)
        if self._cards.pop(router_id, None) is not None:
            self._update_peers()
        self._dirty = True

    def handle_guarded(
        self, router_id: str, message: RouterToEngine, now: float, prepared: Prepared | None = None
    ) -> None:
        """Act on one message; one that this code cannot stand fails its own request and nothing else.

        Raises:
            RankError: another rank failed.
        """
        try:
            self.handle(router_id, message, now, prepared)
        except RankError:
            raise
        except Exception as error:
            self.counters.dropped_messages += 1
            kind = type(message).__name__
            if self._log_limit.passes(now):
                trace = None if isinstance(error, PdkvError) else error
                name = self._name_of(message)
                logger.error("dropped a %s from router %s about %s: %s", kind, router_id, name, error, exc_info=trace)
            key = key_of(message)
            if key is not None:
                text = f"{kind} caused an error in the engine: {type(error).__name__}: {error}"
                code = error.code if isinstance(error, PdkvError) else PdkvError.code
                self._outbox(router_id, Failed(*key, code, text[:MAX_ERROR_CHARS], False))
                self._on_abort(router_id, key)  # if that fails, too, the books are wrong: the engine starts anew

    def handle(self, router_id: str, message: RouterToEngine, now: float, prepared: Prepared | None = None) -> None:
        """Act on one message; what belongs to an ended or unknown attempt is counted and dropped.

        Args:
            prepared: what is known already of a Submit's tokens.
        """
        if not isinstance(message, Continue | Release | AskReport):  # those say themselves whether anything follows
            self._dirty = True
        match message:
            case Submit():
                self._submit(router_id, message, now, prepared)
            case Abort(request_id=request_id, attempt=attempt):
                self._on_abort(router_id, (request_id, attempt))
            case Peers(cards=cards):
                self._take_cards(router_id, cards)
            case Resync():
                if router_id in self._routers and router_id not in self._told:
                    self._send_snapshot(router_id)
            case Continue() | KVTicket() | KVHandoff() | KVReady() | Release():
                request = (
                    None if isinstance(message, Release) else self.requests.get((message.request_id, message.attempt))
                )
                if request is not None and request.router_id == router_id:
                    self._deliver(request, message)
                elif not self.prefill.handle(router_id, message):
                    self.counters.dropped_messages += 1
                else:
                    self.scheduler.go_on()  # blocks may have come free
            case CacheOrder():
                self._cache_orders.begin(router_id, message, now)
            case AskReport(number=number):
                self._asked_reports[router_id] = number
            case Trial():
                self.counters.dropped_messages += not self.scheduler.trials.answered(router_id, message)
            case _:
                self.counters.dropped_messages += 1

    def _deliver(self, request: Request, message: RouterToEngine) -> None:
        """News about a live request."""
        match message:
            case Continue(token_ids=token_ids):
                if not request.output_token_ids and not request.in_worker:  # else it draws the token itself
                    self._continue(request, token_ids)
            case KVTicket(ticket=ticket, number=number) if request.submit.kv == "handoff":
                request.ticket, request.ticket_number = ticket, number
                self.external.report_confirmed(request, again=True)
            case KVHandoff() if message.transfer_id == request.submit.transfer_id:
                if request.kv == "await_peer":
                    request.handoff = message
            case KVReady() if request.kv == "handoff" and not request.borrows:
                pass  # its loan is over, and what it loads has nothing to do with that
            case KVReady(ok=ok, code=code):
                request.kv_ready = ok
                if not ok:
                    self.scheduler.loads.fail(request, TransferOutcome(code))
                    self._fail_rejected()
            case _:  # a ticket for who sends nothing, a hand-off of another transfer
                self.counters.dropped_messages += 1

    def _continue(self, request: Request, token_ids: Sequence[int]) -> None:
        """The first token is known; what follows is drawn here."""
        try:
            self._stop_rules.check_continue(request, token_ids)
        except InvalidRequest as error:
            self._fail(request, error.code, str(error), False)
            return
        request.output_token_ids += token_ids
        self.scheduler.loads.wake(request)
        self.scheduler.go_on()  # it may be among those that wait

    def _submit(self, router_id: str, submit: Submit, now: float, prepared: Prepared | None) -> None:
        key = (submit.request_id, submit.attempt)
        live = self._attempts.get(submit.request_id)
        if key in self._ended or (live is not None and live >= submit.attempt):
            self.counters.dropped_messages += 1
            return
        older = None if live is None else self.requests[(submit.request_id, live)]
        try:
            self._check(router_id, submit, older, prepared)
        except InvalidRequest as error:
            self._refuse(router_id, key, error)
            return
        if older is not None:
            self._abort(older)
        root, keys = (root_of(self.card, submit), ()) if prepared is None else prepared[:2]
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
                lend(request, self.scheduler, self.prefill, now)
            except KVNotFound as error:
                self._refuse(router_id, key, error)
            self._remember(key)
            return
        try:
            may_start = self.grammars.add(request)
        except PdkvError as error:
            self._refuse(router_id, key, error)
            return
        self.requests[key] = request
        self._attempts[submit.request_id] = submit.attempt
        self._transfers[request.transfer_key] = key
        if may_start:
            self.scheduler.add(request)

    def _refuse(self, router_id: str, key: RequestKey, error: PdkvError) -> None:
        """A Submit cannot be served."""
        self._outbox(router_id, _failed(key, error))

    def _take_grammars(self) -> None:
        """Those whose grammar is there wait with all others from now on; those whose mask is there go on."""
        for request, error in self.grammars.take_answers():
            if error is None:
                self.scheduler.add(request)
            else:
                logger.info("request %s failed: %s: %s", request.name, error.code, error)
                self._outbox(request.router_id, _failed(request.key, error))
                self._abort(request)
        if self.grammars.resume():
            self.scheduler.go_on()

    def _check(self, router_id: str, submit: Submit, older: Request | None, prepared: Prepared | None) -> None:
        """Raises InvalidRequest for a Submit that can never work, or that would take what is another request's."""
        bounds = None if prepared is None else (prepared.lowest, prepared.highest)
        self._stop_rules.check(submit, has_connector=self.external.connector is not None, bounds=bounds)
        if older is not None and older.router_id != router_id:
            raise InvalidRequest(f"request {submit.request_id} belongs to another router", param="request_id")
        transfer = (submit.transfer_id, submit.attempt)
        if transfer in self._transfers or self.prefill.holds(transfer):
            raise InvalidRequest(f"transfer {submit.transfer_id} belongs to another request", param="transfer_id")
        wanted = lent_id(submit.transfer_id) if submit.kv == "handoff" else submit.transfer_id
        if submit.handoff is not None and submit.handoff.transfer_id != wanted:
            text = f"the hand-off is for transfer {submit.handoff.transfer_id}, not for {wanted}"
            raise InvalidRequest(text, param="handoff")
        if submit.handoff is not None and submit.handoff.attempt > submit.attempt:
            text = f"the hand-off is of attempt {submit.handoff.attempt}, which comes after attempt {submit.attempt}"
            raise InvalidRequest(text, param="handoff")

    def _name_of(self, message: RouterToEngine) -> "RequestName | str":
        """What a message is about, for a log line."""
        key = key_of(message)
        request = self.requests.get(key) if key is not None else None
        if request is not None:
            return request.name
        if isinstance(message, Submit):
            return name_of(message)
        return RequestName(*key) if key is not None else "no request"

    def _on_abort(self, router_id: str, key: RequestKey) -> None:
        request = self.requests.get(key)
        if request is not None and request.router_id != router_id:
            self.counters.dropped_messages += 1
        elif request is not None:
            self._abort(request)
        elif self._attempts.get(key[0], -1) < key[1]:
            self._remember(key)

    def _take_cards(self, router_id: str, cards: Sequence[EngineCard]) -> None:
        """A router tells all engines that it knows. Raises what the connector raises; then all is as it was before."""
        before = dict(self._cards)
        self._cards.pop(router_id, None)
        self._cards[router_id] = cards
        try:
            self._update_peers()
        except Exception:
            self._cards = before
            raise

    def _update_peers(self) -> None:
        """Connect to new incarnations and tear down those that no router knows any more."""
        cards = [card for known in self._cards.values() for card in known]
        peers = {card.epoch: card for card in cards if card.engine != self.card.engine}
        added = [card for epoch, card in peers.items() if epoch not in self._peers]
        removed = [card for epoch, card in self._peers.items() if epoch not in peers]
        if self.external.connector is not None:
            self.external.connector.update_peers(list(peers.values()))
            self.workers.update_peers(added, removed)
        self._peers = peers

    def peers_refused(self, added: Sequence[EngineCard], removed: Sequence[EngineCard], error: Exception) -> None:
        """The workers could not stand that change, which they were told of a while ago: the next one says it again."""
        self.counters.dropped_messages += 1
        logger.error("the connector's workers refused a change of peers: %s", error, exc_info=error)
        for card in added:
            self._peers.pop(card.epoch, None)
        self._peers.update((card.epoch, card) for card in removed)

    # --- requests end ---------------------------------------------------------------------------------------------

    def _advance(self, drawn: Drawn, output: StepOutput, now: float) -> None:
        """New tokens leave; the request ends, is handed off, or goes on."""
        request, sampled, position, reason = drawn.request, drawn.sampled, drawn.position, drawn.reason
        key = request.key
        token_ids = request.output_token_ids[position:]
        logprobs = sampled.logprobs[: len(token_ids)] if sampled.logprobs is not None else None
        sources = request.sources() if position == 0 else None
        of_prompt = output.prompt_logprobs.get(key) if output.prompt_logprobs else None
        prompt_logprobs = PromptLogprobs.of(of_prompt) if of_prompt is not None else None
        tokens = Tokens(key[0], key[1], position, token_ids, logprobs, prompt_logprobs, sources)
        self._outbox(request.router_id, tokens)
        if reason is not None:
            self.external.finished(request)
            if request.ticket is not None:  # nobody waits for the KV any more
                self.external.aborted(request.transfer_key, cancel_sending=True)
            self._outbox(
                request.router_id, Finished(*key, reason, request.sources(), drawn.stop_token_id, *request.times(now))
            )
            self._end(request)
        elif request.submit.until == "first_token":
            self.external.report_confirmed(request, last=True)
            decision = self.external.finished(request)
            self.prefill.handed_off(request, decision, now)
            self._end(request)

    def _end(self, request: Request) -> None:
        if request.submit.cache_salt != PROBE_SALT:
            self.counters.add(request.sources())
        self._forget(request)

    def _abort(self, request: Request) -> None:
        self.external.aborted(request.transfer_key, cancel_sending=True)
        self._forget(request)

    def _fail(self, request: Request, code: str, message: str, retryable: bool) -> None:
        logger.log(_FAILURE_LEVELS.get(code, logging.WARNING), "request %s failed: %s: %s", request.name, code, message)
        self._outbox(request.router_id, Failed(*request.key, code, message[:MAX_ERROR_CHARS], retryable))
        self._abort(request)

    def _fail_rejected(self) -> None:
        """Requests whose load failed under the policy "fail"."""
        rejected, self.scheduler.loads.rejected = self.scheduler.loads.rejected, []
        for request, outcome in rejected:
            self._fail(request, outcome.code, f"the KV of the prompt could not be loaded: {outcome.code}", True)

    def _forget(self, request: Request) -> None:
        if not self.grammars.remove(request):
            self.scheduler.remove(request)
        del self.requests[request.key]
        del self._attempts[request.submit.request_id]
        self._transfers.pop(request.transfer_key, None)
        self._remember(request.key)

    def _remember(self, key: RequestKey) -> None:
        self._ended[key] = None
        if len(self._ended) > MAX_TOMBSTONES:
            self._ended.popitem(last=False)

    def expire(self, now: float) -> None:
        """Fail requests past their deadline; let loads and leases expire."""
        if now < self._next_expiry:
            return
        self._next_expiry = now + EXPIRY_INTERVAL_S
        for request in [r for r in self.requests.values() if r.deadline <= now]:
            self._fail(request, RequestTimeout.code, f"the deadline of {request.submit.timeout_s} s passed", False)
        self.scheduler.loads.expire(now)
        self._fail_rejected()
        self.prefill.expire(now)
        if self.scheduler.trials.expire(now):
            logger.warning("a router did not say whether a request may run alone; it runs as others do")

    # --- reports --------------------------------------------------------------------------------------------------

    def _flush_events(self) -> None:
        """Tell all routers what entered and left the cache, and tiers below it, since they were told last."""
        pool = self.scheduler.kv.pool
        if pool.events:
            events, pool.events = pool.events, []
            self._event_number += 1
            for part in _parts(self._event_number, events):
                for router_id in self._routers:
                    self._outbox(router_id, part)
        tiers = self.external.take_tier_events(self.card.connector)
        if tiers:
            for told in self._lower_tiers.update(tiers):
                for router_id in self._routers:
                    self._outbox(router_id, told)

    def _send_snapshot(self, router_id: str) -> None:
        """Tell one router the whole cache, under the number of the last events, and what is known of tiers below."""
        self._told.add(router_id)
        for told in self._lower_tiers.snapshot():
            self._outbox(router_id, told)
        for part in _parts(self._event_number, self.scheduler.kv.pool.snapshot_events()):
            self._outbox(router_id, part)

    def _make_load(self) -> LoadReport:
        loads, counters = self.decode.counts(), self.counters
        scheduler = self.scheduler
        return LoadReport(
            waiting=len(scheduler.waiting) + len(self.external.loads) + self.grammars.num_waiting,
            running=len(scheduler.running),
            blocks=scheduler.kv.pool.counts(),
            sources=SourceCounts(
                counters.computed, counters.recomputed, counters.local_hit, counters.remote, counters.store
            ),
            preemptions=scheduler.num_preemptions,
            load_failures=loads.num_failures,
            bytes_received=loads.bytes_received,
            dropped_messages=counters.dropped_messages + self.external.num_unknown_results,
            transfer_seconds=loads.transfer_seconds,
            steps=counters.steps,
            damaged_values=self.external.num_damaged,
            partial_loads=loads.num_partial,
            non_finite_requests=counters.non_finite,
            connectors=self.external.get_stats(self.card.connector),
            connector_problem=self.external.problem,
        )

    def _report_load(self) -> None:
        load = self._make_load()
        if load != self._last_load:
            self._last_load = load
            for router_id in self._routers:
                self._outbox(router_id, load)


def _failed(key: RequestKey, error: PdkvError) -> Failed:
    """Why a request cannot be served here. Another engine may have less to do."""
    param = error.param or "" if isinstance(error, InvalidRequest) else ""
    return Failed(*key, error.code, str(error)[:MAX_ERROR_CHARS], isinstance(error, ServerBusy), param)


def _parts(number: int, events: Sequence[KVEvent]) -> list[KVEvents]:
    """The events under one number, in messages of about MAX_KEYS_PER_EVENTS keys."""
    parts: list[list[KVEvent]] = [[]]
    num_keys = 0
    for event in events:
        if num_keys >= MAX_KEYS_PER_EVENTS:
            parts.append([])
            num_keys = 0
        parts[-1].append(event)
        num_keys += 1 if isinstance(event, CacheCleared) else len(event.keys)
    last = len(parts) - 1
    return [KVEvents(number, part, more=i < last) for i, part in enumerate(parts)]
