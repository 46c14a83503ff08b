"""Operators' orders about the tiers of a store: lookups, removals, pins and moves of a prompt's values.

Each rank has a thread for them, next to those that load and save; its answers are notes of transfers, which the
scheduler side takes out of the results of a step, and merges into one.
"""

import logging
import math
from collections.abc import Collection, Container, Iterable, Sequence
from typing import NamedTuple

import msgspec

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.base.clock import MONOTONIC, Clock
from pdkv.connectors.base import Tiers, TransferKey, TransferOutcome, TransferResults
from pdkv.connectors.store.between_tiers import BetweenTiers
from pdkv.connectors.store.lookup import KeyLookups
from pdkv.connectors.store.news import StoreNews
from pdkv.connectors.store.plan import StoreCut, Value
from pdkv.connectors.transfer.lanes import Lane
from pdkv.connectors.transfer.worker import Job, Task, TransferWorker
from pdkv.errors import MalformedMessage, PdkvError, ServerBusy, StoreUnsupported, TransferError, TransferTimeout
from pdkv.kv_store.base import KVStore
from pdkv.wire.decoding import decode_total
from pdkv.wire.tiers import CacheAnswer, CacheOrder, TierAnswer, TierEvents
from pdkv.wire.types import MAX_PROBLEM_CHARS

logger = logging.getLogger(__name__)

LANE: Lane = ("orders", 0)
"""One thread, which starts with the first order."""

MAX_ORDERS = 16
"""The most orders waiting on one rank; further ones are refused."""

_answers = msgspec.msgpack.Decoder(CacheAnswer)


def name_of(order: CacheOrder) -> TransferKey:
    """The order's name among transfers, for its results."""
    return TransferKey(order.order_id, 0)


def values_of(cut: StoreCut, block_keys: Sequence[bytes]) -> list[Value]:
    """All whole values of a prompt, group by group."""
    stop = len(block_keys) * HASH_BLOCK_SIZE
    return [value for group in range(len(cut.windows)) for value in cut.whole_values(block_keys, 0, stop, group)]


def longest_hit(cut: StoreCut, block_keys: Sequence[bytes], there: Container[bytes]) -> int:
    """Tokens of the longest hit in values of these keys: groups without a window have all of its values, and the others
    all those that the next token attends to.
    """
    step = cut.hit_tokens
    stop = len(block_keys) * HASH_BLOCK_SIZE // step * step
    chain = cut.values_to_load(block_keys, 0, stop, windowed=False)
    stop = next((value.start for value in chain if value.key not in there), stop) // step * step
    while stop and cut.has_windows:
        seen = cut.values_to_load(block_keys, 0, stop, windowed=True)
        if all(value.key in there for value in seen):
            break
        stop -= step
    return stop


class StoreTiers(Tiers):
    """The scheduler side's tiers, which are those of one store: news of them, orders in progress, and their results."""

    def __init__(self, news: StoreNews, lookups: KeyLookups) -> None:
        self._news = news
        self._lookups = lookups
        self._new: list[CacheOrder] = []  # for the next metadata
        self._under_way: dict[TransferKey, CacheOrder] = {}
        self._answers: list[CacheAnswer] = []

    @property
    def problem(self) -> str:
        return self._lookups.problem

    def take_events(self) -> Sequence[TierEvents]:
        return self._news.take()

    def order(self, order: CacheOrder) -> int:
        self._new.append(order)
        return 1

    def take_new(self) -> list[CacheOrder]:
        """The orders that the workers must carry out now."""
        if not self._new:
            return []
        orders, self._new = self._new, []
        self._under_way.update((name_of(order), order) for order in orders)
        return orders

    def settle(self, results: TransferResults) -> tuple[TransferResults, list[CacheOrder]]:
        """Split a step's results into the carried-out orders and the rest."""
        ended = self._under_way.keys() & results.finished_sending if self._under_way else ()
        if not ended:
            return results, []
        sent = dict(results.finished_sending)
        orders = [self._under_way.pop(key) for key in ended]
        for order in orders:
            self._answers.append(_merge(order, sent.pop(name_of(order)).notes))
        return results._replace(finished_sending=sent), orders

    def take_answers(self) -> Sequence[CacheAnswer]:
        answers, self._answers = self._answers, []
        return answers


def _merge(order: CacheOrder, notes: Iterable[bytes]) -> CacheAnswer:
    """Merge all ranks' answers: values add up, the tokens are those that every rank has, and any failure counts."""
    try:
        by_rank = [decode_total(_answers, note) for note in notes]
    except MalformedMessage as error:
        broken = TierAnswer(order.tier, code=error.code, problem=str(error)[:MAX_PROBLEM_CHARS])
        return CacheAnswer(order.order_id, [broken])
    merged: dict[str, TierAnswer] = {}
    for answer in (tier for rank in by_rank for tier in rank.tiers):
        known = merged.get(answer.tier)
        merged[answer.tier] = answer if known is None else TierAnswer(
            answer.tier,
            min(known.num_tokens, answer.num_tokens),
            known.num_values + answer.num_values,
            known.code or answer.code,
            known.problem or answer.problem,
        )  # fmt: skip
    return CacheAnswer(order.order_id, list(merged.values()), by_rank[0].known if by_rank else [])


class Ordered(NamedTuple):
    """An order, and when its time is over."""

    order: CacheOrder
    deadline: float


class TierOrders:
    """Carries out orders on one rank, one after the other. `carry_out` blocks, limited by the store's deadlines."""

    def __init__(self, store: KVStore, cut: StoreCut, between: BetweenTiers, clock: Clock = MONOTONIC) -> None:
        """`between`: not used by any other object."""
        self.clock = clock
        self._store = store
        self._cut = cut
        self._between = between
        self._waiting: set[TransferKey] = set()
        self._answers: dict[TransferKey, TransferOutcome] = {}

    def submit(self, worker: TransferWorker, order: CacheOrder) -> None:
        """Queue an order; if there are too many, it is answered at once."""
        key, tasks = name_of(order), list[Task]()
        if len(self._waiting) >= MAX_ORDERS:
            self._answer(order, self.refuse(order, ServerBusy(f"{MAX_ORDERS} orders are waiting already")))
        else:
            self._waiting.add(key)
            tasks = [Task(Ordered(order, self.clock.now() + order.timeout_s), LANE, timeout_s=math.inf)]
        if not worker.submit(key, "send", tasks):
            self._waiting.discard(key)  # it is there already, or answered

    def run(self, job: Job, ordered: Ordered) -> int:
        """Carry out an order on its thread; its result has the answer. Nothing is loaded or saved: 0 bytes."""
        self._waiting.discard(job.key)
        order, num_damaged = ordered.order, self._between.num_damaged
        try:
            answer = self.carry_out(order, ordered.deadline)
        except Exception as error:  # the thread goes on, and the caller gets the error
            logger.exception("an order to %s what is stored ended with an error", order.action)
            answer = self.refuse(order, PdkvError(f"{type(error).__name__}: {error}"))
        self._answer(order, answer, self._between.num_damaged - num_damaged)
        return 0

    def _answer(self, order: CacheOrder, answer: CacheAnswer, num_damaged: int = 0) -> None:
        notes = (msgspec.msgpack.encode(answer),)
        self._answers[name_of(order)] = TransferOutcome(num_damaged=num_damaged, notes=notes)

    def take_answer(self, key: TransferKey) -> TransferOutcome:
        """The answer to an ended order, as a part of its transfer's outcome; empty for any other transfer."""
        return self._answers.pop(key, TransferOutcome())

    def carry_out(self, order: CacheOrder, deadline: float) -> CacheAnswer:
        """Carry out an order tier by tier; a tier that fails says why, and the others continue."""
        tiers = self._store.parts()
        named = _named(order, tiers)
        if order.action == "prefetch" and not order.tier:
            del named[1:]
        if order.action == "clear":
            named.reverse()  # so that no load in between brings a value back up from a tier that still has it
        answers = {name: self._try(order, name, tiers[name], deadline) for name in named}
        return CacheAnswer(order.order_id, [answers[name] for name in tiers if name in answers], list(tiers))

    def refuse(self, order: CacheOrder, error: PdkvError) -> CacheAnswer:
        """The answer to an order that was not carried out."""
        tiers = list(self._store.parts())
        problem = str(error)[:MAX_PROBLEM_CHARS]
        named = [TierAnswer(name, code=error.code, problem=problem) for name in _named(order, tiers)]
        return CacheAnswer(order.order_id, named, tiers)

    def _try(self, order: CacheOrder, name: str, tier: KVStore, deadline: float) -> TierAnswer:
        try:
            if self.clock.now() >= deadline:
                raise TransferTimeout(f"earlier orders took {order.timeout_s:g} s")
            num_tokens, num_values = self._carry_out(order, tier, deadline)
        except TransferError as error:
            return TierAnswer(name, code=error.code, problem=str(error)[:MAX_PROBLEM_CHARS])
        return TierAnswer(name, num_tokens, num_values)

    def _carry_out(self, order: CacheOrder, tier: KVStore, deadline: float) -> tuple[int, int]:
        """(tokens of the prompt, values) that the order covered."""
        if order.keys is None:
            if order.action not in ("clear", "unpin"):
                raise StoreUnsupported(f"{order.action} needs the keys of a prompt, but none were given")
            return 0, self._clear(tier, None) if order.action == "clear" else tier.unpin(None)
        values = values_of(self._cut, order.keys)
        own = [key for value in values for key in self._cut.own_keys(value)]
        match order.action:
            case "clear":
                return 0, self._clear(tier, own)
            case "unpin":
                return 0, tier.unpin(own)
            case "pin":
                return self._count(order.keys, values, tier.pin(own, order.ttl_s))
            case "prefetch":
                first = next(iter(self._store.parts().values()))
                if tier is not first or len(self._store.parts()) == 1:
                    raise StoreUnsupported(
                        "prefetch needs several tiers: it copies values into the first one from those below it"
                    )
                self._between.prefetch(values, tier, deadline, order.kv_terms)
            case "move":
                num_values = self._move(order, values, tier, deadline)
                return self._count(order.keys, values, tier.contains(own))[0], num_values
        return self._count(order.keys, values, tier.contains(own))

    def _move(self, order: CacheOrder, values: Sequence[Value], destination: KVStore, deadline: float) -> int:
        """Move values; returns how many, as `BetweenTiers.move`. Raises StoreUnsupported if the names are not of two
        tiers.
        """
        tiers = self._store.parts()
        sources, destinations = list(filter(order.is_from, tiers)), list(filter(order.is_about, tiers))
        for param, name, found in (("from", order.source, sources), ("tier", order.tier, destinations)):
            if len(found) > 1:
                raise StoreUnsupported(f"{param} {name!r} names {' and '.join(found)}: one tier was expected")
        source = tiers[sources[0]]
        if source is destination:
            raise StoreUnsupported(f"from {order.source!r} and tier {order.tier!r} name the same tier: expected two")
        return self._between.move(values, source, destination, deadline, copy=order.copy, kv_terms=order.kv_terms)

    def _clear(self, tier: KVStore, keys: Sequence[bytes] | None) -> int:
        self._store.forget(keys)
        return tier.discard(keys)

    def _count(self, block_keys: Sequence[bytes], values: Sequence[Value], there: Sequence[bool]) -> tuple[int, int]:
        """Tokens of the hit, and number of stored values. `there`: by key, with each value's keys side by side; none if
        others write all parts that this rank has.
        """
        size = len(there) // len(values) if values else 0
        whole = {value.key for i, value in enumerate(values) if all(there[i * size : (i + 1) * size])}
        return longest_hit(self._cut, block_keys, whole), sum(there)


def _named(order: CacheOrder, tiers: Collection[str]) -> list[str]:
    """The tiers that an order is about; none of a store that lacks the source tier of a move."""
    if order.action == "move" and not any(map(order.is_from, tiers)):
        return []
    return list(filter(order.is_about, tiers))
