"""A bounded queue of generations in front of dispatch, from which engines get as much as they can take
(docs/admission.md).

A `Visit` is one request's stay. If the queue is empty and there is room, a generation begins at once, in the same turn
of the event loop; otherwise it waits for its turn (`fair_queue.py`) until its deadline or until the visit is closed.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import msgspec
from starlette.types import Scope

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.base.clock import MONOTONIC
from pdkv.config import AdmissionConfig
from pdkv.errors import (
    Draining,
    EngineUnavailable,
    InvalidRequest,
    MalformedMessage,
    PdkvError,
    RequestAborted,
    RequestTimeout,
    TooManyRequests,
    Unauthorized,
)
from pdkv.router.admission.desk import Asked, Deliver, Replay, Terms
from pdkv.router.admission.fair_queue import FairQueue, Flow, Turns, Waiting
from pdkv.router.admission.tenants import ANONYMOUS, TENANT, Grant, Tenant
from pdkv.router.engines.books import EXPECTED_OUTPUT, expected_output
from pdkv.router.request import GenerateRequest

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Dispatcher, Generation
    from pdkv.router.generations.fallback import Fallback

logger = logging.getLogger(__name__)

_STARTS_IN_A_ROW = 16
"""The most generations that begin in one turn of the event loop, so that other callbacks do not wait for hundreds."""

PLACE_COST = 64
"""Tokens charged for each queued generation besides its own: the cost to others of the place it takes in the engines.
Without it, a tenant with many tiny requests would get every place.
"""

_RATE_WINDOW_S = 10.0
_MAX_RETRY_AFTER_S = 60.0


class _Waiter:
    """A generation that has not begun."""

    __slots__ = ("began", "cost", "deliver", "future", "request", "visit")

    def __init__(self, visit: "Visit", request: GenerateRequest, deliver: Deliver, now: float) -> None:
        self.visit = visit
        self.request = request
        self.deliver = deliver
        self.began = now
        self.cost = cost_of(request)  # that its tenant is charged for its turn
        self.future: asyncio.Future[Generation | PdkvError] = asyncio.get_running_loop().create_future()

    def end(self, result: "Generation | PdkvError") -> None:
        """Wake the waiting task. Idempotent."""
        if not self.future.done():
            self.future.set_result(result)


class Admission:
    """The queue of one router. Lives in the dispatcher's event loop."""

    def __init__(
        self,
        dispatcher: "Dispatcher",
        config: AdmissionConfig | None = None,
        *,
        clock: Callable[[], float] = MONOTONIC.now,
    ) -> None:
        self.config = config or AdmissionConfig()
        self.anonymous = Tenant(ANONYMOUS, Grant(best_priority=self.config.best_priority, fallback=True), clock)
        self.num_pending = 0  # choices that have arrived but not begun: waiting now, or later
        self.pending_tokens = 0  # prompt tokens of those
        self.num_full = 0  # requests refused
        self.observe_wait: Callable[[float], None] = lambda seconds: None
        self.objectives = self.config.priorities
        self.pools: dict[str, Admission] = {}  # the queues of pools, which have no arrivals of their own
        self._dispatcher = dispatcher
        self._clock = clock
        self._queue: FairQueue[_Waiter] = FairQueue()
        self._scheduled = False
        self.draining = ""  # why no new requests are taken; empty if they are
        self._rate = 0.0  # tokens per second that began recently
        self._rate_at = clock()
        self._busy_s = self._num_begun = 0.0  # seconds for which lately something waited, and choices that began then
        self._seen_at = self._rate_at
        self._may_leave: dict[_Waiter, None] = {}  # those in the queue that another deployment may have
        dispatcher.changes.on_notify = self._on_room
        self.fallback.queue = lambda: (self.predicted_wait_s, self.is_full)

    # --- arrivals -------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Generations in the queue."""
        return len(self._queue)

    def drain(self, why: str = "the server is stopping") -> None:
        """Take no new requests from now on: they get a 503. Requests that have arrived are served. Idempotent."""
        self.draining = why

    def resume(self) -> None:
        """Take requests again."""
        self.draining = ""

    async def receive(self, scope: Scope) -> "Visit":
        """As `arrive`, for the tenant in an ASGI scope: of the `Desk`, which may be in another process."""
        return self.arrive(scope.get(TENANT) or self.anonymous)

    def arrive(self, tenant: Tenant) -> "Visit":
        """Admit a request, when only its tenant is known.

        Raises:
            Draining: no new requests are taken.
            TooManyRequests: the queue is full, or the tenant has as many requests as it may have.
        """
        if self.draining:
            raise Draining(f"{self.draining}: try again", retry_after_s=1.0)
        most = self.config
        is_full = self.num_pending >= most.max_queued_requests or self.pending_tokens >= most.max_queued_tokens
        if is_full and not self.pools and not self._may_still_leave(tenant.grant.fallback):
            self._refuse()
        tenant.enter()
        return Visit(self, tenant)

    @property
    def fallback(self) -> "Fallback":
        """What decides whether requests go to another deployment."""
        return self._dispatcher.fallback

    def of_pool(self, name: str) -> "Admission":
        """The queue of a pool; of "", this one. Raises EngineUnavailable for a pool without engines that serve."""
        if not name:
            return self
        if name not in self.pools:
            raise MalformedMessage(f"a request for pool {name!r}, which is not there")
        if (dispatcher := self.pools[name]._dispatcher).is_down():
            raise EngineUnavailable(f"the pool {name!r} serves no request now: {dispatcher.fault}")
        return self.pools[name]

    @property
    def is_full(self) -> bool:
        """Whether not even a tenant without other requests has a place for one more (`hold`)."""
        choices, tokens = (self.num_pending + 2, self.pending_tokens + 2) if self.num_pending else (0, 0)
        return choices > self.config.max_queued_requests or tokens > self.config.max_queued_tokens

    def _may_still_leave(self, is_allowed: bool, num_choices: int = 1) -> bool:
        """Whether a request that finds no place goes elsewhere, with all of its choices."""
        if not is_allowed or self.fallback.engine is None:
            return False
        self.fallback.look(now := self._clock())
        return self.fallback.cause != "" and self.fallback.is_open(now, num_choices)

    def may_leave(self, tenant: Tenant, asked: Asked) -> bool:
        """Whether another deployment may have a request.

        Raises:
            EngineUnavailable, TooManyRequests: another one sent it, and it is no better here.
        """
        if not asked.wishes.num_hops:
            if (there := self.fallback.engine) is None or not tenant.grant.fallback:
                return False
            lacks = there.card.lacks if there.card is not None else ["cache_salt"]  # before it is known
            return not (asked.cache_salt and "cache_salt" in lacks)
        if self._dispatcher.is_down():
            raise EngineUnavailable("no engine can serve here, where another deployment's fallback has sent this")
        if self.fallback.cause:
            self._refuse()
        return False

    def check(self, tenant: Tenant) -> None:
        """Check a request before it is read, and again before it is worked on.

        Raises:
            TooManyRequests: there is no room for even one choice, or the tenant's tokens of this minute are used up.
        """
        tenant.check_tokens()
        queues = self, *self.pools.values()  # only its body says which one it needs
        has_place = any(queue._has_place(tenant, 1, 1) for queue in queues)
        if not has_place and not self._may_still_leave(tenant.grant.fallback):
            self._refuse()

    def hold(self, tenant: Tenant, num_choices: int, num_tokens: int, *, may_leave: bool = False) -> None:
        """Reserve places for all choices of a request. A request that arrives at an empty queue may have any size. One
        for which there is no room enters if another deployment takes all of it now.

        A key may take at most as much of the queue as remains free (dynamic thresholds; Choudhury and Hahne, 1998), so
        that no key fills it and there is room for the next one.

        Raises:
            TooManyRequests: there is no room.
        """
        if not self._has_place(tenant, num_choices, num_tokens) and not self._may_still_leave(may_leave, num_choices):
            self._refuse()
        self._change(tenant, num_choices, num_tokens)

    def _has_place(self, tenant: Tenant, num_choices: int, num_tokens: int) -> bool:
        free_choices = self.config.max_queued_requests - self.num_pending - num_choices
        free_tokens = self.config.max_queued_tokens - self.pending_tokens - num_tokens
        own_choices, own_tokens = tenant.num_pending + num_choices, tenant.pending_tokens + num_tokens
        if tenant is self.anonymous:
            own_choices = own_tokens = 0  # nothing else is waiting
        return not self.num_pending or (free_choices >= own_choices and free_tokens >= own_tokens)

    def let_go(self, tenant: Tenant, num_choices: int, num_tokens: int) -> None:
        """Give back places that `hold` kept."""
        self._change(tenant, -num_choices, -num_tokens)

    def _change(self, tenant: Tenant, num_choices: int, num_tokens: int) -> None:
        self.num_pending += num_choices
        self.pending_tokens += num_tokens
        tenant.num_pending += num_choices
        tenant.pending_tokens += num_tokens
        assert self.num_pending or not self.pending_tokens, "tokens in the queue that belong to no choice"

    def _refuse(self) -> None:
        self.num_full += 1
        seconds = self.retry_after_s
        raise TooManyRequests(
            f"too many requests wait ({self.num_pending}, with {self.pending_tokens} prompt tokens): "
            f"try again in {seconds:.0f} s",
            retry_after_s=seconds,
        )

    @property
    def retry_after_s(self) -> float:
        """Whole seconds after which the current queue will be empty, at the recent rate."""
        rate = self._rate * math.exp(-(self._clock() - self._rate_at) / _RATE_WINDOW_S)
        return min(max(math.ceil(self.pending_tokens / max(rate, 1.0)), 1.0), _MAX_RETRY_AFTER_S)

    # --- who begins -----------------------------------------------------------------------------------------------

    def begins_at_once(self, priority: int, tenant: Tenant) -> bool:
        """Whether a generation may begin without waiting: its tenant has room, and no generation that may begin is
        ahead of it.
        """
        best, held_back = self._queue.best_priority, self._dispatcher.held_back()
        is_next = best is None or priority < best or (priority == best and not self._queue.has_next(held_back))
        return is_next and tenant.digest not in held_back and self._dispatcher.has_room()

    @property
    def predicted_wait_s(self) -> float:
        """Seconds until the last in the queue begins, as fast as choices lately left it while some waited."""
        self._note_leaving(0)
        return len(self._queue) * self._busy_s / max(self._num_begun, 1.0)

    def _note_leaving(self, num: int) -> None:
        now = self._clock()
        seconds, self._seen_at = now - self._seen_at, now
        fading = math.exp(-seconds / _RATE_WINDOW_S)
        self._busy_s = self._busy_s * fading + (seconds if self._queue else 0.0)
        self._num_begun = self._num_begun * fading + num

    def leaves(self, request: GenerateRequest) -> str:
        """Why another deployment runs a request; "": it stays."""
        if not request.may_leave:
            return ""
        now = self._clock()
        self.fallback.look(now)
        return self.fallback.reason(request, now)

    def begin(self, request: GenerateRequest, deliver: Deliver, leaves: str = "") -> "Generation":
        """Dispatch a generation; `leaves`: of `Dispatcher.start`. Raises EngineUnavailable."""
        if leaves:
            generation = self._dispatcher.start(request, leaves)
            deliver(generation)
            return generation
        now = self._clock()
        cost = cost_of(request)
        self._rate = self._rate * math.exp(-(now - self._rate_at) / _RATE_WINDOW_S) + cost / _RATE_WINDOW_S
        self._rate_at = now
        generation = self._dispatcher.start(request)
        deliver(generation)
        return generation

    async def wait(self, visit: "Visit", request: GenerateRequest, deliver: Deliver) -> "Generation":
        """Dispatch a generation when its turn comes.

        Raises:
            RequestTimeout: its deadline passed first.
            RequestAborted: the visit was closed.
            EngineUnavailable: no engine can take it.
        """
        waiter = _Waiter(visit, request, deliver, self._clock())
        tenant = visit.tenant
        self._note_leaving(0)
        if request.may_leave:
            self._may_leave[waiter] = None
        waiting = self._queue.push(
            waiter,
            tenant=tenant.digest,
            turns=visit.turns,
            priority=request.priority,
            cost=cost_of(request) + PLACE_COST,
            weight=tenant.grant.weight,
            deadline=waiter.began + request.slo_ttft_s if request.slo_ttft_s and tenant.digest else None,
        )
        timer = asyncio.get_running_loop().call_later(request.patience_s, _expire, waiter)
        visit.waiters[waiter], visit.flow = waiting, waiting.flow
        try:
            result = await waiter.future
        finally:
            timer.cancel()
            self.leave(waiter, waiting)
        if isinstance(result, PdkvError):
            raise result
        visit.num_charged += waiter.cost
        return result

    def settle(self, visit: "Visit", num_tokens: int, share: float) -> None:
        """Correct a visit's cost by the difference between actual and expected tokens.

        Only the `share` that came through the queue was charged. The rest began while nothing was waiting, which costs
        nothing; but others may since have waited for the tokens that it used beyond its expected cost.
        """
        tenant = visit.tenant
        self._queue.settle(visit.flow, num_tokens * share, tenant.grant.weight)
        if share < 1.0 and num_tokens > 0:
            self._queue.charge(tenant.digest, visit.priority, num_tokens * (1.0 - share), tenant.grant.weight)

    def leave(self, waiter: _Waiter, waiting: Waiting[_Waiter]) -> None:
        """Remove a generation from the queue. Idempotent."""
        waiter.visit.waiters.pop(waiter, None)
        self._may_leave.pop(waiter, None)
        self._queue.remove(waiting)

    def _on_room(self) -> None:
        """Begin what can begin: there may be room now."""
        if self._queue and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Begin waiting generations in order while there is room."""
        self._scheduled = False
        self._let_leave()
        for _ in range(_STARTS_IN_A_ROW):
            held_back = self._dispatcher.held_back()
            if not self._queue.has_next(held_back) or not self._dispatcher.has_room():
                return
            self._note_leaving(1)
            self._begin_waiter(self._queue.pop(held_back))
        self._on_room()

    def _let_leave(self) -> None:
        """Send some of what waits elsewhere while no engine can serve; the others follow with the next ticks."""
        if not (self._may_leave and self.fallback.takes_over(self._clock())):
            return
        for waiter in list(itertools.islice(self._may_leave, _STARTS_IN_A_ROW)):
            if reason := self.leaves(waiter.request):
                waiter.cost = 0
                self.leave(waiter, waiter.visit.waiters[waiter])
                self._begin_waiter(waiter, reason)
            else:
                self._may_leave[waiter] = self._may_leave.pop(waiter)

    def _begin_waiter(self, waiter: _Waiter, leaves: str = "") -> None:
        if waiter.future.done():
            return
        waited_s = self._clock() - waiter.began
        self.observe_wait(waited_s)
        try:
            request = msgspec.structs.replace(waiter.request, timeout_s=max(waiter.request.timeout_s - waited_s, 0.001))
            waiter.end(self.begin(request, waiter.deliver, leaves))
        except PdkvError as error:
            waiter.end(error)
        except Exception as error:  # a defect must not take the queue down with it
            logger.exception("a generation failed to begin")
            waiter.end(PdkvError(f"the generation failed to begin: {type(error).__name__}"))


class Visit:
    """One request's stay in the router: its places, its tenant's limits, its waiting generations. A context manager."""

    resume_id, replay = "", cast(Replay | None, None)  # a front's have them

    def __init__(self, admission: Admission, tenant: Tenant) -> None:
        self.tenant = tenant
        self.turns = Turns()
        self.flow: Flow | None = None  # its key's, in which its generations waited
        self.priority = 0  # of its generations
        self.waiters: dict[_Waiter, Waiting[_Waiter]] = {}
        self.num_charged = 0  # tokens that its queued generations are expected to cost
        self._admission = admission
        self._num_held = 0
        self._held_tokens = 0
        self._num_taken = 0  # tokens that it was expected to cost while queued
        self._num_used = self._num_cached = 0
        self._num_asked = 0  # `_num_taken` at first
        self._num_owed = 0  # output tokens beyond those in `_num_taken`
        self._num_ahead = 0  # output tokens charged to the tenant that have not arrived yet
        self._num_paid = 0.0  # tokens charged to the tenant
        self._streams = False
        self._closed = False

    def hold(
        self, prompt_lengths: Sequence[int], n: int, max_tokens: int | None, *, stream: bool, num_predicted: int = 0,
        may_leave: bool = False,
    ) -> None:  # fmt: skip
        """Reserve what the request asks for, once it is known: `n` choices of each prompt.

        Raises:
            TooManyRequests: it does not fit into the queue, or the tenant has as much as it may have.
            InvalidRequest: it needs more than the tenant can ever have.
        """
        num_prompts, num_prompt_tokens = len(prompt_lengths), sum(prompt_lengths)
        num_choices = num_prompts * n
        num_prompt_tokens += num_choices * num_predicted
        if stream:
            self.tenant.enter_stream()
            self._streams = True
        num_ahead = num_choices * (EXPECTED_OUTPUT if max_tokens is None else max_tokens)
        self.tenant.take_tokens(num_prompt_tokens + num_ahead)
        self._num_ahead, self._num_paid = num_ahead, num_prompt_tokens + num_ahead
        num_expected = num_choices * expected_output(max_tokens)
        self._num_taken = self._num_asked = num_prompt_tokens + num_expected
        self._num_owed = -num_expected
        num_tokens = num_prompt_tokens + (num_choices - num_prompts) * HASH_BLOCK_SIZE
        self._admission.hold(self.tenant, num_choices, num_tokens, may_leave=may_leave)
        self._num_held, self._held_tokens = num_choices, num_tokens

    def check(self) -> None:
        """Raise TooManyRequests if there is no room for it."""
        self._admission.check(self.tenant)

    async def admit(self, asked: Asked, body: bytes = b"", *names: object) -> Terms:
        """As `judge`: of the `Stay`, which may be in another process."""
        return self.judge(asked)

    def judge(self, asked: Asked) -> Terms:
        """Reserve what a request asks for, within its tenant's limits. Raises InvalidRequest and TooManyRequests."""
        tenant, priority, wishes = self.tenant, asked.priority, asked.wishes
        self._admission = self._admission.of_pool(asked.pool)
        self.turns = tenant.turns_of(wishes.fairness_id)
        tenant.check_priority(priority)
        if wishes.priority is not None:
            if priority not in (0, wishes.priority):
                text = f"{wishes.objective_header} has priority {wishes.priority}, and the body {priority}"
                raise InvalidRequest(f"{text}: send one of them", param=wishes.objective_header)
            priority = wishes.priority
            tenant.check_priority(priority, wishes.objective_header)
        if wishes.explain and not tenant.grant.admin:  # what others have cached is told to no stranger
            text = "x-pd-explain needs a key with admin rights (admin = true in the key file)"
            raise Unauthorized(text, status=403)
        if self._admission.config.require_cache_salt and not asked.cache_salt:
            raise InvalidRequest(
                "cache_salt is required here (--require-cache-salt): send a secret common to those who may share the "
                "cache, such as a random text per user",
                param="cache_salt",
            )
        n, most, predicted = asked.n, asked.max_tokens, asked.num_predicted
        leaves = self._admission.may_leave(tenant, asked)
        self.hold(asked.prompt_lengths, n, most, stream=asked.stream, num_predicted=predicted, may_leave=leaves)
        terms = Terms(priority, asked.cache_salt, None, "", wishes.explain, leaves, asked.pool)
        if not tenant.digest:
            return terms
        salt = tenant.salted(asked.cache_salt)
        return terms._replace(cache_salt=salt, kv_terms=tenant.grant.kv_terms, tenant=tenant.digest)

    async def start(self, request: GenerateRequest, deliver: Deliver, index: int = 0) -> "Generation":
        """Begin a generation when its turn comes; at once, without switching to another task, if it need not wait.

        `deliver` gets the generation before this returns, even if the call is cancelled in the meantime.

        Raises:
            EngineUnavailable: no engine can take it.
            RequestTimeout, RequestAborted: it waited until its deadline, or until the visit was closed.
        """
        admission, self.priority = self._admission, request.priority
        if self._closed:
            raise RequestAborted("the client went away", request_id=request.label)
        try:
            if leaves := admission.leaves(request):
                return admission.begin(request, deliver, leaves)
            if admission.begins_at_once(request.priority, self.tenant):
                return admission.begin(request, deliver)
            return await admission.wait(self, request, deliver)
        finally:
            if not self._closed:
                self._let_go(1, prompt_cost(request))

    def came(self, num_tokens: int) -> None:
        """Count output tokens as they arrive; those beyond the tokens charged in advance are charged now, to its key's
        share in pieces.
        """
        self._num_owed += num_tokens
        if self._num_owed >= EXPECTED_OUTPUT:
            self._settle(self._num_owed)
        self._num_ahead -= num_tokens
        if self._num_ahead < 0:
            self._num_paid += self.tenant.charge(-self._num_ahead)
            self._num_ahead = 0

    def used(self, num_tokens: int, num_cached: int = 0) -> None:
        """Record the final number of prompt and output tokens, and how many of these no engine had to compute, which
        cost its key's share nothing.
        """
        self._num_used, self._num_cached = num_tokens, num_cached

    def abort(self) -> None:
        """Remove everything of this request from the queue: the client has gone. Idempotent."""
        for waiter, waiting in list(self.waiters.items()):
            self._admission.leave(waiter, waiting)
            waiter.end(RequestAborted("the client went away", request_id=waiter.request.label))

    def close(self) -> None:
        """End the visit. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.abort()
        self._let_go(self._num_held, self._held_tokens)
        if self._streams:
            self.tenant.leave_stream()
        self.tenant.settle(self._num_paid, self._num_used)
        if self._num_asked:
            self._settle(self._num_used - self._num_cached - self._num_taken)
        self.tenant.leave()

    def _settle(self, num_tokens: int) -> None:
        """Charge its key's share so many tokens more."""
        self._num_owed = 0
        self._num_taken += num_tokens
        self._admission.settle(self, num_tokens, min(self.num_charged / self._num_asked, 1.0))

    def _let_go(self, num_choices: int, num_tokens: int) -> None:
        self._num_held -= num_choices
        self._held_tokens -= num_tokens
        assert self._num_held >= 0, "more places were given back than were kept"
        self._admission.let_go(self.tenant, num_choices, num_tokens)

    def __enter__(self) -> "Visit":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prompt_cost(request: GenerateRequest) -> int:
    """Prompt tokens that a generation is expected to cost: choices after the first find the prompt in the cache. Each
    brings its expected output along.
    """
    num_prompt = len(request.prompt_token_ids) if request.choice == 0 else HASH_BLOCK_SIZE
    return num_prompt + len(request.prediction_token_ids)


def cost_of(request: GenerateRequest) -> int:
    """Prompt and output tokens that a generation is expected to cost."""
    return prompt_cost(request) + expected_output(request.params.max_tokens)


def _expire(waiter: _Waiter) -> None:
    text = f"no engine had room for the request within {waiter.request.patience_s:g} s"
    waiter.end(RequestTimeout(text, request_id=waiter.request.label))
