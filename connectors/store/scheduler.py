"""The scheduler side of store connectors: which KV is found, loaded and saved, and which tails are dropped."""

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, compress, count
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.base.clock import unix_time
from pdkv.connectors.base import (
    ASK_AGAIN,
    NO_MATCH,
    BlockHold,
    BlockTables,
    ConfirmedRange,
    ConnectorConfig,
    FinishDecision,
    KVConnectorMetadata,
    MatchedTokens,
    Observed,
    RequestView,
    SchedulerConnector,
    SchedulerView,
    Shown,
    Stats,
    TransferKey,
    TransferOutcome,
    TransferResults,
)
from pdkv.connectors.peer.cards import Incarnation, PeerCards
from pdkv.connectors.store.look_ahead import LookAhead
from pdkv.connectors.store.lookup import KeyLookups
from pdkv.connectors.store.news import StoreNews
from pdkv.connectors.store.options import StoreConnectorOptions
from pdkv.connectors.store.orders import StoreTiers, values_of
from pdkv.connectors.store.plan import (
    BlockSpan,
    Cut,
    StoreAhead,
    StoreCut,
    StoreDrop,
    StoreLoad,
    StoreMetadata,
    StoreSave,
    Value,
)
from pdkv.connectors.transfer.planning import Ids, as_ids
from pdkv.errors import IncompatiblePeers, KVNotFound, MalformedMessage
from pdkv.wire.decoding import decode_total
from pdkv.wire.kv import EngineCard, KVTerms
from pdkv.wire.tiers import CacheOrder

SAVE_STEPS = 4
"""Steps of decodes that are saved together: waking the saving threads costs more than a value."""

ENDS_SOON_S = 10.0
"""Seconds: values that expire sooner may be gone when a decode engine reads them."""

MAX_SEEN = 4096
"""Waiting requests to remember, so that each is looked up ahead at most once."""


class _Batch(NamedTuple):
    """A save in progress."""

    values: list[Value]  # whole values, which are stored when it has succeeded
    num_bytes: int
    ends_at: int  # unix time at or before which the written values expire; 0: never


class _PutOff(NamedTuple):
    """Values that are saved when there is room, whether or not their request is alive. Nothing holds their blocks."""

    confirmed: ConfirmedRange  # with its own tables
    first: int  # of the blocks in each table that have values
    generations: list[
        Ids
    ]  # generations of these blocks, while they have the values; empty: these cannot be checked later
    values: list[Value]
    checked: frozenset[Value]  # the part of them that may already be stored
    ended: list[bytes]  # keys of values that are written again


class _Loading(NamedTuple):
    """A load in progress."""

    start: int
    values: list[Value]  # whole values, which other requests may find


class _Sources(NamedTuple):
    """Possible sources of a request's tokens [start, stop): whole values by content, then a hand-off's tails."""

    start: int
    stop: int
    tails: list[Value]


_cuts = msgspec.msgpack.Decoder(Cut)
_start_of: Callable[[Value], int] = attrgetter("start")
_tokens_of: Callable[[Value], int] = attrgetter("num_tokens")


class StorePeers(PeerCards):
    """Peers that share the store and cut KV in the same way."""

    def __init__(self, config: ConnectorConfig, cut: Cut) -> None:
        super().__init__(config)
        self._cut = cut

    def _accept(self, peer: Incarnation, card: EngineCard) -> None:
        super()._accept(peer, card)
        for blob in card.rank_blobs:
            try:
                theirs = decode_total(_cuts, blob)
            except MalformedMessage as error:
                raise IncompatiblePeers(f"engine {card.engine} does not say how it cuts KV: {error}") from None
            if theirs != self._cut:
                raise IncompatiblePeers(f"engine {card.engine} stores KV as {theirs}, but this engine as {self._cut}")


class StoreScheduler(SchedulerConnector):
    """Scheduler side. Asks KeyLookups, never the store."""

    tiers: StoreTiers

    def __init__(
        self,
        config: ConnectorConfig,
        options: StoreConnectorOptions,
        cut: StoreCut,
        lookups: KeyLookups,
        news: StoreNews,
        look_ahead_bytes: int = 0,
        unix_time: Callable[[], float] = unix_time,
    ) -> None:
        """`look_ahead_bytes`: bytes of a rank's values that the store keeps for waiting requests; 0: none. `unix_time`:
        the clock by which stored values expire. Without a block table no save waits for room.
        """
        self.observes = Observed(
            Shown.LAYERWISE_LOADS,
            confirmed_tokens=cut.hit_tokens,
            confirmed_steps=1 if config.layout.groups else SAVE_STEPS,  # a window's blocks do not wait
        )
        self.lookups = lookups
        self.num_late_saves = 0  # values that were not written: too many saves were in progress
        self._options = options
        self._unix_time = unix_time
        self._cut = cut
        self._block_size = config.layout.block_size
        layout = config.layout
        self._token_bytes = layout.token_bytes
        self._max_save_bytes = min(options.max_save_bytes, config.num_blocks * layout.block_bytes // 4)
        self._me = (config.engine, config.epoch)
        self._peers = StorePeers(config, cut.cut)
        self._queued: dict[TransferKey, StoreLoad] = {}  # for the next metadata
        self._loading: dict[TransferKey, _Loading] = {}
        self._saving: set[bytes] = set()
        self._batches: dict[TransferKey, _Batch] = {}
        self._num_save_bytes = 0
        self._put_off: deque[_PutOff] = deque()  # saves that exceeded the limit, in order
        self._num_put_off_tokens = 0
        self._max_put_off_tokens = config.num_blocks * layout.block_size
        self._table = config.block_table
        self._handoffs: dict[TransferKey, list[Value]] = {}  # being saved or leased, with their tails
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # last keys of requests
        self._parts = count(1)  # numbers of saves, and of deletions of tails
        self._look_ahead = (
            LookAhead(cut, look_ahead_bytes, config.engine, self._found_ahead) if look_ahead_bytes else None
        )
        self._payload = msgspec.msgpack.encode(cut.cut)
        self._news = news
        self.tiers = StoreTiers(news, lookups)

    # --- finds ----------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> MatchedTokens:
        self._is_first_sight(request.block_keys)
        if request.kv == "await_peer":
            return self._match_handoff(request, num_computed_tokens)
        sources = self._sources(request, num_computed_tokens)
        least = max(self._options.min_hit_tokens, 1)
        if sources.stop - num_computed_tokens < least:
            return NO_MATCH
        stop = self._found(request.block_keys, sources)
        if stop is None:
            return ASK_AGAIN
        return self._matched(stop, num_computed_tokens) if stop - num_computed_tokens >= least else NO_MATCH

    def _match_handoff(self, request: RequestView, num_computed: int) -> MatchedTokens:
        """The match of a hand-off. Prefill's claim of what it stored is believed, and looked up only if prefill is gone
        without a word.
        """
        handoff = request.handoff
        if request.kv_ready is False:
            return NO_MATCH
        if handoff is None:
            return ASK_AGAIN
        if handoff.payload != self._payload:
            return NO_MATCH  # its engine cuts KV differently
        sources = self._sources(request, num_computed)
        ends_there = handoff.num_tokens <= request.num_wanted or not self._cut.has_windows
        if request.kv_ready and ends_there:
            return self._matched(sources.stop, num_computed)
        source = (handoff.engine, handoff.epoch)
        if not request.kv_ready and (self._peers.knows(*source) or source == self._me):
            return ASK_AGAIN
        stop = self._found(request.block_keys, sources)
        return ASK_AGAIN if stop is None else self._matched(stop, num_computed)

    def _sources(self, request: RequestView, start: int) -> _Sources:
        """The largest possible stored part of the tokens from `start` on that the request wants."""
        wanted, handoff, cut = request.num_wanted, request.handoff, self._cut
        tails: list[Value] = []
        if request.kv == "await_peer" and handoff is not None:
            if wanted >= handoff.num_tokens or not cut.has_windows:  # other ends see another window
                tails = cut.tails(request.source_key, handoff.num_tokens)
            wanted = min(wanted, handoff.num_tokens)
        stop = max(self._end_of_whole(request, wanted), start)
        if tails and stop < wanted and (cut.has_windows or tails[0].start <= stop):
            return _Sources(start, wanted, tails)
        return _Sources(start, stop, [])

    def _end_of_whole(self, request: RequestView, wanted: int) -> int:
        """Where the last whole value ends that the request wants; or, behind that, the last of its blocks that it wants
        of a value which it knows. A peer stores no more than it hands over.
        """
        known, step = len(request.block_keys) * HASH_BLOCK_SIZE, self._cut.hit_tokens
        end = min(known, wanted) // step * step
        if request.kv == "await_peer":
            return end
        return max(end, min(known // step * step, wanted // self._block_size * self._block_size))

    def _found(self, block_keys: Sequence[bytes], sources: _Sources, *, wanted: bool = True) -> int | None:
        """The end of the longest hit: no gap in groups without a window, and in the others everything that the next
        token sees. None: it is being looked up.
        """
        start, stop, tails = sources
        cut = self._cut
        if cut.is_plain:
            begin = start // self._block_size * self._block_size
            end = stop if tails else -(-stop // cut.hit_tokens) * cut.hit_tokens
            keys = [*cut.whole_keys(block_keys, begin, end), *(tail.key for tail in tails)]
        else:
            keys = [value.key for value in cut.values_to_load(block_keys, *sources, windowed=False)]
        num_found = self.lookups.num_found(keys, wanted=wanted)
        if num_found is None:
            return None
        if num_found < len(keys):
            chain = cut.values_to_load(block_keys, *sources, windowed=False)
            if wanted and not self.lookups.problem:  # it said so itself
                self._news.missing(chain[num_found : num_found + 1])
            stop = chain[num_found].start // cut.hit_tokens * cut.hit_tokens
            sources = _Sources(start, stop, [])
        if not cut.has_windows or stop <= start:
            return stop
        return self._found_windows(block_keys, sources, wanted=wanted)

    def _found_windows(self, block_keys: Sequence[bytes], sources: _Sources, *, wanted: bool) -> int | None:
        """The longest end up to `sources.stop` with its windows stored. Asks from the end: for the windows there, then
        for earlier ends with their last block, then for the windows of those.
        """
        start, stop, _ = sources
        bound = self._first_missing(block_keys, sources, wanted=wanted)
        if bound is None or bound >= stop:
            return bound
        step = self._cut.hit_tokens
        ends = range(bound // step * step, start, -step)
        there = self.lookups.look_up(self._cut.last_of_windows(block_keys, ends), wanted=wanted)
        if there is None:
            return None
        for end in compress(ends, there):
            if end > bound:
                continue  # sees a value that is known to be missing
            bound = self._first_missing(block_keys, _Sources(start, end, []), wanted=wanted)
            if bound is None or bound >= end:
                return bound
        return start

    def _first_missing(self, block_keys: Sequence[bytes], sources: _Sources, *, wanted: bool) -> int | None:
        """The start of the first missing value in the windows before an end; the end itself if none is missing. None:
        it is being looked up.
        """
        needed = self._cut.values_to_load(block_keys, *sources, windowed=True)
        there = self.lookups.look_up([value.key for value in needed], wanted=wanted)
        if there is None:
            return None
        return next((v.start for v, is_there in zip(needed, there, strict=True) if not is_there), sources.stop)

    def _matched(self, stop: int, start: int) -> MatchedTokens:
        return MatchedTokens(stop - start, self._options.load) if stop > start else NO_MATCH

    def update_state_after_alloc(
        self, request: RequestView, block_tables: BlockTables, num_external_tokens: int
    ) -> bytes | None:
        key, start = request.transfer_key, request.num_local_hit
        if num_external_tokens <= 0 or key in self._loading:
            return None
        stop = start + num_external_tokens
        tails = [tail for tail in self._sources(request, start).tails if tail.start < stop]
        values = self._cut.values_to_load(request.block_keys, start, stop, tails)
        entries = slice(start // self._block_size, -(-stop // self._block_size))
        tables = [list(table[entries]) for table in block_tables]
        is_handoff = request.kv == "await_peer"
        self._queued[key] = StoreLoad(
            key, values, start, stop, tables, is_handoff=is_handoff, kv_terms=request.kv_terms
        )
        self._loading[key] = _Loading(start, self._cut.whole_of(values))
        return None

    # --- orders ---------------------------------------------------------------------------------------------------

    def build_connector_meta(self, view: SchedulerView) -> KVConnectorMetadata:
        scheduled = {item.request.transfer_key for item in view.scheduled}
        loads, self._queued = list(self._queued.values()), {}
        for load in loads:
            load.layerwise = load.key in scheduled  # others wait outside the batch
        saves = [save for confirmed in view.confirmed if (save := self._save(confirmed)) is not None]
        if self._put_off:
            saves += self._save_put_off()
        ahead, passed = self._look(view.waiting_keys, view.waiting_terms)
        return StoreMetadata(
            step_id=view.step_id,
            needs_layer_hooks=any(load.layerwise for load in loads),
            holds=[BlockHold(save.batch, save.block_ids, save.key) for save in saves],
            loads=loads,
            saves=saves,
            drops=self._drops(view),
            orders=self.tiers.take_new(),
            ahead=ahead,
            passed=passed,
        )

    def _save(self, confirmed: ConfirmedRange) -> StoreSave | None:
        """Save values that are whole now. Those that were stored before may be gone: a hand-off checks all of them,
        other requests those that have not been seen for a while.
        """
        request, key = confirmed.request, confirmed.request.transfer_key
        if request.kv != "handoff" and self._cut.is_plain and self._are_known(confirmed):
            return None
        if len(confirmed.block_tables[0]) * self._block_size < confirmed.stop:
            return None  # shown again after its end, without its blocks
        is_handoff = request.kv == "handoff"
        values = self._values_to_save(confirmed)
        ended = self._ended(request, values)
        new, check = self._split(values, ended, checks_all=is_handoff, num_handed_over=request.num_handed_over)
        is_last = confirmed.last and is_handoff
        tails = self._cut.tails(key, confirmed.stop) if is_last else []
        if not is_handoff:
            if values := [*new, *check]:
                self._put_off_all(confirmed, values, frozenset(check), ended)
            return None
        self._handoffs[key] = tails
        return self._make_save(confirmed, new, check, tails, ended) if new or check or is_last else None

    def _put_off_all(
        self, confirmed: ConfirmedRange, values: list[Value], checked: frozenset[Value], ended: list[bytes]
    ) -> None:
        tables = [list(table) for table in confirmed.block_tables]
        first = min(value.start for value in values) // self._block_size
        stop = -(-max(value.stop for value in values) // self._block_size)
        known = [] if self._table is None else [self._generations(table[first:stop]) for table in tables]
        own = msgspec.structs.replace(confirmed, block_tables=tables)
        self._put_off.append(_PutOff(own, first, known, values, checked, ended))
        self._saving.update(value.key for value in values)
        self._num_put_off_tokens += sum(map(_tokens_of, values))

    def _num_fitting(self, values: Sequence[Value]) -> int:
        """How many values may be saved next to those in progress; a value larger than the limit goes alone."""
        room = (self._max_save_bytes - self._num_save_bytes) // self._token_bytes
        is_alone = not self._num_save_bytes and bool(values)
        return max(bisect_right(list(accumulate(map(_tokens_of, values))), room), is_alone)

    def _generations(self, table: Sequence[int]) -> Ids:
        assert self._table is not None
        return self._table.generations_of(np.maximum(as_ids(table), 0))

    def _lose(self, values: Sequence[Value]) -> None:
        """Count values that are not saved: there was no room before their blocks were reused."""
        self.num_late_saves += len(values)
        self._leave_queue(values)

    def _leave_queue(self, values: Sequence[Value]) -> None:
        self._saving.difference_update(value.key for value in values)
        self._num_put_off_tokens -= sum(map(_tokens_of, values))

    def _save_put_off(self) -> list[StoreSave]:
        """Save deferred values that there is room for now, if they are still in their blocks. The deferred values are
        never more than the pool holds.
        """
        saves: list[StoreSave] = []
        while self.has_pending_work:
            late = self._put_off.popleft()
            there = self._still_there(late)
            if len(there) < len(late.values):
                self._lose(list({*late.values}.difference(there)))
            num_fitting = self._num_fitting(there)
            fitting, rest = there[:num_fitting], there[num_fitting:]
            if rest:
                self._put_off.appendleft(late._replace(values=rest))
            self._leave_queue(fitting)
            if fitting:
                new, check = [v for v in fitting if v not in late.checked], [v for v in fitting if v in late.checked]
                saves.append(self._make_save(late.confirmed, new, check, [], late.ended))
        while self._num_put_off_tokens > (self._max_put_off_tokens if self._table is not None else 0):
            self._lose(self._put_off.popleft().values)
        return saves

    def _still_there(self, late: _PutOff) -> list[Value]:
        if not late.generations:
            return late.values
        first, size = late.first, self._block_size
        same = [
            self._generations(table[first : first + len(known)]) == known
            for table, known in zip(late.confirmed.block_tables, late.generations, strict=True)
        ]
        if all(group.all() for group in same):  # as nearly always
            return late.values

        def is_there(value: Value) -> bool:
            blocks = slice(value.start // size - first, -(-value.stop // size) - first)
            return bool(same[value.group][blocks].all())

        return list(filter(is_there, late.values))

    def _are_known(self, confirmed: ConfirmedRange) -> bool:
        """Whether everything of a request with one KV group is already stored, as after a load."""
        keys = self._cut.whole_keys(confirmed.request.block_keys, confirmed.start, confirmed.stop)
        return all(self.lookups.are_known(keys))

    def _ended(self, request: RequestView, values: Sequence[Value]) -> list[bytes]:
        """Keys of values that have expired, or will before a hand-off is read: they are written again."""
        if request.kv_terms is None or request.kv_terms.ttl_s is None:
            return []
        return self.lookups.ended([value.key for value in values], self._unix_time() + ENDS_SOON_S)

    def _split(
        self, values: list[Value], ended: Collection[bytes], *, checks_all: bool, num_handed_over: int = 0
    ) -> tuple[list[Value], list[Value]]:
        """Split values into those never seen in the store, or expired, and those to be checked, which may be stored.

        Args:
            num_handed_over: number of first tokens that the computing engine has most likely saved.
        """
        new: list[Value] = []
        check: list[Value] = []
        for value, is_known in zip(values, self.lookups.are_known([value.key for value in values]), strict=True):
            if value.key in ended and value.key not in self._saving:
                new.append(value)
            elif is_known or value.key in self._saving:
                if checks_all:
                    check.append(value)
            elif value.stop <= num_handed_over or self.lookups.was_known(value.key):
                check.append(value)
            else:
                new.append(value)
        return new, check

    def _values_to_save(self, confirmed: ConfirmedRange) -> list[Value]:
        keys, start, stop = confirmed.request.block_keys, confirmed.start, confirmed.stop
        values: list[Value] = []
        for group, table in enumerate(confirmed.block_tables):
            values += self._cut.values_to_save(keys, start, stop, group, table, last=confirmed.last)
        return values

    def _make_save(
        self,
        confirmed: ConfirmedRange,
        new: list[Value],
        check: list[Value],
        tails: list[Value],
        ended: Collection[bytes],
    ) -> StoreSave:
        key = confirmed.request.transfer_key
        batch = key._replace(part=next(self._parts))
        keys = [value.key for value in new]
        values = [*new, *tails]
        self._saving.update(keys)
        terms = confirmed.request.kv_terms
        ends_at = 0 if terms is None or terms.ttl_s is None else int(self._unix_time() + terms.ttl_s)
        self._batches[batch] = _Batch([*new, *check], self._num_bytes([*values, *check]), ends_at)
        self._num_save_bytes += self._batches[batch].num_bytes
        return StoreSave(
            key=key if confirmed.request.kv == "handoff" else batch,
            batch=batch,
            values=values,
            check=check,
            spans=[self._span(table, g, [*values, *check]) for g, table in enumerate(confirmed.block_tables)],
            last=confirmed.last and confirmed.request.kv == "handoff",
            replaced=[*self.lookups.barred(keys), *ended],
            kv_terms=terms,
        )

    def _span(self, table: Sequence[int], group: int, values: Sequence[Value]) -> BlockSpan:
        """The blocks that hold a KV group's values."""
        own, size = self._cut.of_group(values, group), self._block_size
        if not own:
            return BlockSpan(0, [])
        first = min(map(_start_of, own)) // size
        last = -(-max(own, key=_start_of).stop // size)
        return BlockSpan(first * size, list(table[first:last]))

    def _num_bytes(self, values: Sequence[Value]) -> int:
        return sum(map(_tokens_of, values)) * self._token_bytes

    def _drops(self, view: SchedulerView) -> list[StoreDrop]:
        """Drop hand-offs that are over: released, given up, or ended by their first token."""
        handed_off = {c.request.transfer_key for c in view.confirmed if c.last}
        over = dict.fromkeys((key for key in view.finished if key not in handed_off), False)
        over |= dict.fromkeys(view.aborted, True)
        return [
            StoreDrop(key, key._replace(part=next(self._parts)), self._handoffs.pop(key), given_up)
            for key, given_up in over.items()
            if key in self._handoffs
        ]

    def _look(
        self, waiting_keys: Sequence[Sequence[bytes]], waiting_terms: Sequence[KVTerms | None]
    ) -> tuple[list[StoreAhead], list[StoreAhead]]:
        """Look ahead for waiting requests: look up their values, unless they have asked themselves, and
        prefetch them.
        """
        if self._look_ahead is not None:
            return self._look_ahead.update(waiting_keys, waiting_terms)
        for keys in waiting_keys:
            if self._is_first_sight(keys):
                self._found_ahead(keys)
        return [], []

    def _found_ahead(self, block_keys: Sequence[bytes]) -> int | None:
        """Number of a waiting request's first tokens that are stored; None: it is being looked up."""
        stop = len(block_keys) * HASH_BLOCK_SIZE // self._cut.hit_tokens * self._cut.hit_tokens
        if stop < max(self._options.min_hit_tokens, 1):
            return 0
        return self._found(block_keys, _Sources(0, stop, []), wanted=False)

    def _is_first_sight(self, block_keys: Sequence[bytes]) -> bool:
        """Whether these keys are new here; remembers them."""
        if not block_keys or block_keys[-1] in self._seen:
            return False
        self._seen[block_keys[-1]] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return True

    def must_hear_end(self, key: TransferKey) -> bool:
        return bool(self._handoffs.get(key))  # its tails are to be deleted; a save in progress is cancelled separately

    def request_finished(self, request: RequestView, block_tables: BlockTables) -> FinishDecision:
        """The decision for a finished request: the store has a copy, or will have, so no block is leased. The payload
        says how it is cut.
        """
        return FinishDecision(hold_blocks=False, payload=self._payload if request.kv == "handoff" else None)

    # --- operators' orders ----------------------------------------------------------------------------------------

    def resolve_results(self, results: TransferResults) -> TransferResults:
        """Take the results of orders out: the engine does not act on them."""
        results, orders = self.tiers.settle(results)
        for order in orders:
            if order.action == "clear":
                self._cleared(order)
        return results

    def _cleared(self, order: CacheOrder) -> None:
        """Forget values that were reportedly cleared; if they were cleared everywhere, routers are told."""
        if order.keys is None:
            self.lookups.forget_all()
            return
        values = values_of(self._cut, order.keys)
        self.lookups.forget([value.key for value in values])
        if not order.tier:
            self._news.missing(values)

    # --- news -----------------------------------------------------------------------------------------------------

    def update_connector_output(self, results: TransferResults) -> None:
        for ended, ok in ((results.finished_sending, True), (results.failed_sending, False)):
            for key in ended:
                batch = self._batches.pop(key, None)
                if batch is None:
                    continue
                keys = [value.key for value in batch.values]
                self._num_save_bytes -= batch.num_bytes
                self._saving.difference_update(keys)
                if ok:
                    self.lookups.add(keys, batch.ends_at)
                    self._news.stored(batch.values)
                else:
                    self.lookups.forget(keys)  # cancelled ones, too: decode may have loaded what was not reported yet
        for key, outcome in results.finished_receiving.items():
            loading = self._loading.pop(key, None)
            if loading is not None:
                self.lookups.add([value.key for value in loading.values], outcome.ends_at)
                self._news.stored(loading.values)
        for key, outcome in results.failed_receiving.items():
            loading = self._loading.pop(key, None)
            if loading is not None:
                self._load_failed(loading, outcome)

    def _load_failed(self, loading: _Loading, outcome: TransferOutcome) -> None:
        """Note a failed load. The loaded part is intact. Values after damage count as damaged: they have not been
        checked, and the next save replaces them. The same holds after an expired value: a store without expiry would
        keep the old ones.
        """
        stop = loading.start + outcome.num_tokens
        came = [value for value in loading.values if value.stop <= stop]
        others = [value for value in loading.values if value.stop > stop]
        self.lookups.add([value.key for value in came], outcome.ends_at)
        self.lookups.forget([value.key for value in others])
        self._news.stored(came)
        if outcome.code == KVNotFound.code:  # values after the first one may be stored, but are useless without it
            self._news.missing(others[:1])
        if outcome.num_damaged or outcome.num_expired:
            self.lookups.bar([value.key for value in others])

    def get_stats(self) -> Stats:
        return {"": msgspec.structs.replace(self.lookups.stats, late_saves=self.num_late_saves)}

    @property
    def has_pending_work(self) -> bool:
        return bool(self._put_off) and self._num_fitting(self._put_off[0].values[:1]) > 0

    def update_peers(self, cards: Sequence[EngineCard]) -> None:
        self._peers.replace(cards)

    def shutdown(self) -> None:
        self.lookups.close()
