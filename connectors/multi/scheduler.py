"""The scheduler side of `multi`: which match is loaded, which child sends, and what the children's results mean
together.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import NamedTuple

import msgspec

from pdkv.connectors.base import (
    ASK_AGAIN,
    NO_MATCH,
    NO_TRANSFERS,
    OBSERVES_NOTHING,
    BlockHold,
    BlockTables,
    ConnectorConfig,
    FinishDecision,
    KVConnectorMetadata,
    MatchedTokens,
    RequestView,
    SchedulerConnector,
    SchedulerView,
    Stats,
    Tiers,
    TransferKey,
    TransferOutcome,
    TransferResults,
)
from pdkv.connectors.multi.sending import SendingTable
from pdkv.connectors.multi.views import ChildViews
from pdkv.connectors.multi.wire import (
    MultiMetadata,
    bound_handoff,
    encode_handoff,
    encode_ticket,
    part_name,
    split_card,
    tag,
    untag,
)
from pdkv.connectors.stats import stats_under, sum_stats
from pdkv.errors import TransferCancelled
from pdkv.wire.kv import EngineCard
from pdkv.wire.reports import ConnectorStats
from pdkv.wire.tiers import CacheAnswer, CacheOrder, TierEvents

logger = logging.getLogger(__name__)

MAX_CARD_ERRORS = 1024
"""Refused incarnations of peers to remember, so that each is logged once."""


class _Choice(NamedTuple):
    """The match that the engine was told."""

    child: int
    is_async: bool


@dataclass(slots=True)
class _Load:
    """A running load, and what another child would need to take it over."""

    child: int
    request: RequestView
    block_tables: BlockTables
    num_tokens: int
    may_fall_back: bool
    code: str = ""  # why the first child failed, if the second one loads a part of it
    more: bool = False  # its source computes the rest: it is told again


class _ChildTiers(NamedTuple):
    child: str
    part: str  # its name among the parts
    tiers: Tiers


class MultiTiers(Tiers):
    """The tiers of all children; a tier has its child's name, as in the stats, since two may use the same medium."""

    def __init__(self, children: Sequence[_ChildTiers]) -> None:
        self._children = children

    def take_events(self) -> Sequence[TierEvents]:
        return [events.under(child.part) for child in self._children for events in child.tiers.take_events()]

    def order(self, order: CacheOrder) -> int:
        return sum(child.tiers.order(order.within(child.part)) for child in self._children)

    def take_answers(self) -> Sequence[CacheAnswer]:
        return [answer.under(child.part) for child in self._children for answer in child.tiers.take_answers()]

    @property
    def problem(self) -> str:
        problems = [(child.child, child.tiers.problem) for child in self._children]
        return "; ".join(f"{name}: {problem}" for name, problem in problems if problem)


class MultiScheduler(SchedulerConnector):
    """Asks every child, lets one load, and merges what their workers report by transfer."""

    def __init__(self, config: ConnectorConfig, schedulers: Sequence[SchedulerConnector]) -> None:
        children = config.plan.parts
        self.observes = reduce(or_, (scheduler.observes for scheduler in schedulers), OBSERVES_NOTHING)
        self._num_fallbacks: Counter[int] = Counter()  # loads that another child took over, by the one that failed
        self.views = ChildViews(config.plan.kind, children)
        self.sending = SendingTable()
        self._engine = config.engine
        self._children = children
        kinds = [child.kind for child in children]
        self._pushing = kinds.index("push") if "push" in kinds else None
        self._schedulers = schedulers
        tiers = [
            _ChildTiers(child.name, part_name(i, child), side.tiers)
            for i, (child, side) in enumerate(zip(children, schedulers, strict=True))
            if side.tiers is not None
        ]
        self.tiers = MultiTiers(tiers) if tiers else None
        self._nothing = [NO_TRANSFERS for _ in schedulers]
        self._choices: dict[TransferKey, _Choice] = {}  # from the last question, until the blocks are allocated
        self._loads: dict[TransferKey, _Load] = {}
        self._taken_over: set[TransferKey] = set()  # loads that another child took over since the last metadata
        self._refused: OrderedDict[str, None] = OrderedDict()  # epochs of peers whose cards do not fit

    # --- loads ----------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> MatchedTokens:
        """The longest match, among equal ones the first. Children that are still looking are waited for unless
        everything is found. Cached KV found besides a hand-off is used only if the hand-off cannot be read.
        """
        key = request.transfer_key
        self._choices.pop(key, None)
        best, winner, looking = NO_MATCH, 0, False
        order: Sequence[int] = range(len(self._schedulers))
        if request.handoff is not None and request.handoff.more:
            order = [index for index in order if index == self.views.reader]
        elif request.kv == "await_peer":
            order = sorted(order, key=self.views.is_beside)
        for index in order:
            scheduler = self._schedulers[index]
            if request.kv == "await_peer" and self.views.is_beside(index) and (looking or best.num_tokens):
                break
            view = self.views.request(request, index)
            if view is None:
                continue
            matched = scheduler.get_num_new_matched_tokens(view, num_computed_tokens)
            looking = looking or matched.ask_again
            if not matched.ask_again and matched.num_tokens > best.num_tokens:
                best, winner = matched, index
        if looking and (not best.num_tokens or best.num_tokens < request.num_wanted - num_computed_tokens):
            return ASK_AGAIN
        if not best.num_tokens:
            return best
        self._choices[key] = _Choice(winner, best.mode == "async")
        return best._replace(without_handoff=not self.views.sees_handoff(request, winner))

    def update_state_after_alloc(
        self, request: RequestView, block_tables: BlockTables, num_external_tokens: int
    ) -> bytes | None:
        """Let the winner load; the others are told that nothing is loaded, and their tickets are dropped."""
        key = request.transfer_key
        choice = self._choices.pop(key, None) or _Choice(0, True)
        if (load := self._loads.get(key)) is not None and load.more:
            self._load_more(load, request, block_tables, num_external_tokens)
            return None
        ticket = None
        for index, scheduler in enumerate(self._schedulers):
            view = self.views.request(request, index)
            if view is None:
                continue
            loads = index == choice.child
            own = scheduler.update_state_after_alloc(view, block_tables, num_external_tokens if loads else 0)
            if own is not None and (loads or not num_external_tokens):
                ticket = encode_ticket(index, own)
        if num_external_tokens:
            tables = [list(table) for table in block_tables]
            more = request.handoff is not None and request.handoff.more
            is_whole = choice.is_async and not more
            self._loads[key] = _Load(choice.child, request, tables, num_external_tokens, is_whole, more=more)
        return ticket

    def _load_more(self, load: _Load, request: RequestView, block_tables: BlockTables, num_tokens: int) -> None:
        """Let the child that has begun load what is named since; if its part of the hand-off is missing, it fails."""
        assert request.handoff is not None
        load.more = request.handoff.more
        none = msgspec.structs.replace(request, handoff=msgspec.structs.replace(request.handoff, payload=b""))
        view = self.views.request(request, load.child) or none
        self._schedulers[load.child].update_state_after_alloc(view, block_tables, num_tokens)

    def _fall_back(self, key: TransferKey, load: _Load, code: str) -> bool:
        """Let another child fill the blocks that the first one did not. Once, and only if it fills all of them."""
        request = load.request
        is_loan = request.kv == "handoff" and self.views.sees_handoff(request, load.child)
        if not load.may_fall_back or is_loan or code == TransferCancelled.code:
            return False  # after a loan the engine asks again: what is found then is not the lender's
        for index, (child, scheduler) in enumerate(zip(self._children, self._schedulers, strict=True)):
            view = self.views.request(request, index)
            if index == load.child or child.kind == "push" or view is None:
                continue  # a push would need a ticket, and the peer already has one
            if view.kv_ready is None:  # no time to wait for an answer: only what is known counts
                view = msgspec.structs.replace(view, kv_ready=True)
            matched = scheduler.get_num_new_matched_tokens(view, request.num_local_hit)
            is_part = 0 < matched.num_tokens < load.num_tokens
            if matched.ask_again or matched.mode != "async" or not (is_part or matched.num_tokens >= load.num_tokens):
                continue
            if is_part and not self.views.is_beside(index):
                continue  # it takes part in the hand-off, and would have all of it
            load.num_tokens = min(matched.num_tokens, load.num_tokens)
            scheduler.update_state_after_alloc(view, load.block_tables, load.num_tokens)
            failed, load.code = load.child, code if is_part else ""
            name = self._children[failed].name
            logger.warning(
                "KV load of transfer %s (attempt %d): %s failed (%s), %s takes over", *key[:2], name, code, child.name
            )
            load.child, load.may_fall_back = index, False
            self._taken_over.add(key)
            self._num_fallbacks[failed] += 1
            return True
        return False

    # --- one step -------------------------------------------------------------------------------------------------

    def build_connector_meta(self, view: SchedulerView) -> MultiMetadata:
        for keys in (view.finished, view.aborted, view.preempted):
            for key in keys:
                self._choices.pop(key, None)
        handed_off = {confirmed.request.transfer_key for confirmed in view.confirmed if confirmed.last}
        if self._pushing is not None:
            for key in handed_off.difference(view.finished):
                self.sending.begin_again(key, self._pushing)
        for key in view.aborted:
            self.sending.forget(key)
        for key in view.finished:
            if key not in handed_off:
                self.sending.forget(key)
        cancels = self._late_cancels(view.cancelled)
        parts = self._parts(view)
        holds = [
            BlockHold(tag(index, hold.key), hold.block_ids, hold.owner)
            for index, part in enumerate(parts)
            for hold in part.holds
        ]
        if holds:
            self.sending.add_holds(holds)
        return MultiMetadata(
            step_id=view.step_id,
            needs_layer_hooks=any(part.needs_layer_hooks for part in parts),
            holds=holds,
            parts=parts,  # type: ignore[arg-type]  # encoded on the way to other ranks
            cancels=cancels,
        )

    def _late_cancels(self, cancelled: Sequence[TransferKey]) -> list[tuple[int, TransferKey]]:
        """Given-up loads that another child takes over in this step: its worker is told of the cancel before
        the load.
        """
        cancels = []
        for key in cancelled:
            load = self._loads.get(key)
            if load is not None:
                load.may_fall_back = False
                if key in self._taken_over:
                    cancels.append((load.child, key))
        self._taken_over.clear()
        return cancels

    def _parts(self, view: SchedulerView) -> list[KVConnectorMetadata]:
        if not (view.scheduled or view.confirmed or view.waiting_keys):
            return [scheduler.build_connector_meta(view) for scheduler in self._schedulers]
        return [
            scheduler.build_connector_meta(self.views.step(view, index, scheduler.observes))
            for index, scheduler in enumerate(self._schedulers)
        ]

    def request_finished(self, request: RequestView, block_tables: BlockTables) -> FinishDecision:
        """Ask the children; blocks stay while one of them needs them. A pulling child that keeps no blocks, or has too
        long a payload for the common limit, takes no part in the hand-off.
        """
        key = request.transfer_key
        self._choices.pop(key, None)
        answers = [
            scheduler.request_finished(self.views.request(request, index) or request, block_tables)
            for index, scheduler in enumerate(self._schedulers)
        ]
        if request.kv != "handoff":
            return FinishDecision(hold_blocks=any(answer.hold_blocks for answer in answers))
        kinds = [child.kind for child in self._children]
        takes_part = [
            self.views.takes_part(key, i) and (kind != "pull" or answer.hold_blocks)
            for i, (kind, answer) in enumerate(zip(kinds, answers, strict=True))
        ]
        payloads = bound_handoff([answer.payload or b"" if takes_part[i] else None for i, answer in enumerate(answers)])
        holding = [i for i, answer in enumerate(answers) if answer.hold_blocks and payloads[i] is not None]
        is_leased = any(kinds[i] == "pull" for i in holding)  # until its reader releases it
        senders = {
            i
            for i, kind in enumerate(kinds)
            if takes_part[i] and (kind == "store" or (kind == "push" and i in holding))
        }
        if self.observes != OBSERVES_NOTHING:
            self.sending.begin(key, senders, tells_failure=not is_leased)
        until_release = is_leased or any(answers[i].until_release for i in holding)
        return FinishDecision(bool(holding), encode_handoff(payloads), until_release=until_release)

    # --- results --------------------------------------------------------------------------------------------------

    def name_confirmed(self, request: RequestView, block_tables: BlockTables, num_tokens: int) -> bytes | None:
        if self.views.reader is None:
            return None
        return self._schedulers[self.views.reader].name_confirmed(request, block_tables, num_tokens)

    def resolve_results(self, results: TransferResults) -> TransferResults:
        """Give each child its own results, and the engine those of transfers and holds.

        Results that belong to no load and no hold keep their child's key, so that the engine counts them as unknown.
        """
        split = self._split(results) if results else self._nothing
        merged = _no_results()
        for child, maps in enumerate(split):
            own = self._schedulers[child].resolve_results(maps)
            if own:
                self._schedulers[child].update_connector_output(own)
                self._settle_sent(child, own, merged)
                self._settle_received(child, own, merged)
        for key, outcome in self.sending.take_ended().items():
            merged[bool(outcome.code)][key] = outcome
        return TransferResults(*merged)

    def _split(self, results: TransferResults) -> list[TransferResults]:
        """Results by child, under its own keys."""
        split = [_no_results() for _ in self._schedulers]
        for which, source in enumerate(results):
            for tagged, outcome in source.items():
                child, key = untag(tagged)
                split[child][which][key] = outcome
        return [TransferResults(*maps) for maps in split]

    def _settle_sent(self, child: int, results: TransferResults, merged: "_Maps") -> None:
        """Settle sends: holds end at once, hand-offs with their last child."""
        for target, source in zip(merged[:2], results[:2], strict=True):
            for key, outcome in source.items():
                tagged = tag(child, key)
                owner = self.sending.end_hold(tagged)
                if owner is not None:
                    target[tagged] = outcome
                if owner is None or owner == key:
                    self.sending.end(key, child, outcome)

    def _settle_received(self, child: int, results: TransferResults, merged: "_Maps") -> None:
        """Settle a load: it ends, or another child takes it over."""
        for ok, target, source in zip((True, False), merged[2:], results[2:], strict=True):
            for key, outcome in source.items():
                load = self._loads.get(key)
                if load is None or load.child != child:
                    target[tag(child, key)] = outcome
                elif ok or not self._fall_back(key, load, outcome.code):
                    del self._loads[key]
                    if ok and load.code:
                        merged[3][key] = outcome._replace(code=load.code, num_tokens=load.num_tokens)
                    else:
                        target[key] = outcome

    # --- the rest -------------------------------------------------------------------------------------------------

    def update_peers(self, cards: Sequence[EngineCard]) -> None:
        """Pass peers on to the children. A peer with other children is logged once and never used."""
        known: list[list[EngineCard]] = []
        for card in cards:
            split = split_card(card, self._children)
            if isinstance(split, str):
                self._refuse(card, split)
            else:
                known.append(split)
        for index, scheduler in enumerate(self._schedulers):
            scheduler.update_peers([split[index] for split in known])

    def _refuse(self, card: EngineCard, theirs: str) -> None:
        if card.epoch in self._refused:
            return
        self._refused[card.epoch] = None
        if len(self._refused) > MAX_CARD_ERRORS:
            self._refused.popitem(last=False)
        ours = ",".join(child.name for child in self._children)
        logger.warning("no KV from engine %s: it has %s; %s has multi of %s", card.engine, theirs, self._engine, ours)

    def get_stats(self) -> Stats:
        own = {part_name(i, self._children[i]): ConnectorStats(fallbacks=n) for i, n in self._num_fallbacks.items()}
        children = enumerate(zip(self._children, self._schedulers, strict=True))
        return sum_stats([own, *(stats_under(part_name(i, child), side.get_stats()) for i, (child, side) in children)])

    def must_hear_end(self, key: TransferKey) -> bool:
        return any(scheduler.must_hear_end(key) for scheduler in self._schedulers)

    @property
    def has_pending_work(self) -> bool:
        return (
            self.sending.has_ended
            or bool(self._taken_over)
            or any(scheduler.has_pending_work for scheduler in self._schedulers)
        )

    def shutdown(self) -> None:
        for scheduler in self._schedulers:
            scheduler.shutdown()


_Maps = tuple[dict[TransferKey, TransferOutcome], ...]
"""The four maps of TransferResults, while they are filled."""


def _no_results() -> _Maps:
    return ({}, {}, {}, {})
