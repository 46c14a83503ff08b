"""Defects that the random schedules must find, applied by monkeypatch. None of them is a switch in the product."""

from collections.abc import Callable, Sequence
from sys import maxsize
from typing import Any

import pytest

from pdkv.connectors.base import Cancel, FinishDecision, RequestView, TransferKey, TransferOutcome
from pdkv.connectors.memory.fabric import Endpoint, MemoryFabric
from pdkv.connectors.memory.pull import MemoryPullScheduler, MemoryPullWorker
from pdkv.connectors.memory.push import MemoryPushWorker
from pdkv.engine import queues
from pdkv.engine.core import EngineCore
from pdkv.engine.kv.block_pool import Holder
from pdkv.engine.kv.kv_cache_manager import KVCacheManager
from pdkv.engine.outside.external import ExternalKV
from pdkv.engine.outside.loads import Loads
from pdkv.engine.plan import SampledTokens, StepOutput
from pdkv.engine.queues import Queues
from pdkv.engine.request import Request
from pdkv.engine.request_book import RequestBook
from pdkv.engine.scheduler import Drawn, Scheduler
from pdkv.engine.stopping import StopRules
from pdkv.errors import PeerGone, TransferError
from pdkv.prefill.leases import LeaseTable
from pdkv.wire.kv import Order
from pdkv.wire.messages import Tokens
from pdkv.wire.types import RequestKey
from state_machine.standin_store import StandInStoreMetadata, StandInStoreScheduler, StandInStoreWorker

Pair = tuple[str, Order, str]
Patch = pytest.MonkeyPatch
Planted = tuple[Callable[[Patch], None], Pair, tuple[int, ...]]

PULL: Pair = ("pull", "prefill_first", "async")
PUSH: Pair = ("push", "concurrent", "async")
STORE: Pair = ("store", "prefill_first", "async")
LAYERWISE: Pair = ("store", "prefill_first", "layerwise")


def lease_freed_early(patch: Patch) -> None:
    """The lease is on the books, but its blocks are free."""
    grant = LeaseTable.grant

    def broken(
        self: LeaseTable, request: Request, block_ids: Sequence[int], deadline: float, *, until_release: bool
    ) -> None:
        grant(self, request, [], deadline, until_release=until_release)

    patch.setattr(LeaseTable, "grant", broken)


def quarantine_skipped(patch: Patch) -> None:
    """Blocks that a peer may still write are free at once."""
    end_load = ExternalKV.end_load

    def broken(self: ExternalKV, key: TransferKey, *, transfer_ended: bool) -> None:
        load = self.loads[key]
        exposed = load.started and not (load.done or transfer_ended)
        end_load(self, key, transfer_ended=True)
        if exposed:
            self._cancels.append(Cancel(key, "receive"))

    patch.setattr(ExternalKV, "end_load", broken)


def generation_not_reread(patch: Patch) -> None:
    """What was read counts, whether or not its source was reused."""
    patch.setattr(MemoryPullWorker, "check_generations", lambda *_: None)


def tail_indexed(patch: Patch) -> None:
    """A partial tail is found by the prefix before it instead of by its transfer."""

    def broken(self: StandInStoreScheduler, request: RequestView) -> bytes:
        num_full = request.num_wanted // self.block_size
        return b"tail of " + (request.block_keys[num_full - 1] if num_full else b"nothing")

    patch.setattr(StandInStoreScheduler, "_tail_name", broken)


def attempt_ignored(patch: Patch) -> None:
    """All attempts of a transfer are one."""
    patch.setattr(
        Request, "transfer_key", property(lambda self: TransferKey(self.submit.transfer_id, 0), lambda self, key: None)
    )
    patch.setattr(RequestView, "transfer_key", property(lambda self: TransferKey(self.transfer_id, 0)))


def late_write_admitted(patch: Patch) -> None:
    """A write lands although the transfer has ended here."""
    stop_receiving = MemoryPushWorker.stop_receiving

    def broken(self: MemoryPushWorker, key: TransferKey, error: TransferError) -> None:
        incoming = self._incoming.get(key)
        stop_receiving(self, key, error)
        if incoming is not None:
            self._incoming[key] = incoming

    patch.setattr(MemoryPushWorker, "stop_receiving", broken)


def duplicate_release_frees_twice(patch: Patch) -> None:
    """A lease that was ended is ended again by the next Release."""
    end = LeaseTable.end
    ended: dict[tuple[int, TransferKey], Any] = {}

    def broken(self: LeaseTable, key: TransferKey) -> Any:
        lease = end(self, key)
        if lease is not None:
            ended[(id(self), key)] = lease
            return lease
        again = ended.get((id(self), key))
        if again is not None:
            self._pool.release(again.block_ids, Holder.LEASE)
        return again

    patch.setattr(LeaseTable, "end", broken)


def old_epoch_accepted(patch: Patch) -> None:
    """An engine's name is enough; its incarnation does not matter."""

    def endpoint(self: MemoryFabric, engine: str, epoch: str) -> Endpoint:
        if engine not in self._endpoints:
            raise PeerGone(engine)
        return self._endpoints[engine]

    matched = MemoryPullScheduler.get_num_new_matched_tokens

    def broken(self: MemoryPullScheduler, request: RequestView, num_computed_tokens: int) -> Any:
        if request.handoff is not None:
            self.epochs = {**self.epochs, request.handoff.engine: request.handoff.epoch}
        return matched(self, request, num_computed_tokens)

    patch.setattr(MemoryFabric, "endpoint", endpoint)
    patch.setattr(MemoryPullScheduler, "get_num_new_matched_tokens", broken)


def save_committed_after_failed_load(patch: Patch) -> None:
    """What a step staged becomes visible without waiting for its confirmation."""
    save_kv_layer = StandInStoreWorker.save_kv_layer

    def broken(self: StandInStoreWorker, layer: int, kv_cache: Any, meta: StandInStoreMetadata) -> None:
        save_kv_layer(self, layer, kv_cache, meta)
        for key, _, name in meta.stage:
            self.store.put(name, self._staging[(meta.step_id, key, name)])

    patch.setattr(StandInStoreWorker, "save_kv_layer", broken)


def decode_writes_into_its_own_hit(patch: Patch) -> None:
    """The loaded range begins at 0 instead of behind the local hit."""
    for side in (MemoryPullScheduler,):
        original = side.update_state_after_alloc

        def broken(
            self: MemoryPullScheduler,
            request: RequestView,
            block_ids: Sequence[int],
            num: int,
            original: Any = original,
        ) -> Any:
            if num:
                num += request.num_local_hit
                fields = {name: getattr(request, name) for name in request.__struct_fields__}
                request = RequestView(**{**fields, "num_local_hit": 0})
            return original(self, request, block_ids, num)

        patch.setattr(side, "update_state_after_alloc", broken)


def block_cached_before_it_is_filled(patch: Patch) -> None:
    """Content enters the cache when it is scheduled."""
    begin_shares = Scheduler._begin_shares

    def broken(self: Scheduler, step_id: int, batch: Sequence[tuple[Request, int]], drafts: Any) -> Any:
        for request, num_tokens in batch:
            confirmed = request.num_confirmed
            request.num_confirmed = request.num_computed + num_tokens
            self.kv.commit(request)
            request.num_confirmed = confirmed
        return begin_shares(self, step_id, batch, drafts)

    patch.setattr(Scheduler, "_begin_shares", broken)


def preempted_blocks_handed_off(patch: Patch) -> None:
    """The hand-off names the blocks that the request had before its preemption."""
    preempt, finished = Scheduler._preempt, ExternalKV.finished
    lost: dict[RequestKey, list[int]] = {}

    def remember(self: Scheduler, request: Request) -> None:
        lost[request.key] = list(request.block_tables[0])
        preempt(self, request)

    def broken(self: ExternalKV, request: Request) -> FinishDecision:
        (actual,) = request.block_tables
        stale = lost.pop(request.key, [])[: len(actual)]
        request.block_tables = [stale + actual[len(stale) :]]
        result = finished(self, request)
        request.block_tables = [actual]
        return result

    patch.setattr(Scheduler, "_preempt", remember)
    patch.setattr(ExternalKV, "finished", broken)


def preempted_passes_the_urgent(patch: Patch) -> None:
    """What was preempted, or sent back, goes to the head of the queue whatever its priority."""

    def broken(self: Queues, request: Request) -> None:
        self._give_back(request)
        request.restart()
        with patch.context() as once:
            once.setattr(queues, "_priority", lambda _: -maxsize)
            self.waiting.add(request, before_equals=True)
        self.needs_step = True

    patch.setattr(Queues, "send_back", broken)


def victims_by_age_alone(patch: Patch) -> None:
    """Requests run, and give way, in the order in which they began, whatever their priority."""
    patch.setattr(Queues, "run", lambda self, request: self.running.append(request))


def part_of_a_load_counted_as_more(patch: Patch) -> None:
    """A load that came in part is believed to have brought one block more."""
    fall_back = Loads._fall_back

    def broken(self: Loads, request: Request, outcome: TransferOutcome, num_loaded: int = 0) -> None:
        fall_back(self, request, outcome, num_loaded and num_loaded + self._kv.block_size)

    patch.setattr(Loads, "_fall_back", broken)


def part_of_a_load_with_its_step(patch: Patch) -> None:
    """What a step in flight computes behind a load counts, although the load came in part."""
    resume = Request.resume

    def broken(self: Request, num_tokens: int) -> None:
        resume(self, num_tokens)
        self.restarts -= 1

    patch.setattr(Request, "resume", broken)


def over_reserved_slots_published(patch: Patch) -> None:
    """What is planned counts as computed: slots of steps in flight enter the cache and leave for others."""
    commit, report_confirmed = KVCacheManager.commit, ExternalKV.report_confirmed

    def committed(self: KVCacheManager, request: Request) -> int:
        request.num_confirmed = request.num_computed
        return commit(self, request)

    def reported(self: ExternalKV, request: Request, **how: bool) -> int:
        request.num_confirmed = request.num_computed
        return report_confirmed(self, request, **how)

    patch.setattr(KVCacheManager, "commit", committed)
    patch.setattr(ExternalKV, "report_confirmed", reported)


def tokens_behind_the_stop(patch: Patch) -> None:
    """What a step in flight draws for a request that has ended is told as well."""
    update = EngineCore.finish_step
    ended: dict[RequestKey, Request] = {}
    forget = RequestBook._forget

    def remember(self: RequestBook, request: Request) -> None:
        ended[request.key] = request
        forget(self, request)

    def broken(self: EngineCore, output: StepOutput, now: float) -> None:
        late = [key for key in output.sampled if key in ended and key not in self.requests]
        update(self, output, now)
        for key in late:
            position, tokens = len(ended[key].output_token_ids), output.sampled[key].token_ids
            self._outbox(ended[key].router_id, Tokens(*key, position, tokens))

    patch.setattr(RequestBook, "_forget", remember)
    patch.setattr(EngineCore, "finish_step", broken)


def blocks_freed_under_a_step(patch: Patch) -> None:
    """Who leaves gives its blocks back at once, whatever step in flight names them."""
    free = KVCacheManager.free

    def broken(self: KVCacheManager, request: Request) -> bool:
        request.last_step_id = -1
        return free(self, request)

    patch.setattr(KVCacheManager, "free", broken)


def rejected_rows_published(patch: Patch) -> None:
    """All rows of a step are confirmed, those of wrong guesses included."""
    take_drawn = Scheduler._take_drawn

    def broken(self: Scheduler, request: Request, sampled: SampledTokens, num_drawn: int) -> Drawn:
        drawn = take_drawn(self, request, sampled, num_drawn)
        if drawn.reason is None:
            planned = len(request.prompt_token_ids) + drawn.position + num_drawn - 1
            request.num_confirmed = min(planned, request.num_tokens)
        return drawn

    patch.setattr(Scheduler, "_take_drawn", broken)


def rejected_rows_counted(patch: Patch) -> None:
    """What was reserved for guesses is not given back."""
    take_drawn = Scheduler._take_drawn

    def broken(self: Scheduler, request: Request, sampled: SampledTokens, num_drawn: int) -> Drawn:
        num_computed = request.num_computed
        drawn = take_drawn(self, request, sampled, num_drawn)
        request.num_computed = num_computed
        return drawn

    patch.setattr(Scheduler, "_take_drawn", broken)


def rejected_rows_given_to_a_sibling(patch: Patch) -> None:
    """Blocks reserved for guesses that were wrong are free at once, though the workers know them as the request's."""
    take_drawn = Scheduler._take_drawn

    def broken(self: Scheduler, request: Request, sampled: SampledTokens, num_drawn: int) -> Drawn:
        drawn = take_drawn(self, request, sampled, num_drawn)
        count = self.kv.blocks_for(max(request.num_computed, request.num_tokens))
        for table in request.block_tables:
            self.kv.pool.release(table[count:], Holder.ACTIVE)
            del table[count:]
        return drawn

    patch.setattr(Scheduler, "_take_drawn", broken)


def rejected_rows_saved(patch: Patch) -> None:
    """The connector is told of all rows of a step, and saves them for others; the engine's own cache is right."""
    take_drawn, report_confirmed = Scheduler._take_drawn, ExternalKV.report_confirmed
    planned: dict[tuple[Request, int], int] = {}  # by request and how often it began anew

    def taken(self: Scheduler, request: Request, sampled: SampledTokens, num_drawn: int) -> Drawn:
        drawn = take_drawn(self, request, sampled, num_drawn)
        num_rows = min(len(request.prompt_token_ids) + drawn.position + num_drawn - 1, request.num_tokens)
        planned[request, request.restarts] = num_rows
        request.update_hash_keys(num_rows // self.kv.block_size * self.kv.block_size, self.kv.hash_block_size)
        return drawn

    def reported(self: ExternalKV, request: Request, **how: bool) -> int:
        confirmed = request.num_confirmed
        request.num_confirmed = max(confirmed, planned.get((request, request.restarts), 0))
        due_at = report_confirmed(self, request, **how)
        request.num_confirmed = confirmed
        return due_at

    patch.setattr(Scheduler, "_take_drawn", taken)
    patch.setattr(ExternalKV, "report_confirmed", reported)


def guesses_behind_the_stop(patch: Patch) -> None:
    """Right guesses behind a token that ends the request are its output, too."""
    apply = StopRules.apply

    def broken(self: StopRules, request: Request, num_new: int) -> Any:
        output = list(request.output_token_ids)
        ended = apply(self, request, num_new)
        request.output_token_ids[:] = output
        return ended

    patch.setattr(StopRules, "apply", broken)


def guesses_beyond_the_length(patch: Patch) -> None:
    """A request has guesses, and output, behind its max_tokens."""
    wanted, apply = Scheduler._wanted_drafts, StopRules.apply

    def wanted_behind(self: Scheduler, decodes: Sequence[tuple[Request, int]]) -> Any:
        for request, _ in decodes:
            request.end_at += 2
        found = wanted(self, decodes)
        for request, _ in decodes:
            request.end_at -= 2
        return found

    def applied(self: StopRules, request: Request, num_new: int) -> Any:
        output = list(request.output_token_ids)
        reason, token_id = apply(self, request, num_new)
        if reason == "length":
            request.output_token_ids[:] = output
        return reason, token_id

    patch.setattr(Scheduler, "_wanted_drafts", wanted_behind)
    patch.setattr(StopRules, "apply", applied)


def guesses_handed_off(patch: Patch) -> None:
    """What is handed off has a guess behind its first token that no step has verified."""
    take_drawn = Scheduler._take_drawn

    def broken(self: Scheduler, request: Request, sampled: SampledTokens, num_drawn: int) -> Drawn:
        if request.submit.until != "end" and sampled.token_ids:
            sampled = SampledTokens([*sampled.token_ids, sampled.token_ids[0]], None)
        return take_drawn(self, request, sampled, num_drawn)

    patch.setattr(Scheduler, "_take_drawn", broken)


DEFECTS: Sequence[Planted] = (
    (lease_freed_early, PULL, (0, 3, 1)),
    (quarantine_skipped, PUSH, (8, 3, 1)),
    (generation_not_reread, PULL, (0, 26, 26)),
    (tail_indexed, STORE, (0, 0, 0)),
    (attempt_ignored, PULL, (1053, 1388, 1152)),
    (late_write_admitted, PUSH, (3, 5, 3)),
    (duplicate_release_frees_twice, PULL, (0, 4, 1)),
    (old_epoch_accepted, PULL, (606, 268, 268)),
    (save_committed_after_failed_load, LAYERWISE, (35, 6, 6)),
    (decode_writes_into_its_own_hit, PULL, (0, 5, 3)),
    (block_cached_before_it_is_filled, PULL, (0, 0, 0)),
    (preempted_blocks_handed_off, PULL, (538, 124, 412)),
    (preempted_passes_the_urgent, PULL, (13, 129, 12)),
    (victims_by_age_alone, PULL, (15, 6, 4)),
    (part_of_a_load_counted_as_more, STORE, (10, 22, 34)),
    (part_of_a_load_with_its_step, LAYERWISE, (37, 33, 33)),
)
"""Each defect, a pair of mode and order in which it shows, and the number of the first schedule that finds it, by the
number of steps planned ahead."""

LATE_DEFECTS: Sequence[Planted] = (
    (over_reserved_slots_published, PULL, (0, 3, 3)),
    (tokens_behind_the_stop, PULL, (0, 12, 12)),
    (blocks_freed_under_a_step, PULL, (0, 0, 0)),
)
"""Those that do no harm while steps follow each other strictly in turn."""

DRAFT_DEFECTS: Sequence[Planted] = (
    (rejected_rows_published, PULL, (0, 1, 1)),
    (rejected_rows_counted, PULL, (0, 0, 0)),
    (rejected_rows_given_to_a_sibling, PULL, (5, 9, 6)),
    (guesses_behind_the_stop, PULL, (4, 3, 3)),
    (rejected_rows_saved, STORE, (0, 16, 4)),
    (guesses_beyond_the_length, PULL, (2, 7, 1)),
    (guesses_handed_off, PULL, (0, 0, 0)),
)
"""Those that need a proposer."""
