"""Decides, step by step, which tokens of which requests are computed; plain data in, plain data out.

Running requests first, then waiting ones, within one token budget; both by priority, and within one priority first
come, first served. Chunked prefill, prefix hits, remote KV and decode are the same arithmetic on counters. A plan's
update may lag behind: results for tokens that a request has lost since are recognized by its counters and dropped.
"""

from collections.abc import Mapping, Sequence
from itertools import chain, takewhile
from typing import Literal, NamedTuple

import msgspec

from pdkv.connectors.base import MatchedTokens, TransferResults
from pdkv.engine.drafting import Drafting, DraftTally
from pdkv.engine.hooks import DecodeHooks, PrefillHooks
from pdkv.engine.kv.kv_cache_manager import KVCacheManager, PrefixHit
from pdkv.engine.outside.external import EndedSend, ExternalKV
from pdkv.engine.outside.loads import Loads
from pdkv.engine.plan import (
    NO_DRAFTS,
    DraftResult,
    NewRequest,
    SampledTokens,
    ScheduledRequest,
    StepFailure,
    StepOutput,
    StepPlan,
)
from pdkv.engine.queues import LANES, Lane, Queues
from pdkv.engine.request import Request
from pdkv.engine.stopping import StopRules
from pdkv.engine.trials import Trials
from pdkv.wire.messages import FinishReason
from pdkv.wire.types import RequestKey


class SchedulerLimits(NamedTuple):
    """Limits of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0  # 0: none
    kv_load_timeout_s: float = 30.0
    num_draft_tokens: int = 0  # the most tokens of a decoding request
    decodes_with_loads: bool = True  # a step may have both single tokens and layer-by-layer loads


class _Share(msgspec.Struct, frozen=True, gc=False):
    """One request's share of a step in flight."""

    request: Request
    restarts: int
    stop: int  # tokens [.., stop) are computed when the step is confirmed
    num_drawn: int  # the most tokens drawn
    is_decode: bool  # it is a single token with its drafts
    num_guesses: int  # the most that are made after it


class Drawn(msgspec.Struct, frozen=True, gc=False):
    """The tokens that a confirmed step drew for one request, up to its end."""

    request: Request
    sampled: SampledTokens
    position: int  # position of the first token in the output
    reason: FinishReason | None  # why the last one ends it
    stop_token_id: int | None


class StepResult(NamedTuple):
    """The results of a confirmed step."""

    drawn: list[Drawn]
    failed: list[tuple[Request, StepFailure]]  # nothing of their step counts
    late: list[Request]  # they drew nothing, and are left out until they can
    chunks: list[Request]  # more of their prompts is there, which are handed off when all of it is
    sends: list[EndedSend]
    computed: bool  # the step had requests
    num_rows: int  # if all of them decoded: their tokens and guesses; else 0
    num_guesses: int  # the most that it was to make for one of them


_NO_DRAFTS: Mapping[RequestKey, int] = {}

Admission = Literal["admitted", "skipped", "capped", "blocked"]

_PASSING: Mapping[Admission, Sequence[Lane]] = {"capped": ("ticket", "other"), "blocked": ("ticket",)}
"""Lanes whose requests may pass one that waits for room."""


class Scheduler:
    """The queues and counters of one engine. Single-threaded; touches no socket, clock or tensor."""

    def __init__(
        self,
        kv: KVCacheManager,
        external: ExternalKV,
        prefill: PrefillHooks,
        decode: DecodeHooks,
        limits: SchedulerLimits,
        stop_rules: StopRules,
        drafting: Drafting | None = None,
    ) -> None:
        """`drafting`: None: as many drafts as the limits allow, which are made with each draw."""
        self.kv = kv
        self.external = external
        self.limits = limits
        self.queues = Queues(kv, limits.max_num_seqs)
        self.waiting, self.running = self.queues.waiting, self.queues.running
        self.loads = Loads(kv, external, decode, self.queues, timeout_s=limits.kv_load_timeout_s)
        self.trials = Trials()
        self.num_preemptions = 0
        self.last_preempted: Request | None = None
        self.is_short_of_blocks = False  # a request with a place had to wait for blocks in the last plan
        self._prefill = prefill
        self._decode = decode
        self._stop_rules = stop_rules
        self._drafting = drafting
        self._in_flight: dict[int, list[_Share]] = {}
        self._settled = -1  # the last step passed to `update`
        self._next_step_id = 0
        self.draft_counts = DraftTally()

    # --- one step -------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step. Takes blocks, advances `num_computed`, may preempt; never blocks or raises."""
        step_id = self._next_step_id
        self.loads.start_known()
        if self.trials.active:
            self.trials.advance(is_idle=not any(self._in_flight.values()))
        num_preempted = self.num_preemptions
        batch: list[tuple[Request, int]] = []
        budget = self._schedule_running(self.limits.max_num_batched_tokens, batch)
        drafts = self._add_drafts(batch, budget) if self._may_have_drafts(batch) else _NO_DRAFTS
        if self.num_preemptions == num_preempted:
            self._schedule_waiting(budget - sum(drafts.values()), batch, step_id, now)
        return self._make_plan(step_id, batch, drafts)

    def schedule_loads(self, now: float) -> StepPlan | None:
        """Plan a step that begins loads of hand-offs and computes nothing, beside steps in flight; None: none can
        begin. It looks only at waiting requests before the first one that is to be computed here.
        """
        step_id, num_loads = self._next_step_id, len(self.external.loads) - len(self.external.unstarted)
        self.loads.start_known()
        for request in takewhile(_is_handed_over, self.waiting.first(self.limits.max_num_seqs)):
            if not self.queues.has_place or self._admit(request, 0, (), step_id, now)[0] != "admitted":
                break
            self.waiting.remove(request)
        has_begun = len(self.external.loads) - len(self.external.unstarted) > num_loads or self.external.has_orders
        return self._make_plan(step_id, [], _NO_DRAFTS) if has_begun else None

    def _make_plan(
        self, step_id: int, batch: Sequence[tuple[Request, int]], drafts: Mapping[RequestKey, int]
    ) -> StepPlan:
        """The plan that computes this batch, with what the connector has to do."""
        self._next_step_id = step_id + 1
        ranges = self.external.show_scheduled(step_id, self._select_certain(batch))
        if self.trials.active:
            self._look_after_trial(batch)
        new, scheduled = self._begin_shares(step_id, batch, drafts)
        meta, cancels, freed = self.external.build_meta(step_id, ranges, self.waiting)
        if freed:
            self.go_on()
        return StepPlan(step_id, new, scheduled, self.queues.take_left(), meta, cancels, settled=self._settled)

    def _look_after_trial(self, batch: Sequence[tuple[Request, int]]) -> None:
        """After planning: check whether a suspect could run now, or the one on trial cannot and holds up all others."""
        if self.trials.wants_step:
            self.queues.needs_step = True
        elif self.trials.is_open and not batch and not any(self._in_flight.values()):
            self.trials.pause()
            self._look_after_end_of_trial()

    def _look_after_end_of_trial(self) -> None:
        """End a trial once no step in flight has the suspect in it."""
        if self.trials.active:
            self.trials.close(is_idle=not any(self._in_flight.values()))

    def update(self, output: StepOutput) -> StepResult:
        """Confirm a step: transfers are settled, counters advance, full blocks enter the cache."""
        self._settled = output.step_id
        sends = self.settle(output.transfers)
        self.loads.end_step(output.step_id)
        shares = self._in_flight.pop(output.step_id, ())
        result = StepResult([], [], [], [], sends, bool(shares), *self._look_at_guesses(shares, output))
        for share in shares:
            request, stop = share.request, share.stop
            if share.restarts != request.restarts:
                continue  # aborted, preempted or sent back in the meantime
            failure = output.failed.get(request.key) if output.failed else None
            if failure is not None:
                self.kv.discard(request, failure.bad_blocks)
                result.failed.append((request, failure))
                continue
            if output.late and request.key in output.late:
                result.late.append(request)
                stop = request.num_tokens - 1
            elif share.num_drawn:
                result.drawn.append(self._take_drawn(request, output.sampled[request.key], share.num_drawn))
                stop = len(request.prompt_token_ids) + len(request.output_token_ids) - 1
            elif request.kv == "handoff":
                result.chunks.append(request)
            if stop > request.num_confirmed:
                request.num_confirmed = stop
            if request.num_confirmed >= request.due_at:
                request.due_at = min(self.kv.commit(request), self.external.report_confirmed(request))
        if self.kv.end_step(output.step_id):
            self.queues.needs_step = True
        self._look_after_end_of_trial()
        return result

    def _take_drawn(self, request: Request, sampled: SampledTokens, num_drawn: int) -> Drawn:
        """Add a step's drawn tokens to the request's output, and drop the ones it might have drawn."""
        count = len(sampled.token_ids)
        request.num_in_flight -= num_drawn
        request.num_drafts -= num_drawn - 1
        request.num_computed -= num_drawn - count
        drafts = sampled.drafts
        if drafts is not None:
            self._learn(request, drafts)
        position = len(request.output_token_ids)
        request.output_token_ids += sampled.token_ids
        reason, stop_token_id = self._stop_rules.apply(request, count)
        if request.trial_tokens:
            self.trials.drew(request, len(request.output_token_ids) - position)
        if drafts is not None and drafts.num_verified:  # what lies behind a stop does not count
            accepted = min(max(count - 1, 0), len(request.output_token_ids) - position)
            request.num_accepted += accepted
            request.num_rejected += drafts.num_verified - accepted
            self.draft_counts.add(drafts.num_verified, accepted)
        return Drawn(request, sampled, position, reason, stop_token_id)

    def _learn(self, request: Request, drafts: DraftResult) -> None:
        """Note how guesses did; how many there are now is known only if no step in flight draws for the request."""
        if self._drafting is not None and drafts is not NO_DRAFTS:
            self._drafting.learn(request, drafts)
        if not request.num_in_flight:
            request.num_guesses = drafts.num_guesses

    def note_step(self, result: StepResult, seconds: float, drafting_s: float) -> None:
        """Note how long a confirmed step took, and the part of it in which tokens were guessed."""
        self.draft_counts.seconds += drafting_s
        if self._drafting is not None and result.computed:
            self._drafting.note_step(result.num_rows, seconds, drafting_s, result.num_guesses)

    def _look_at_guesses(self, shares: Sequence[_Share], output: StepOutput) -> tuple[int, int]:
        """Note how many guesses a step has made. Returns the rows of one of single tokens and their guesses; 0: it was
        another one, or it does not matter; and the most guesses that it was to make for a request.
        """
        if self._drafting is None:
            return 0, 0
        drafts = [each.drafts for each in output.sampled.values() if each.drafts is not None]
        asked = [share.num_guesses for share in shares]  # lists: a generator's turn costs more than all else here
        if num_asked := sum(asked):
            self._drafting.note_guesses(sum(each.num_guesses for each in drafts), num_asked)
        has_others = False in [share.is_decode for share in shares]
        num_rows = 0 if has_others else len(shares) + sum(each.num_verified for each in drafts)
        return num_rows, max(asked, default=0)

    def go_on(self) -> None:
        """Note that freed resources or new knowledge may let a request continue."""
        if not self.queues.is_empty:
            self.queues.needs_step = True

    @property
    def can_go_on(self) -> bool:
        """Whether some request has something to compute, as far as is known without planning."""
        if self.trials.active and any(self._in_flight.values()):
            return False  # nothing is planned ahead while one is near
        return bool(self.waiting) or any(r.num_planned > r.num_computed for r in self.running if not r.stands_still)

    def compute_on(self) -> None:
        """Note that a step has ended: another step follows if some request has something to compute."""
        if self.can_go_on:
            self.queues.needs_step = True

    def ask_again(self) -> None:
        """Ask the connector again: requests that wait for its answer ask with the next step."""
        if self.external.unstarted:
            self.queues.needs_step = True
        else:
            self.compute_on()

    def settle(self, results: TransferResults) -> list[EndedSend]:
        """Settle ended transfers, with a step or between two steps: loads, holds and quarantines end with them."""
        settled = self.external.settle(results)
        self.loads.settle(settled.loads)
        if settled.freed:
            self.go_on()
        return settled.sends

    def add(self, request: Request) -> None:
        """Add a new request."""
        self.trials.add(request)
        self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Remove a request and give everything back; blocks that may still be written are quarantined."""
        self.loads.give_up(request)
        self.trials.remove(request)
        self.queues.remove(request)
        request.restarts += 1
        self._look_after_end_of_trial()

    # --- schedule: running ----------------------------------------------------------------------------------------

    def _schedule_running(self, budget: int, batch: list[tuple[Request, int]]) -> int:
        """Divide the budget among running requests, the most urgent first; preempts from the end.

        After one that waits for blocks, only requests that need none continue. A prompt leaves a token for each
        decoding request behind it, so that a stream does not stand still until a more urgent prompt is computed.

        Returns:
            The budget that is left for waiting requests.
        """
        index, starved, has_trials = 0, False, self.trials.active
        decodes: int | None = None  # decoding requests from `index` on, counted if a prompt is before them
        while index < len(self.running) and budget > 0:
            request, most = self.running[index], budget
            num_tokens = request.num_planned - request.num_computed
            if num_tokens <= 1:
                decodes = decodes and decodes - _wants_a_token(request)
            elif decodes is None:
                decodes = min(sum(map(_wants_a_token, self.running[index:])), self.limits.max_num_seqs)
                most = max(budget - decodes, 1)  # it advances even if they need the whole budget
            else:
                most = max(budget - decodes, 0)
            if request.awaits_mask or request.is_ending or (has_trials and self.trials.holds(request)):
                num_tokens = 0
            elif num_tokens > 1:
                num_tokens = min(num_tokens, self._most_of_prompt(num_tokens), most)
            stop = request.num_computed + num_tokens
            must_wait = starved and self.kv.num_missing(request, stop) > 0
            if num_tokens == 0 or must_wait or not (request.in_worker or self.queues.has_place):
                index += 1
            elif stop <= self.kv.num_slots(request) or self._make_room(request, stop, index):
                if not request.in_worker:
                    self.queues.join_workers(request)
                batch.append((request, num_tokens))
                budget -= num_tokens
                index += 1
            elif index < len(self.running) and self.running[index] is request:  # else it was preempted itself
                starved = True
                index += 1
        return 0 if starved else budget

    def _may_have_drafts(self, batch: Sequence[tuple[Request, int]]) -> bool:
        """Whether a request of the batch may have guesses."""
        if self._drafting is None:
            return self.limits.num_draft_tokens > 0
        return sum([request.num_guesses for request, _ in batch]) > 0

    def _add_drafts(self, batch: Sequence[tuple[Request, int]], budget: int) -> dict[RequestKey, int]:
        """Drafts for decoding requests of the batch, as far as the budget and the blocks allow. By request."""
        decodes = [
            (request, request.num_computed + 1)
            for request, num_tokens in batch
            if num_tokens == 1 and request.num_computed + 1 == request.num_planned and request.num_worker_blocks > 0
        ]
        drafts: dict[RequestKey, int] = {}
        for request, stop, count in self._wanted_drafts(decodes):
            count = min(count, budget)
            if count > 0 and not self.kv.grow(request, stop + count):
                count = min(count, self.kv.num_slots(request) - stop)
            if count > 0:
                drafts[request.key] = count
                budget -= count
        return drafts

    def _wanted_drafts(self, decodes: Sequence[tuple[Request, int]]) -> list[tuple[Request, int, int]]:
        """The requests of those with their last token's end that should have drafts, and how many."""
        most, drafting = self.limits.num_draft_tokens, self._drafting
        wanted = [
            (request, stop, min(most if drafting is None else request.num_guesses, request.end_at - stop - 1))
            for request, stop in decodes
        ]
        wanted = [each for each in wanted if each[2] > 0]
        if drafting is None or not wanted:
            return wanted
        requests, stops, counts = zip(*wanted, strict=True)
        return list(zip(requests, stops, drafting.choose(requests, counts, len(decodes)), strict=True))

    def _select_certain(self, batch: Sequence[tuple[Request, int]]) -> Sequence[tuple[Request, int]]:
        """The requests whose tokens in this step are certain (no drafts)."""
        return [share for share in batch if not share[0].num_drafts] if self.limits.num_draft_tokens else batch

    def _make_room(self, request: Request, num_tokens: int, index: int) -> bool:
        """Give running[index] the blocks up to `num_tokens`, preempting from the end of running[index:].

        Returns:
            False: not in this step. Blocks come back with the end of a step or of a transfer, or it was the last one.
        """
        while not self.kv.grow(request, num_tokens):
            ending = [r.held_blocks() for r in self.running if r.is_ending]
            if self.kv.will_fit(request, num_tokens, chain(self.external.kept_blocks, ending)):
                return False
            victim = self._pick_victim(index)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _most_of_prompt(self, num_tokens: int) -> int:
        """The number of these tokens of a prompt that one step may compute: there is no bound where no other request
        waits for the step's end.
        """
        is_alone = len(self.running) + len(self.waiting) <= 1
        return num_tokens if is_alone else self.limits.long_prefill_token_threshold or num_tokens

    def _pick_victim(self, index: int) -> Request | None:
        """The least urgent of running[index:], none of which is in this step yet, whose blocks no transfer reads.

        Requests that will end with the blocks they have are skipped: computing them again gains nothing.
        """
        candidates = (r for r in reversed(self.running[index:]) if not r.is_ending)
        return next((r for r in candidates if not self.external.has_saves(r.transfer_key)), None)

    def _preempt(self, request: Request) -> None:
        """Take the request's blocks; it is queued before its equals, and its content may still be found."""
        self.num_preemptions += 1
        self.last_preempted = request
        self.running.remove(request)
        self.loads.give_up(request)  # layerwise, its step still in flight
        self.external.preempted(request)
        self.queues.send_back(request)

    # --- schedule: waiting ----------------------------------------------------------------------------------------

    def _schedule_waiting(self, budget: int, batch: list[tuple[Request, int]], step_id: int, now: float) -> None:
        """Admit waiting requests in order. Only requests with a ticket may overtake one that finds no memory.

        No hand-off may overtake one that the role's limit holds back, or a long prompt would never get its turn.
        """
        self.is_short_of_blocks = False
        lanes, most = list(LANES), self.limits.max_num_seqs + 64  # beside who may be skipped
        seen: set[RequestKey] = set()
        candidates = iter(self.waiting.first(most))
        while budget > 0 and self.queues.has_place and (request := next(candidates, None)) is not None:
            seen.add(request.key)
            admission, num_tokens = self._admit(request, budget, batch, step_id, now)
            if admission in _PASSING:
                self.is_short_of_blocks = True
                passing = [lane for lane in lanes if lane in _PASSING[admission]]
                if passing != lanes:
                    lanes, candidates = passing, (r for r in self.waiting.first(most, passing) if r.key not in seen)
            elif admission == "admitted":
                if len(seen) == most:
                    self.queues.needs_step = True
                self.waiting.remove(request)
                if num_tokens:
                    self.queues.run(request)
                    self.queues.join_workers(request)
                    batch.append((request, num_tokens))
                    budget -= num_tokens

    def _admit(
        self, request: Request, budget: int, batch: Sequence[tuple[Request, int]], step_id: int, now: float
    ) -> tuple[Admission, int]:
        """Try to give a waiting request blocks: to compute now (tokens > 0) or to wait for a load (0)."""
        if not self._prefill.may_start(request, self.kv.num_kept(request.num_tokens)):
            return "capped", 0
        hit = self.kv.find_hit(request)
        num_local = hit.num_tokens
        if request.kv == "await_peer" and self._decode.declines(request, request.num_wanted - num_local):
            request.compute_here()
            # Now it also draws the first token, which a hit on the whole prompt leaves out.
            hit = self.kv.find_hit(request)
            num_local = hit.num_tokens
        matched = self.external.match(request, num_local)
        if matched.num_tokens and matched.without_handoff:
            request.go_without_loan()
        if matched.mode == "layerwise" and not self._may_load_beside(batch):
            matched = matched._replace(mode="async")
        from_peer = request.kv == "await_peer"
        awaits_source = matched.ask_again and from_peer and request.handoff is None and request.num_wanted > 0
        if matched.ask_again and not awaits_source:
            self.loads.asks(request, now)
            return "skipped", 0
        self.loads.answered(request)
        if request.awaits_rest and not matched.num_tokens:
            return "skipped", 0  # nothing of it can be loaded yet
        if from_peer and request.num_wanted > num_local and not (matched.num_tokens or awaits_source):
            self.loads.fail_waiting(request)
            return "skipped", 0
        at_once = budget and matched.mode == "layerwise" and matched.num_tokens and request.output_token_ids
        if (from_peer and not at_once) or (matched.num_tokens and matched.mode == "async"):
            stop = request.num_wanted if awaits_source else num_local + matched.num_tokens
            reserved = self.loads.reserve(request, hit, stop, now, source_known=not awaits_source)
            return ("admitted" if reserved else "skipped" if request.awaits_rest else "blocked"), 0
        return self._admit_now(request, hit, matched, budget, step_id, now)

    def _may_load_beside(self, batch: Sequence[tuple[Request, int]]) -> bool:
        """Whether a load may come layer by layer in this step: on a device, decodes would wait, and run without a
        graph.
        """
        return self.limits.decodes_with_loads or all(num_tokens > 1 for _, num_tokens in batch)

    def _admit_now(
        self, request: Request, hit: PrefixHit, matched: MatchedTokens, budget: int, step_id: int, now: float
    ) -> tuple[Admission, int]:
        """Schedule at once after the local hit and, layerwise, the tokens that are loaded during the step."""
        start = hit.num_tokens
        done = start + matched.num_tokens
        num_tokens = min(request.num_tokens - done, self._most_of_prompt(request.num_tokens), budget)
        # A block for each, and itself: with less it would give way again at once.
        spare = len(self.running) + 1 if request.preempted and self.running else 0
        if not self.kv.fits(request.num_tokens, hit, done, spare=spare):
            return "blocked", 0  # a prompt that begins and cannot end would only preempt others, or itself
        if self.trials.active and self.trials.holds(request):
            return "skipped", 0
        admitted = self.kv.admit(request, hit, done + num_tokens, done)
        assert admitted
        request.num_computed = request.num_confirmed = start
        if matched.num_tokens:
            self.loads.begin_layerwise(request, start, done, step_id, now)
            request.num_computed = done
        return "admitted", num_tokens

    def _begin_shares(
        self, step_id: int, batch: Sequence[tuple[Request, int]], drafts: Mapping[RequestKey, int]
    ) -> tuple[list[NewRequest], list[ScheduledRequest]]:
        """Turn the batch into plain data and advance its counters."""
        new: list[NewRequest] = []
        scheduled: list[ScheduledRequest] = []
        shares: list[_Share] = []
        drafting = self._drafting
        most_guesses = self.limits.num_draft_tokens if drafting is None else drafting.num_to_guess(step_id)
        for request, num_tokens in batch:
            start, stop = request.num_computed, request.num_computed + num_tokens
            samples = stop == request.num_planned
            key, num_blocks = request.key, len(request.block_tables[0])
            new_block_ids: list[list[int]] = []
            if not request.num_worker_blocks:  # the workers do not know it
                new.append(request.introduce())
            elif num_blocks > request.num_worker_blocks:
                new_block_ids = [table[request.num_worker_blocks :] for table in request.block_tables]
            request.num_worker_blocks = num_blocks
            num_drafts = drafts.get(key, 0) if drafts else 0
            num_drawn = samples + num_drafts
            if samples:
                request.num_guesses = max(min(most_guesses, request.end_at - stop - 2), 0) if most_guesses else 0
            scheduled.append(
                ScheduledRequest(
                    key, start, num_tokens + num_drafts, new_block_ids, samples, num_drafts, request.num_guesses
                )
            )
            num_guesses = request.num_guesses if samples else 0
            shares.append(_Share(request, request.restarts, stop, num_drawn, samples and num_tokens == 1, num_guesses))
            request.num_computed = stop + num_drafts
            request.last_step_id = step_id
            request.num_in_flight += num_drawn
            request.num_drafts += num_drafts
        self._in_flight[step_id] = shares
        self.kv.begin_step(step_id)
        return new, scheduled


def _is_handed_over(request: Request) -> bool:
    """Whether it waits for KV of which another engine has said where it is."""
    return request.kv == "await_peer" and request.handoff is not None


def _decodes(request: Request) -> bool:
    """Whether it takes at most one token of a step's budget; else it has a prompt, or output, to compute."""
    return request.num_planned - request.num_computed <= 1


def _wants_a_token(request: Request) -> bool:
    """Whether it decodes, and must not stand still."""
    return _decodes(request) and not request.stands_still
