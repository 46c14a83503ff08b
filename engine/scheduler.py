"""Decides, step by step, which tokens of which requests are computed; plain data in, plain data out.

Running requests first, then waiting ones, within one token budget; both by priority, and within one priority first
come, first served. Chunked prefill, prefix hits, remote KV and decode are the same arithmetic on counters. A plan's
update may lag: what its requests lost meanwhile is dropped by counter.
"""

from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Literal, NamedTuple

from pdkv.connectors.base import NO_MATCH, MatchedTokens, ScheduledRange, TransferOutcome
from pdkv.engine.external import NUM_PREFETCH_REQUESTS, ExternalKV, Load
from pdkv.engine.hooks import RoleHooks
from pdkv.engine.kv_cache_manager import KVCacheManager
from pdkv.engine.plan import NewRequest, SampledTokens, ScheduledRequest, StepFailure, StepOutput, StepPlan
from pdkv.engine.request import Request
from pdkv.wire.messages import RequestKey


class SchedulerLimits(NamedTuple):
    """Bounds of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0  # 0: none
    kv_load_timeout_s: float = 30.0


class _Share(NamedTuple):
    """One request's share of a step in flight."""

    request: Request
    restarts: int
    stop: int  # tokens [.., stop) are computed when the step is confirmed
    samples: bool


class Confirmed(NamedTuple):
    """What a confirmed step drew for one request."""

    request: Request
    sampled: SampledTokens


Admission = Literal["admitted", "skipped", "capped", "blocked"]


def _priority(request: Request) -> int:
    """Lower is more urgent."""
    return request.submit.priority


class Scheduler:
    """Queues and counters of one engine. Single-threaded; touches no socket, clock or tensor."""

    def __init__(self, kv: KVCacheManager, external: ExternalKV, roles: RoleHooks, limits: SchedulerLimits) -> None:
        self.kv = kv
        self.external = external
        self.roles = roles
        self.limits = limits
        self.waiting: deque[Request] = deque()  # by priority, then preempted ones, then in order of arrival
        self.running: list[Request] = []  # by priority, then in the order in which they began
        self.rejected: list[tuple[Request, TransferOutcome]] = []  # failed loads under the policy "fail"
        self.failed: list[tuple[Request, StepFailure]] = []  # by the last update: nothing of their step counts
        self.num_preemptions = 0
        self.needs_step = False  # something became schedulable outside a plan
        self._in_flight: dict[int, list[_Share]] = {}
        self._ended: list[RequestKey] = []  # requests that leave the workers' batch with the next plan
        self._num_worker_requests = 0
        self._next_step_id = 0

    # --- one step -------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step. Takes blocks, advances `num_computed`, may preempt; never blocks or raises."""
        step_id, self._next_step_id = self._next_step_id, self._next_step_id + 1
        self._start_loads()
        num_preempted = self.num_preemptions
        batch: list[tuple[Request, int]] = []
        budget = self._schedule_running(self.limits.max_num_batched_tokens, batch)
        if self.num_preemptions == num_preempted:
            self._schedule_waiting(budget, batch, step_id, now)
        new, scheduled, ranges = self._name_shares(step_id, batch)
        waiting = [self.waiting[i] for i in range(min(len(self.waiting), NUM_PREFETCH_REQUESTS))]
        meta, cancels, freed = self.external.build_meta(step_id, ranges, waiting)
        self.needs_step = self.needs_step or (freed and bool(self.waiting or self.running))
        ended, self._ended = self._ended, []
        return StepPlan(step_id=step_id, new=new, scheduled=scheduled, ended=ended, kv_meta=meta, cancels=cancels)

    def update(self, output: StepOutput) -> list[Confirmed]:
        """Confirm a step: counters advance, full blocks enter the cache, loads end. Returns what was computed."""
        self.external.apply(output.transfers)
        for load, ok, outcome in self.external.received(output.transfers):
            if ok:
                self._load_finished(load, outcome)
            else:
                self._load_failed(load, outcome, transfer_ended=True)
        for load in [x for x in self.external.loads.values() if x.layerwise_step == output.step_id]:
            self._load_failed(load, TransferOutcome("transfer_timeout"), transfer_ended=False)
        confirmed = []
        shares = self._in_flight.pop(output.step_id, ())
        self.needs_step = self.needs_step or bool(shares)  # it may have held back tokens or blocks
        for share in shares:
            request = share.request
            if share.restarts != request.restarts:
                continue  # aborted, preempted or sent back meanwhile
            failure = output.failed.get(request.key)
            if failure is not None:
                self.kv.discard(failure.bad_blocks)
                self.failed.append((request, failure))
                continue
            request.num_confirmed = max(request.num_confirmed, share.stop)
            sampled = output.sampled.get(request.key) if share.samples else None
            if share.samples:
                request.sampling_in_flight = False
            if sampled is not None:
                request.output_token_ids += sampled.token_ids
            self.kv.commit(request)
            self.external.confirm(request)
            if sampled is not None:
                confirmed.append(Confirmed(request, sampled))
        self.kv.end_step(output.step_id)
        return confirmed

    # --- requests come and go -------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request: by priority (lower first), then in order of arrival."""
        insort_right(self.waiting, request, key=_priority)

    def remove(self, request: Request) -> None:
        """The request ends here and gives everything back; what may still be written is quarantined."""
        load = self.external.loads.get(request.transfer_key)
        if load is not None and load.request is request:
            self.external.end_load(request.transfer_key, transfer_ended=False)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._give_back(request)
        request.restarts += 1

    def wake_load(self, request: Request) -> None:
        """The request's first token is known: it may run if its KV is in."""
        load = self.external.loads.get(request.transfer_key)
        if load is not None and load.done:
            self._activate(load)

    def fail_load(self, request: Request, outcome: TransferOutcome) -> None:
        """The peer says that the request's KV will never come."""
        load = self.external.loads.get(request.transfer_key)
        if load is not None and not load.done and load.layerwise_step is None:
            self._load_failed(load, outcome, transfer_ended=False)

    def expire_loads(self, now: float) -> None:
        """Loads whose deadline passed fall back; so do requests that waited too long for an answer."""
        for load in [x for x in self.external.loads.values() if x.deadline <= now and x.layerwise_step is None]:
            self._load_failed(load, TransferOutcome("transfer_timeout"), transfer_ended=False)
        for request in [r for r in self.waiting if self._lookup_deadline(r) <= now]:
            self.waiting.remove(request)
            self._fall_back(request, TransferOutcome("transfer_timeout"))

    def next_deadline(self) -> float | None:
        """The earliest deadline of a load or of a request that waits for a connector's answer."""
        deadlines = [load.deadline for load in self.external.loads.values()]
        deadlines += [d for r in self.waiting if (d := self._lookup_deadline(r)) != inf]
        return min(deadlines, default=None)

    def check_integrity(self) -> None:
        """Raise AssertionError where a queue is out of order, or places in the workers' batch are miscounted."""
        for queue in (self.waiting, self.running):
            priorities = [_priority(request) for request in queue]
            assert priorities == sorted(priorities), priorities
        assert self._num_worker_requests == sum(request.in_worker for request in self.running)

    # --- schedule: running ----------------------------------------------------------------------------------------

    def _schedule_running(self, budget: int, batch: list[tuple[Request, int]]) -> int:
        """Share the budget out to running requests, the most urgent first; preempts from the end.

        Behind one that waits for blocks only those go on that need none.

        Returns:
            What is left for waiting requests.
        """
        index, starved = 0, False
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_tokens = self._num_schedulable(request, budget)
            stop = request.num_computed + num_tokens
            must_wait = starved and self.kv.num_missing(request, stop) > 0
            if num_tokens == 0 or must_wait or not (request.in_worker or self._has_slot):
                index += 1
            elif self._make_room(request, stop, index):
                self._join(batch, request, num_tokens)
                budget -= num_tokens
                index += 1
            elif index < len(self.running) and self.running[index] is request:  # else it was preempted itself
                starved = True
                index += 1
        return 0 if starved else budget

    def _make_room(self, request: Request, num_tokens: int, index: int) -> bool:
        """Give running[index] the blocks up to `num_tokens`, preempting from the end of running[index:].

        Returns:
            False: not in this step. Blocks come back with the end of a step or of a transfer, or it was the last one.
        """
        while not self.kv.grow(request, num_tokens):
            if self.kv.will_fit(request, num_tokens, self.external.kept_blocks):
                return False
            victim = self._pick_victim(index)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _num_schedulable(self, request: Request, budget: int) -> int:
        """Tokens of the request to compute in this step; 0 while its next token is in flight."""
        if request.sampling_in_flight:
            return 0
        num_tokens = request.num_tokens - request.num_computed
        threshold = self.limits.long_prefill_token_threshold
        return min(num_tokens, threshold or num_tokens, budget)

    @property
    def _has_slot(self) -> bool:
        """Whether the workers' batch takes another request."""
        return self._num_worker_requests < self.limits.max_num_seqs

    def _run(self, request: Request) -> None:
        """The request is one of the running from now on, behind its equals."""
        insort_right(self.running, request, key=_priority)

    def _join(self, batch: list[tuple[Request, int]], request: Request, num_tokens: int) -> None:
        """The request computes in this step, and has a place in the workers' batch from now on."""
        if not request.in_worker:
            request.in_worker = True
            self._num_worker_requests += 1
        batch.append((request, num_tokens))

    def _pick_victim(self, index: int) -> Request | None:
        """The least urgent of running[index:], none of which is in this step yet, whose blocks no transfer reads."""
        candidates = reversed(self.running[index:])
        return next((r for r in candidates if not self.external.has_saves(r.transfer_key)), None)

    def _preempt(self, request: Request) -> None:
        """Take the request's blocks; it comes again before its equals, and its content may still be found."""
        self.num_preemptions += 1
        self.running.remove(request)
        load = self.external.loads.get(request.transfer_key)
        if load is not None and load.request is request:  # layerwise, its step still in flight
            self.external.end_load(request.transfer_key, transfer_ended=False)
        self.external.preempted(request)
        self._send_back(request)

    # --- schedule: waiting ----------------------------------------------------------------------------------------

    def _schedule_waiting(self, budget: int, batch: list[tuple[Request, int]], step_id: int, now: float) -> None:
        """Admit waiting requests in order. Behind one that finds no memory only requests with a ticket may pass.

        Behind a hand-off that the role's cap holds back no other one may, or a big prompt would never get its turn.
        """
        blocked = capped = False
        for request in list(self.waiting):
            if budget <= 0 or not self._has_slot:
                return
            if request.ticket is None and (blocked or (capped and request.kv == "handoff")):
                continue
            admission, num_tokens = self._admit(request, budget, step_id, now)
            blocked = blocked or admission == "blocked"
            capped = capped or admission == "capped"
            if admission == "admitted":
                self.waiting.remove(request)
                if num_tokens:
                    self._run(request)
                    self._join(batch, request, num_tokens)
                    budget -= num_tokens

    def _admit(self, request: Request, budget: int, step_id: int, now: float) -> tuple[Admission, int]:
        """Try to give a waiting request blocks: to compute now (tokens > 0) or to wait for a load (0)."""
        if not self.roles.may_start(request, self.kv.blocks_for(request.num_tokens)):
            return "capped", 0
        hit = self.kv.find_hit(request)
        num_local = len(hit) * self.kv.block_size
        if request.kv == "await_peer" and self.roles.declines(request, request.num_wanted - num_local):
            request.kv = "local"
            # Now it also draws the first token, which a hit on the whole prompt leaves out.
            hit = self.kv.find_hit(request)
            num_local = len(hit) * self.kv.block_size
        matched = self.external.match(request, num_local)
        awaits_source = (
            matched.ask_again and request.kv == "await_peer" and request.handoff is None and request.num_wanted > 0
        )
        if matched.ask_again and not awaits_source:
            request.asked_since = min(request.asked_since, now)
            return "skipped", 0
        request.asked_since = inf
        if request.kv == "await_peer":
            missing = request.num_wanted - num_local
            if missing > 0 and not matched.num_tokens and not awaits_source:
                self._fall_back_from_queue(request, TransferOutcome("kv_not_found"))
                return "skipped", 0
            stop = request.num_wanted if awaits_source else num_local + matched.num_tokens
            if matched.mode == "layerwise" and matched.num_tokens and request.output_token_ids:
                return self._admit_now(request, hit, matched, budget, step_id, now)
            return self._admit_load(request, hit, stop, now, source_known=not awaits_source)
        if matched.num_tokens and matched.mode == "async":
            return self._admit_load(request, hit, num_local + matched.num_tokens, now, source_known=True)
        return self._admit_now(request, hit, matched, budget, step_id, now)

    def _admit_now(
        self, request: Request, hit: list[int], matched: MatchedTokens, budget: int, step_id: int, now: float
    ) -> tuple[Admission, int]:
        """Schedule at once behind the local hit and, layerwise, what comes from outside during the step."""
        start = len(hit) * self.kv.block_size
        done = start + matched.num_tokens
        threshold = self.limits.long_prefill_token_threshold
        num_tokens = min(request.num_tokens - done, threshold or request.num_tokens, budget)
        if not self.kv.fits(request.num_tokens, hit):
            return "blocked", 0  # a prompt that begins and cannot end would only preempt others, or itself
        admitted = self.kv.admit(request, hit, done + num_tokens)
        assert admitted
        request.num_computed = request.num_confirmed = start
        if matched.num_tokens:
            load = Load(request, start, done, now + self.limits.kv_load_timeout_s, layerwise_step=step_id)
            self.external.add_load(load)
            self.external.start(load)
            request.num_computed = done
        return "admitted", num_tokens

    def _admit_load(
        self, request: Request, hit: list[int], stop: int, now: float, *, source_known: bool
    ) -> tuple[Admission, int]:
        """Reserve blocks up to `stop`; the request waits outside the batch until they are filled."""
        num_taken = self.kv.num_taken(stop, hit)
        if not self.roles.may_load(request, num_taken, len(self.running) + len(self.external.loads)):
            return "blocked", 0
        if not self.kv.admit(request, hit, stop):
            return "blocked", 0
        request.num_confirmed = len(hit) * self.kv.block_size
        load = Load(request, request.num_confirmed, stop, now + self.limits.kv_load_timeout_s)
        self.external.add_load(load)
        ticket = self.external.start(load) if source_known or load.start == load.stop else None
        if request.kv == "await_peer":
            self.roles.load_allocated(request, load.start, load.stop, ticket)
        if load.done:
            self._load_finished(load, TransferOutcome())
        return "admitted", 0

    def _start_loads(self) -> None:
        """Loads whose blocks were reserved before their source was known start when it is."""
        for load in [x for x in self.external.loads.values() if not x.started and not x.done]:
            matched = self.external.match(load.request, load.start)
            if matched.ask_again:
                continue
            load.stop = load.start + matched.num_tokens
            if matched == NO_MATCH:
                self._load_failed(load, TransferOutcome("kv_not_found"), transfer_ended=True)
            else:
                self.external.start(load)

    # --- loads end ------------------------------------------------------------------------------------------------

    def _load_finished(self, load: Load, outcome: TransferOutcome) -> None:
        request = load.request
        request.num_external = load.stop - load.start
        request.source_is_peer = request.kv == "await_peer"
        load.done = True
        if request.kv == "await_peer":
            self.roles.load_ended(request, True, outcome)
        if load.layerwise_step is not None:
            self._take_over(load)
            return
        request.num_computed = request.num_confirmed = load.stop
        self._activate(load)

    def _activate(self, load: Load) -> None:
        """A finished load's request joins the running ones, once its next token is known.

        Only then does its KV enter the cache: the peer that sent the KV of its last step ahead of that step's end has
        found nothing wrong with it.
        """
        request = load.request
        if request.kv == "await_peer" and not request.output_token_ids:
            return  # Continue brings the token
        self.kv.commit(request)
        self._take_over(load)
        self.external.confirm(request)
        self._run(request)
        self.needs_step = True

    def _take_over(self, load: Load) -> None:
        """The KV is here: from now on the request is like any other of this engine."""
        request = load.request
        self.external.end_load(request.transfer_key, transfer_ended=True)
        request.handoff = None
        if request.kv == "await_peer":
            request.kv = "local"

    def _load_failed(self, load: Load, outcome: TransferOutcome, *, transfer_ended: bool) -> None:
        request = load.request
        self.external.end_load(request.transfer_key, transfer_ended=transfer_ended)
        if load.layerwise_step is not None:
            self.external.preempted(request)  # what it computed behind the load is void, too
        if request in self.running:
            self.running.remove(request)
        num_loaded = load.start + outcome.num_tokens if transfer_ended and outcome.num_tokens else 0
        self._fall_back(request, outcome, num_loaded)

    def _fall_back_from_queue(self, request: Request, outcome: TransferOutcome) -> None:
        self.waiting.remove(request)
        self._fall_back(request, outcome)

    def _fall_back(self, request: Request, outcome: TransferOutcome, num_loaded: int = 0) -> None:
        """Compute here what did not come, or fail the request, as the role's policy says.

        Args:
            num_loaded: tokens [0, num_loaded) are in its blocks.
        """
        request.handoff = None
        compute_here = self.roles.load_ended(request, False, outcome)
        is_from_peer = request.kv == "await_peer"
        if is_from_peer:
            request.kv = "local"
        if num_loaded and compute_here:
            self._leave_workers(request)
            request.resume(min(num_loaded, request.num_wanted))
            request.source_is_peer = is_from_peer
            self.kv.commit(request)
            self._run(request)
            self.needs_step = True
            return
        request.load_failed = True
        self._send_back(request)
        if not compute_here:
            self.rejected.append((request, outcome))

    def _lookup_deadline(self, request: Request) -> float:
        """When a waiting request stops asking its connector; infinite where it asks nobody."""
        return request.asked_since + self.limits.kv_load_timeout_s

    # --- blocks and shares ----------------------------------------------------------------------------------------

    def _send_back(self, request: Request) -> None:
        """The request starts again from the queue, before others of its priority."""
        self._give_back(request)
        request.restart()
        insort_left(self.waiting, request, key=_priority)
        self.needs_step = True

    def _give_back(self, request: Request) -> None:
        """Release blocks (a step in flight keeps them until its update) and the place in the workers' batch."""
        self.kv.free(request, step_in_flight=request.last_step_id in self._in_flight)
        self._leave_workers(request)

    def _leave_workers(self, request: Request) -> None:
        """The request is in the workers' batch no longer."""
        if request.in_worker:
            request.in_worker = False
            self._num_worker_requests -= 1
            self._ended.append(request.key)

    def _name_shares(
        self, step_id: int, batch: Sequence[tuple[Request, int]]
    ) -> tuple[list[NewRequest], list[ScheduledRequest], list[ScheduledRange]]:
        """Turn the batch into plain data and advance its counters."""
        connector = self.external.connector
        observed = connector is not None and connector.observes_steps
        new: list[NewRequest] = []
        scheduled: list[ScheduledRequest] = []
        ranges: list[ScheduledRange] = []
        shares: list[_Share] = []
        for request, num_tokens in batch:
            start, stop = request.num_computed, request.num_computed + num_tokens
            samples = stop == request.num_tokens
            key, block_ids = request.key, request.block_ids
            new_block_ids: list[int] = []
            if not request.num_worker_blocks:  # the workers do not know it
                new.append(self._introduce(request))
            elif len(block_ids) > request.num_worker_blocks:
                new_block_ids = block_ids[request.num_worker_blocks :]
            request.num_worker_blocks = len(block_ids)
            scheduled.append(ScheduledRequest(key, start, num_tokens, new_block_ids, samples))
            if observed:
                ranges.append(ScheduledRange(request.view(), start, stop, list(block_ids)))
            shares.append(_Share(request, request.restarts, stop, samples))
            request.num_computed = stop
            request.last_step_id = step_id
            request.sampling_in_flight = samples
        self._in_flight[step_id] = shares
        return new, scheduled, ranges

    def _introduce(self, request: Request) -> NewRequest:
        submit = request.submit
        return NewRequest(
            request.key,
            submit.choice,
            request.prompt_token_ids,
            list(request.output_token_ids),
            submit.params,
            list(request.block_ids),
        )
