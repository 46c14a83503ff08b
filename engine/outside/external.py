"""KV that is loaded from other engines and stores or sent to them, through the connector's scheduler side.

Owns the requests that wait outside the batch for a load, the blocks that a peer may still write (quarantine) and the
blocks that a transfer reads (I/O holds).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from sys import maxsize
from typing import NamedTuple

import msgspec

from pdkv.base.secret_options import without_secrets
from pdkv.connectors.base import (
    NO_MATCH,
    OBSERVES_NOTHING,
    BlockHold,
    BlockIds,
    BlockTables,
    Cancel,
    ConfirmedRange,
    FinishDecision,
    KVConnectorMetadata,
    MatchedTokens,
    ScheduledRange,
    SchedulerConnector,
    SchedulerView,
    Shown,
    Stats,
    TransferKey,
    TransferOutcome,
    TransferResults,
)
from pdkv.connectors.stats import stats_under, sum_stats
from pdkv.engine.kv.block_pool import BlockPool, Holder
from pdkv.engine.outside.swap import SwapRule
from pdkv.engine.request import Request
from pdkv.errors import TransferCancelled
from pdkv.wire.reports import ConnectorStats
from pdkv.wire.tiers import TierEvents
from pdkv.wire.types import MAX_CONNECTOR_PARTS, MAX_PROBLEM_CHARS, RequestKey

NUM_PREFETCH_REQUESTS = 8
"""The most waiting requests whose block keys are shown to the connector."""


@dataclass(slots=True)
class KVLoad:
    """Tokens [start, stop) of a request to be loaded from outside."""

    request: Request
    start: int
    stop: int
    deadline: float
    is_early: bool = False  # it began while its source was computing the rest
    layerwise_step: int | None = None  # scheduled at once in this step; None: the request waits outside the batch
    started: bool = False  # the connector has the blocks, which may be written
    done: bool = False


class EndedLoad(NamedTuple):
    """A load with its transfer ended."""

    load: KVLoad
    ok: bool
    outcome: TransferOutcome


class EndedSend(NamedTuple):
    """A transfer from this engine that has ended."""

    key: TransferKey
    ok: bool
    outcome: TransferOutcome


class Settled(NamedTuple):
    """Everything that the results of one step ended."""

    loads: list[EndedLoad]
    sends: list[EndedSend]
    freed: bool  # blocks may have been freed


@dataclass(slots=True)
class _News:
    """The news for the connector in the next view."""

    confirmed: dict[TransferKey, ConfirmedRange] = field(default_factory=dict)
    preempted: list[TransferKey] = field(default_factory=list)
    finished: list[TransferKey] = field(default_factory=list)
    aborted: list[TransferKey] = field(default_factory=list)
    sent_anew: set[TransferKey] = field(default_factory=set)  # to another reader
    is_urgent: bool = False  # confirmed tokens that must not wait for more
    is_end_urgent: bool = False  # the end of a request, which must not wait for the next step

    def __bool__(self) -> bool:
        return bool(self.confirmed or self.preempted or self.finished or self.aborted)


class _Shows(NamedTuple):
    """The flags of a `Shown`, as attributes: testing a flag costs more than everything else a step does for a
    request.
    """

    handoffs: bool
    others: bool
    layerwise_loads: bool

    @classmethod
    def of(cls, shown: Shown) -> "_Shows":
        return cls(Shown.HANDOFFS in shown, Shown.OTHERS in shown, Shown.LAYERWISE_LOADS in shown)

    def includes(self, request: Request) -> bool:
        """Whether the connector is shown the request, whether or not it loads anything."""
        return self.handoffs if request.kv == "handoff" else self.others


class ExternalKV:
    """Loads, saves and their blocks. `connector` None: an engine without peers and stores."""

    def __init__(
        self,
        connector: SchedulerConnector | None,
        pool: BlockPool,
        swap: SwapRule,
        *,
        block_size: int,
        num_groups: int = 1,
    ) -> None:
        self.connector = connector
        self.tiers = None if connector is None else connector.tiers
        self.loads: dict[TransferKey, KVLoad] = {}
        self.unstarted: dict[TransferKey, KVLoad] = {}  # loads whose source is not known yet
        self.layerwise: dict[TransferKey, KVLoad] = {}  # loads that arrive during a step
        self.num_unknown_results = 0
        self.num_damaged = 0  # stored values that loads and operators' orders treated as misses
        self.worker_stats: Stats = {}  # as the ranks last reported
        observes = OBSERVES_NOTHING if connector is None else connector.observes
        self._shows_scheduled = _Shows.of(observes.scheduled)
        self._shows_confirmed = _Shows.of(observes.confirmed)
        self._shows_waiting_keys = observes.waiting_keys
        self._confirmed_steps = observes.confirmed_steps
        self._num_waited = 0  # views without confirmed tokens
        self._confirmed_unit = max(block_size, observes.confirmed_tokens)
        self._pool = pool
        self._swap = swap
        self._block_size = block_size
        self._no_blocks: list[list[int]] = [[] for _ in range(num_groups)]  # for a request that has none
        self._quarantine: dict[TransferKey, Sequence[int]] = {}
        self._holds: dict[TransferKey, BlockHold] = {}
        self._cancels: list[Cancel] = []
        self._news = _News()
        self._kept: dict[TransferKey, Sequence[int]] = {}  # blocks of requests that finished since the last view

    @property
    def has_news(self) -> bool:
        """Whether an empty step would tell the workers something that cannot wait."""
        connector, news = self.connector, self._news
        if connector is None:
            return False
        is_urgent = news.is_end_urgent or bool(news.confirmed)
        return is_urgent or bool(self._cancels) or connector.has_pending_work

    @property
    def has_orders(self) -> bool:
        """Whether the connector has something for its workers."""
        return self.connector is not None and self.connector.has_pending_work

    @property
    def kept_blocks(self) -> Collection[Sequence[int]]:
        """Blocks of ended requests that are held until the connector has been told their content, at the end of this
        plan.
        """
        return self._kept.values()

    @property
    def is_idle(self) -> bool:
        """Whether no load, hold or quarantine is left."""
        return not (self.loads or self._quarantine or self._holds or self._cancels)

    def match(self, request: Request, num_computed: int) -> MatchedTokens:
        """The tokens that can be loaded from outside beyond the local hit."""
        if self.connector is None or request.num_wanted <= num_computed or not self._may_load(request):
            return NO_MATCH
        if request.transfer_key in self._quarantine:
            return NO_MATCH  # its earlier load has not released its blocks yet
        matched = self.connector.get_num_new_matched_tokens(request.view(), num_computed)
        is_swapped = request.preempted and request.kv != "await_peer"
        if is_swapped and matched.num_tokens and not self._swap.prefers_load(request.key, matched.num_tokens):
            return NO_MATCH
        return matched

    def _may_load(self, request: Request) -> bool:
        """Whether any of its KV may be loaded from outside."""
        if request.load_failed:
            return False
        if request.kv == "await_peer":
            return True
        if request.submit.params.computes_prompt:
            return False
        return not request.preempted or self._swap.looks

    def num_in_blocks(self, num_tokens: int) -> int:
        """The number of these first tokens that fill whole blocks."""
        return num_tokens // self._block_size * self._block_size

    def name_confirmed(self, request: Request, start: int, stop: int) -> bytes | None:
        """The payload of a hand-off of the request's tokens [start, stop), which are confirmed; None: they are not read
        yet.
        """
        if self.connector is None:
            return None
        tables = [table[start // self._block_size :] for table in request.block_tables]
        return self.connector.name_confirmed(request.view(), tables, stop - start)

    def show_scheduled(self, step_id: int, batch: Sequence[tuple[Request, int]]) -> list[ScheduledRange]:
        """The connector's view of a step that computes this many more tokens of each request."""
        handoffs, others, layerwise_loads = self._shows_scheduled
        layerwise: set[RequestKey] = set()
        if layerwise_loads:
            layerwise = {load.request.key for load in self.layerwise.values() if load.layerwise_step == step_id}
        if not (handoffs or others or layerwise):
            return []
        return [
            ScheduledRange(
                r.view(),
                r.num_computed,
                r.num_computed + num_tokens,
                self._shown(r.block_tables),
                may_be_void=r.transfer_key in self.layerwise,
            )
            for r, num_tokens in batch
            if (handoffs if r.kv == "handoff" else others) or (layerwise and r.key in layerwise)
        ]

    def _shown(self, block_tables: list[list[int]]) -> list[BlockIds]:
        """The part of a request's tables that the connector sees, without a copy."""
        return [BlockIds(table) for table in block_tables or self._no_blocks]

    def add_load(self, load: KVLoad) -> None:
        """Let the request wait for [start, stop); its blocks are allocated."""
        key = load.request.transfer_key
        assert key not in self.loads
        self.loads[key] = self.unstarted[key] = load
        if load.layerwise_step is not None:
            self.layerwise[key] = load

    def start(self, load: KVLoad) -> bytes | None:
        """Pass the blocks to the connector; returns the ticket for the peer, if any."""
        assert self.connector is not None
        load.started = load.stop > load.start
        load.done = not load.started
        request = load.request
        self.unstarted.pop(request.transfer_key, None)
        return self.connector.update_state_after_alloc(request.view(), request.block_tables, load.stop - load.start)

    def end_load(self, key: TransferKey, *, transfer_ended: bool) -> None:
        """End the request's load, finished or not. Blocks that may still be written go into quarantine."""
        load = self.loads.pop(key)
        self.unstarted.pop(key, None)
        self.layerwise.pop(key, None)
        if load.started and not (load.done or transfer_ended):
            exposed = load.request.held_blocks(load.start // self._block_size)
            self._pool.hold(exposed, Holder.QUARANTINE)
            self._quarantine[key] = exposed
            self._cancels.append(Cancel(key, "receive"))

    def report_confirmed(self, request: Request, *, last: bool = False, again: bool = False) -> int:
        """Tell the connector about newly confirmed content of the request's blocks.

        Returns:
            The number of confirmed tokens at which there is more to tell.
        """
        if not self._shows_confirmed.includes(request):
            return maxsize
        start = 0 if again else request.num_reported
        stop, unit = request.num_confirmed, self._confirmed_unit
        if last or again or stop // unit > start // unit:
            request.num_reported = stop
            self._confirm(ConfirmedRange(request.view(), start, stop, self._shown(request.block_tables), last))
            if request.kv == "handoff" or start < len(request.prompt_token_ids):
                self._news.is_urgent = True
        return (request.num_reported // unit + 1) * unit

    def report_leased(self, request: Request, block_tables: BlockTables) -> None:
        """Show a handed-off request's blocks once more: its ticket came after its end."""
        tables = block_tables or self._no_blocks
        self._confirm(ConfirmedRange(request.view(), 0, request.num_confirmed, tables, True))
        self._news.sent_anew.add(request.transfer_key)
        self._news.is_urgent = True

    def _confirm(self, told: ConfirmedRange) -> None:
        """Put confirmed content into the next view, merged with earlier news of the request."""
        key, confirmed = told.request.transfer_key, self._news.confirmed
        before = confirmed.get(key)
        if before is not None:
            told = msgspec.structs.replace(told, start=min(before.start, told.start), last=before.last or told.last)
        confirmed[key] = told

    def preempted(self, request: Request) -> None:
        """Note that the request lost its blocks and will be scheduled again; what the connector has not been told yet
        is void.
        """
        if self.connector is None:
            return
        self._retract(request.transfer_key)
        self._news.preempted.append(request.transfer_key)

    def finished(self, request: Request) -> FinishDecision:
        """Note that the request has ended, and ask the connector whether its blocks are still needed."""
        if self.connector is None:
            return FinishDecision(hold_blocks=False)
        key = request.transfer_key
        self._news.finished.append(key)
        self._news.is_end_urgent |= self.connector.must_hear_end(key)
        if key in self._news.confirmed:
            held = request.held_blocks()
            self._pool.hold(held, Holder.ACTIVE)  # until the connector has been told what is in them
            self._kept[key] = held
        return self.connector.request_finished(request.view(), request.block_tables)

    def aborted(self, key: TransferKey, *, cancel_sending: bool = False) -> None:
        """Note that the request or its hand-off was given up; transfers from here are cancelled if requested."""
        if self.connector is None:
            return
        if key not in self._kept or not self._shows_confirmed.others:
            self._retract(key)  # otherwise a store may still hold a finished request's blocks until the next view
        self._news.aborted.append(key)
        self._news.is_end_urgent |= self.connector.must_hear_end(key)
        if cancel_sending and self.has_saves(key) and (cancel := Cancel(key, "send")) not in self._cancels:
            self._cancels.append(cancel)

    def _retract(self, key: TransferKey) -> None:
        """Withdraw a request's unreported confirmed content: its blocks may have another owner when the view is
        built.
        """
        self._news.confirmed.pop(key, None)
        self._news.sent_anew.discard(key)
        if (held := self._kept.pop(key, None)) is not None:  # no view will be built for them alone
            self._pool.release(held, Holder.ACTIVE)

    def has_saves(self, key: TransferKey) -> bool:
        """Whether a transfer still reads the request's blocks."""
        return any(hold.owner == key for hold in self._holds.values())

    def build_meta(
        self, step_id: int, scheduled: Sequence[ScheduledRange], waiting: Iterable[Request]
    ) -> tuple[KVConnectorMetadata | None, list[Cancel], bool]:
        """The step's orders for the workers; takes the I/O holds that they need.

        Returns:
            The metadata, the transfers to cancel, and whether blocks were freed that this step could not use yet.
        """
        if self.connector is None:
            return None, [], False
        news = self._take_news()
        cancels, self._cancels = self._cancels, []
        first = islice(waiting, NUM_PREFETCH_REQUESTS) if self._shows_waiting_keys else ()
        shown = [request for request in first if self._may_load(request)]
        terms = [request.submit.kv_terms for request in shown]
        view = SchedulerView(
            step_id=step_id,
            scheduled=scheduled,
            confirmed=list(news.confirmed.values()),
            preempted=news.preempted,
            finished=news.finished,
            aborted=news.aborted,
            waiting_keys=[request.hash_keys for request in shown],
            cancelled=[cancel.key for cancel in cancels if cancel.direction == "receive"],
            waiting_terms=terms if any(terms) else (),
        )
        meta = self.connector.build_connector_meta(view)
        for hold in meta.holds:
            self.hold(hold)
        kept, self._kept = self._kept, {}
        for block_ids in kept.values():
            self._pool.release(block_ids, Holder.ACTIVE)
        return meta, cancels, bool(kept)

    def _take_news(self) -> _News:
        """The news to tell now. A few tokens of decodes wait for others, as long as the connector allows."""
        news = self._news
        self._num_waited += 1
        hurries = news.is_urgent or news.preempted or news.finished or news.aborted
        if news.confirmed and not hurries and self._num_waited < self._confirmed_steps:
            return _News()
        self._num_waited = 0
        self._news = _News()
        return news

    def hold(self, hold: BlockHold) -> None:
        """Hold the blocks that a transfer reads until its end is reported."""
        assert hold.key not in self._holds
        self._pool.hold(hold.block_ids, Holder.ACTIVE)
        self._holds[hold.key] = hold

    def settle(self, results: TransferResults) -> Settled:
        """Settle a step's results as its ranks reported them: holds and quarantines that they end are released.

        The connector first says what the engine should act on, and is told before the engine acts.
        """
        self.num_damaged += sum([each.num_damaged for outcomes in results for each in outcomes.values()])
        if self.connector is not None:
            results = self.connector.resolve_results(results)
        if self.connector is None or not results:
            return Settled([], [], False)
        self.connector.update_connector_output(results)
        settled = Settled([], [], True)
        for ok, outcomes in ((True, results.finished_sending), (False, results.failed_sending)):
            for key, outcome in outcomes.items():
                hold = self._holds.pop(key, None)
                if hold is not None:
                    self._pool.release(hold.block_ids, Holder.ACTIVE)
                if key not in self._news.sent_anew:  # or it is about an earlier reader, whose end is not awaited
                    settled.sends.append(EndedSend(key, ok, outcome))
        for ok, outcomes in ((True, results.finished_receiving), (False, results.failed_receiving)):
            for key, outcome in outcomes.items():
                exposed, load = self._quarantine.pop(key, None), self.loads.get(key)
                if exposed is not None:
                    self._pool.release(exposed, Holder.QUARANTINE)
                    if (cancel := Cancel(key, "receive")) in self._cancels:
                        self._cancels.remove(cancel)  # else it would hit the request's next load
                elif load is None:
                    self.num_unknown_results += 1
                if load is not None:
                    settled.loads.append(EndedLoad(load, ok, outcome))
                    from_peer = load.request.kv == "await_peer" or load.request.handoff is not None
                    if not from_peer and outcome.code != TransferCancelled.code:
                        self._swap.loaded(load.stop - load.start, outcome.seconds)
        return settled

    def take_tier_events(self, name: str) -> Sequence[TierEvents]:
        """The connector's news, under its name, about tiers below the cache; their parts are named as in the stats."""
        events = () if self.tiers is None else self.tiers.take_events()
        return [msgspec.structs.replace(each, parts=[part.under(name) for part in each.parts]) for each in events]

    @property
    def problem(self) -> str:
        """Why the connector cannot be used now; empty: no problem is known."""
        return "" if self.tiers is None else without_secrets(self.tiers.problem)[:MAX_PROBLEM_CHARS]

    def get_stats(self, name: str) -> dict[str, ConnectorStats]:
        """The connector's counts, of both sides and all ranks, by its name or NAME/PART."""
        if self.connector is None:
            return {}
        stats = stats_under(name, sum_stats([self.worker_stats, self.connector.get_stats()]))
        return dict(islice(stats.items(), MAX_CONNECTOR_PARTS))
