"""One engine: messages in, steps, messages out. The loop around it owns the clock and the sockets."""

import logging
from collections.abc import Callable, Sequence
from math import inf

from pdkv.base.log_limit import LogLimit
from pdkv.connectors.base import TransferOutcome
from pdkv.engine.grammar_wait import GrammarWait
from pdkv.engine.hooks import DecodeHooks, PrefillHooks
from pdkv.engine.intake import Prepared
from pdkv.engine.outbox import Outbox
from pdkv.engine.outside.cache_orders import CacheOrders
from pdkv.engine.outside.external import EndedSend, ExternalKV
from pdkv.engine.peers import PeerTable
from pdkv.engine.plan import StepOutput, StepPlan
from pdkv.engine.reports import Reports
from pdkv.engine.request import Request
from pdkv.engine.request_book import RequestBook
from pdkv.engine.scheduler import Scheduler
from pdkv.engine.stopping import StopRules
from pdkv.engine.worker.executor import Ended, Executor
from pdkv.errors import NonFiniteLogits, PdkvError, RankError
from pdkv.host.memory_limits import format_bytes
from pdkv.wire.frames import key_of
from pdkv.wire.kv import EngineCard, KVHandoff
from pdkv.wire.messages import (
    MAX_ERROR_CHARS,
    Abort,
    AskReport,
    Continue,
    EngineToRouter,
    Failed,
    KVReady,
    KVTicket,
    Peers,
    Release,
    Resync,
    RouterToEngine,
    Submit,
    Trial,
)
from pdkv.wire.profiles import Profile
from pdkv.wire.step_watch import StepWatch
from pdkv.wire.tiers import CacheOrder

logger = logging.getLogger(__name__)

EXPIRY_INTERVAL_S = 0.02
"""Seconds between checks of deadlines while steps follow one another; an idle engine sleeps until the next deadline."""

TRANSFER_POLL_S = 0.5
"""While transfers are pending, at least one empty step per this many seconds lets the connector check its own
deadlines.
"""

LOAD_INTERVAL_S = 0.1
"""Seconds between load reports of a busy engine."""


_NO_PROFILER = "this engine's steps cannot be profiled"


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
        self.prefill = prefill
        self.decode = decode
        self.grammars = grammars
        self.watch = watch
        self.reports = Reports(card, scheduler, decode, grammars, outbox)
        self.counters = self.reports.counters
        self.peers = PeerTable(card, scheduler.external.connector, executor, self.counters)
        self._book = RequestBook(card, scheduler, prefill, grammars, stop_rules, outbox, self.counters)
        self.requests = self._book.live
        self._outbox = outbox
        self._shutdown = shutdown
        self._next_expiry = 0.0
        self._next_load = 0.0
        self._log_limit = LogLimit()
        self._preemption_log_limit = LogLimit()
        self._said_short = False
        num_at_once = card.num_blocks // scheduler.kv.num_at_once(card.max_model_len)
        self._room = (
            f"the KV pool of {format_bytes(card.num_blocks * card.layout.block_bytes * card.tp)} has room for "
            f"{num_at_once} requests of the longest length, {card.max_model_len} tokens, --max-num-seqs for "
            f"{card.max_num_seqs}"
        )
        logger.info("%s", self._room)
        self._last_step = 0.0
        self._cache_orders = CacheOrders(scheduler.kv, scheduler.external, card.connector)

    # --- interface for the loop -----------------------------------------------------------------------------------

    @property
    def external(self) -> ExternalKV:
        """Loads, holds and quarantine."""
        return self.scheduler.external

    @property
    def has_work(self) -> bool:
        """Whether a step would change something now; otherwise wait for a message, `wake` or the next deadline."""
        return self.scheduler.queues.needs_step or self.external.has_news or self.grammars.has_answers

    def wake(self) -> None:
        """Settle what has ended, on the connector's notification. A step follows only if a request may continue.

        Raises what the executor raises: the engine is then lost.
        """
        self.settle(self.executor.ask_finished())
        self.scheduler.ask_again()

    def next_deadline(self) -> float | None:
        """The earliest time at which `step` must be called even if nothing else happens."""
        deadlines = [self._book.next_deadline()]
        others = self.scheduler.loads.next_deadline(), self.prefill.next_deadline(), self.scheduler.trials.deadline
        profile = None if self.executor.profiler is None else self.executor.profiler.deadline
        deadlines += [d for d in (*others, profile, self._cache_orders.deadline) if d is not None]
        if not self.external.is_idle:
            deadlines.append(self._last_step + TRANSFER_POLL_S)
        return max(first, self._next_expiry) if (first := min(deadlines)) < inf else None

    def step(self, now: float) -> None:
        """One step: schedule, execute, update. Raises what the executor raises: the engine is then lost."""
        self.finish_step(self.begin_step(now), now)

    def begin_step(self, now: float) -> StepOutput:
        """Schedule and execute."""
        self.settle_finished()
        return self.executor.execute(self.plan_step(now))

    def settle_finished(self) -> None:
        """Settle ended transfers before a plan, while the executor is idle, so that they count in this step, not after
        an empty one.
        """
        ended = self.executor.take_finished()
        if ended.transfers:
            self.settle(ended)

    def plan_step(self, now: float) -> StepPlan:
        """The executor's next step. Two planned steps may be unfinished."""
        self.expire(now)
        self._book.take_grammars()
        self._last_step = now
        self.scheduler.queues.needs_step = False
        num_preemptions = self.scheduler.num_preemptions
        plan = self.grammars.complete(self.scheduler.schedule(now))
        if self.scheduler.num_preemptions > num_preemptions:
            self._note_preemption(now)
        if self.scheduler.is_short_of_blocks and not self._said_short:
            self._said_short = True
            text = "requests wait for KV blocks: %s; a larger --kv-cache-memory lets more run at once"
            logger.warning(text, self._room)
        for new in plan.new:
            self.requests[new.key].begins(now)
        self._book.fail_rejected()
        self.watch.begin(plan.num_tokens, now)
        return plan

    def plan_loads(self, now: float) -> StepPlan | None:
        """A step that computes nothing and begins loads, behind any number of steps; None: none can begin."""
        plan = self.scheduler.schedule_loads(now)
        self._book.fail_rejected()
        if plan is not None:
            self.watch.begin(0, now)
        return plan

    def _note_preemption(self, now: float) -> None:
        """Log now and then which requests lost their KV blocks: the pool is too small for the running requests."""
        request, count = self.scheduler.last_preempted, self.scheduler.num_preemptions
        self.scheduler.last_preempted = None
        if request is not None and self._preemption_log_limit.passes(now):
            text = "request %s waits again: no KV block was left for more urgent ones (preemption %d since the start)"
            logger.info(text, request.name, count)

    def finish_step(self, output: StepOutput, now: float) -> None:
        """Update after a step: tokens leave, requests end or are handed off, transfers are settled."""
        self.counters.steps += 1
        if output.connector_stats is not None:
            self.external.worker_stats = output.connector_stats
        result = self.scheduler.update(output)
        for drawn in result.drawn:
            self._book.advance(drawn, output, now)
        for request in result.chunks:
            self.prefill.computed(request)
        for request in result.late:
            self.grammars.left_out(request)
        for request, failure in result.failed:
            self.counters.non_finite += failure.code == NonFiniteLogits.code
            self._book.fail(request, failure.code, failure.message, False)
        self._sends_ended(result.sends)
        self._book.fail_rejected()
        if result.computed:
            self.scheduler.compute_on()
        self.scheduler.note_step(result, self.watch.end(now), output.drafting_s)
        if output.drafter_tokens != (0, 0):
            self.scheduler.draft_counts.drafter_tokens = output.drafter_tokens

    def settle(self, ended: Ended) -> None:
        """Settle what ended between two steps."""
        if ended.stats is not None:
            self.external.worker_stats = ended.stats
        self._sends_ended(self.scheduler.settle(ended.transfers))
        self._book.fail_rejected()
        if ended.is_report:
            self.reports.answer()

    def _sends_ended(self, sends: Sequence[EndedSend]) -> None:
        for send in sends:
            self.prefill.sending_ended(*send)

    def take_messages(self, now: float) -> list[tuple[str, list[EngineToRouter]]]:
        """Messages for each router since the last call, including cache events and load."""
        self.reports.flush_events()
        if now >= self._next_load or not (self.has_work or self.watch.num_under_way):
            self._next_load = now + LOAD_INTERVAL_S
            self.reports.report_load()
        self.reports.sent()
        for router_id, answer in self._cache_orders.take_answers(now):
            self._outbox(router_id, answer)
        if (profiler := self.executor.profiler) is not None and (told := profiler.take()) is not None:
            self._outbox(*told)
        for router_id, message in self.scheduler.trials.take_messages(now):
            self._outbox(router_id, message)
        return self._outbox.take()

    def shutdown(self) -> None:
        """Stop workers and connector. Idempotent."""
        self.grammars.close()
        self._shutdown()

    # --- incoming messages ----------------------------------------------------------------------------------------

    def router_joined(self, router_id: str, epoch: str) -> None:
        """Note a router's Hello. A new epoch ends the requests and leases of that router's previous epoch only."""
        if self.reports.routers.get(router_id, epoch) != epoch:
            self.router_left(router_id)
        self.reports.join(router_id, epoch)

    def router_left(self, router_id: str) -> None:
        """End everything of that router."""
        self.reports.leave(router_id)
        self._book.router_left(router_id)
        self.prefill.router_left(router_id)
        self.scheduler.trials.router_left(router_id)
        self._cache_orders.router_left(router_id)
        self.peers.router_left(router_id)
        self.scheduler.queues.needs_step = True

    def handle_guarded(
        self, router_id: str, message: RouterToEngine, now: float, prepared: Prepared | None = None
    ) -> None:
        """Act on one message; if that raises, only the message's own request fails.

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
                name = self._book.name_of(message)
                logger.error("dropped a %s from router %s about %s: %s", kind, router_id, name, error, exc_info=trace)
            key = key_of(message)
            if key is not None:
                text = f"{kind} caused an error in the engine: {type(error).__name__}: {error}"
                code = error.code if isinstance(error, PdkvError) else PdkvError.code
                self._outbox(router_id, Failed(*key, code, text[:MAX_ERROR_CHARS], False))
                self._book.abort_attempt(router_id, key)  # if that fails, too, the engine restarts

    def handle(self, router_id: str, message: RouterToEngine, now: float, prepared: Prepared | None = None) -> None:
        """Act on one message; messages about an ended or unknown attempt are counted and dropped.

        Args:
            prepared: keys and token range of a Submit's tokens, if already computed.
        """
        if not isinstance(message, Continue | Release | AskReport):  # these report themselves whether anything follows
            self.scheduler.queues.needs_step = True
        match message:
            case Submit():
                self._book.submit(router_id, message, now, prepared)
            case Abort(request_id=request_id, attempt=attempt):
                self._book.abort_attempt(router_id, (request_id, attempt))
            case Peers(cards=cards, removed=removed):
                self.peers.take_cards(router_id, cards, removed)
            case Resync():
                self.reports.resync(router_id)
            case Continue() | KVTicket() | KVHandoff() | KVReady() | Release():
                request = None if isinstance(message, Release) else self._book.receiver(message)
                if request is not None and request.router_id == router_id:
                    self._deliver(request, message, now)
                elif not self.prefill.handle(router_id, message):
                    self.counters.dropped_messages += 1
                else:
                    self.scheduler.go_on()  # blocks may have been freed
            case CacheOrder():
                self._cache_orders.begin(router_id, message, now)
            case Profile():
                self._profile(router_id, message, now)
            case AskReport(number=number):
                self.reports.ask(router_id, number)
            case Trial():
                self.counters.dropped_messages += not self.scheduler.trials.answered(router_id, message)
            case _:
                self.counters.dropped_messages += 1

    def _profile(self, router_id: str, order: Profile, now: float) -> None:
        """Take an order for a profile, or refuse it."""
        profiler = self.executor.profiler
        refusal = order.failed("not_supported", _NO_PROFILER) if profiler is None else None
        refusal = refusal if profiler is None else profiler.begin(router_id, order, now)
        if refusal is not None:
            self._outbox(router_id, refusal)

    def _deliver(self, request: Request, message: RouterToEngine, now: float) -> None:
        """Pass a message to its live request."""
        match message:
            case Continue(token_ids=token_ids):
                if not request.output_token_ids and not request.in_worker:  # else it draws the token itself
                    self._book.go_on(request, token_ids)
            case KVTicket(ticket=ticket, number=number) if request.submit.kv == "handoff":
                request.ticket, request.ticket_number = ticket, number
                self.scheduler.waiting.got_ticket(request)
                self.external.report_confirmed(request, again=True)
            case KVHandoff() if message.transfer_id == request.submit.transfer_id and not message.lent:
                if request.kv == "await_peer":
                    self.scheduler.loads.handed_off(request, message, now)
            case KVReady() if request.kv == "handoff" and not request.borrows:
                pass  # its loan is over, which does not affect what it loads
            case KVReady(ok=ok, code=code):
                request.kv_ready = ok
                if not ok:
                    self.scheduler.loads.fail(request, TransferOutcome(code))
                    self._book.fail_rejected()
            case _:  # a ticket for an engine that sends nothing, or a hand-off of another transfer
                self.counters.dropped_messages += 1

    def expire(self, now: float) -> None:
        """Fail requests past their deadline; let loads and leases expire."""
        if now < self._next_expiry:
            return
        self._next_expiry = now + EXPIRY_INTERVAL_S
        self._book.expire(now)
        self.scheduler.loads.expire(now)
        self._book.fail_rejected()
        self.prefill.expire(now)
        if self.scheduler.trials.expire(now):
            logger.warning("a router did not say whether a request may run alone; it runs with others")
