"""The scheduler side of every pull: prefill keeps blocks under lease, and decode is told to read them.

A hand-off's payload names the blocks' runs with their generations (block_runs.py). A `BlockLoad` is the order
that follows from it for the worker sides (pull_worker.py).
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import msgspec

from pdkv.connectors.base import (
    ASK_AGAIN,
    NO_MATCH,
    OBSERVES_NOTHING,
    BlockTables,
    ConnectorConfig,
    FinishDecision,
    KVConnectorMetadata,
    MatchedTokens,
    RequestView,
    SchedulerConnector,
    SchedulerView,
    Shown,
    TransferKey,
    TransferResults,
)
from pdkv.connectors.block_table import BlockTable
from pdkv.connectors.peer.cards import PeerCards
from pdkv.connectors.peer.group_entries import filled_entries, own_blocks
from pdkv.connectors.peer.pull_groups import NamedGroup, find_pairs, pack_groups, unpack_groups
from pdkv.connectors.peer.source_digests import DigestOrder, digest_orders
from pdkv.connectors.transfer.block_runs import pack_blocks, unpack_blocks
from pdkv.connectors.transfer.planning import NO_IDS, IdBytes, Ids, as_ids, blocks_of
from pdkv.wire.kv import EngineCard, KVHandoff
from pdkv.wire.types import MAX_BLOB_BYTES

CONFIRMED_STEPS = 4
"""Steps by which the digests of a decode's blocks may be late."""


class BlockLoad(msgspec.Struct, frozen=True):
    """Copy tokens [start, stop) of a request from a peer's pool into `block_ids`.

    With KV groups, the lists name pairs of whole blocks, group after group, and the tokens count through them from 0.
    """

    key: TransferKey
    engine: str
    epoch: str
    start: int
    stop: int
    unit: int  # tokens per source entry: the peer's block size, or the hash block size
    source: IdBytes  # block * (peer's block size / unit) + position; the first one holds token `start`
    generations: IdBytes  # generation of each entry's block when it was promised
    block_ids: Sequence[int]  # the first one holds token `start`
    is_handoff: bool = True  # otherwise it was found by its content
    own_generations: IdBytes = b""  # the last step that used `block_ids`
    filled: Sequence[int] = ()  # with KV groups, the number of first tokens of each pair that are meant
    continues: bool = False  # there was an earlier part of this load, without which it is dropped
    more: bool = False  # another part follows


class PullMetadata(KVConnectorMetadata, kw_only=True):
    """The loads that begin with this step, and the ranges to be digested, for all ranks."""

    loads: Sequence[BlockLoad] = ()
    digests: Sequence[DigestOrder] = ()


class Match(NamedTuple):
    """KV that can be loaded, with its source: a BlockLoad before its blocks are known."""

    engine: str
    epoch: str
    start: int
    stop: int
    unit: int
    source: Ids
    generations: Ids
    is_handoff: bool = True


class PullScheduler(SchedulerConnector):
    """Scheduler side: names blocks and generations for hand-offs, and turns hand-offs into loads.

    A subclass may find KV elsewhere, too (`match_content`), and require more of a peer (`source_block_size`).
    """

    shown: ClassVar[Shown] = Shown.NONE
    """The transfers with blocks that the worker sides digest for peers."""

    def __init__(self, config: ConnectorConfig, table: BlockTable, peers: PeerCards) -> None:
        self.config = config
        if config.kv_checksum == "off" or not self.shown:
            self.observes = OBSERVES_NOTHING
        else:
            self.observes = OBSERVES_NOTHING._replace(
                scheduled=Shown.NONE if config.layout.groups else Shown.HANDOFFS,
                confirmed=self.shown,
                confirmed_steps=CONFIRMED_STEPS,
            )
        self.block_size = config.layout.block_size
        self.peers = peers
        self._table = table
        self._found: dict[TransferKey, Match] = {}  # by content: from the last question, until blocks are allocated
        self._named: dict[
            TransferKey, tuple[bytes, list[NamedGroup] | None]
        ] = {}  # unpacked payloads, as long as they are needed
        self._queued: list[BlockLoad] = []  # for the next metadata
        self._begun: dict[TransferKey, int] = {}  # loads that wait for a hand-off of the rest: where that begins
        self._loading: set[TransferKey] = set()  # queued or with the worker
        self._computing: list[DigestOrder] = []  # for the next metadata: of what the step of the last one computes

    # --- what a subclass may override -----------------------------------------------------------------------------

    def match_content(self, request: RequestView, start: int) -> Match | None:
        """KV of tokens from `start` on that some peer has, for a request without a hand-off."""
        return None

    def source_block_size(self, engine: str, epoch: str) -> int | None:
        """Tokens per block of a readable peer; None: it cannot be read."""
        return self.peers.card(engine, epoch).layout.block_size if self.peers.knows(engine, epoch) else None

    # --- the interface --------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> MatchedTokens:
        self._found.pop(request.transfer_key, None)
        if request.handoff is not None:
            match = self._match_handoff(request, request.handoff, num_computed_tokens, request.num_wanted)
            if match is not None and request.handoff.more:
                match = match._replace(stop=request.num_wanted)
        elif request.kv == "await_peer":
            return NO_MATCH if request.kv_ready is False else ASK_AGAIN
        else:
            # The table of blocks by content does not support groups.
            match = None if self.config.layout.groups else self.match_content(request, num_computed_tokens)
            if match is not None:
                self._found[request.transfer_key] = match
        return NO_MATCH if match is None else MatchedTokens(match.stop - match.start)

    def update_state_after_alloc(
        self, request: RequestView, block_tables: BlockTables, num_external_tokens: int
    ) -> bytes | None:
        """Queue the load. Every queued load is answered, by success or failure."""
        key = request.transfer_key
        match, begun, more = self._found.pop(key, None), self._begun.pop(key, None), False
        if num_external_tokens <= 0 or (key in self._loading and begun is None):
            return None
        end = request.num_local_hit + num_external_tokens
        start = request.num_local_hit if begun is None else begun
        if request.handoff is not None:
            match, more = self._match_handoff(request, request.handoff, start, end), request.handoff.more
        self._named.pop(key, None)
        if more and (match is not None or begun is not None):
            self._begun[key] = start if match is None else match.stop
            if match is None:
                return None  # no more than is loaded already
        elif begun is not None and match is not None and match.stop < end:
            match = None  # it lacks tokens that the first part's blocks were taken for
        if match is None:  # nothing was found: a load without a source fails with a reason
            match, more = Match("", "", start, end, self.block_size, NO_IDS, NO_IDS), False
        stop = min(end, match.stop)
        self._loading.add(key)
        filled: Sequence[int] = ()
        if self.config.layout.groups:
            filled = filled_entries(self.config.layout, match.start, match.stop)
            own = own_blocks(self.config.layout, block_tables, match.start, match.stop)
            if own is None or len(own) != len(match.source):
                match, own = match._replace(source=NO_IDS, generations=NO_IDS), []  # the load fails, and says so
            match, stop = match._replace(start=0, unit=self.block_size), len(own) * self.block_size
        else:
            num_sources = -(-stop // match.unit) - match.start // match.unit
            match = match._replace(source=match.source[:num_sources], generations=match.generations[:num_sources])
            wanted = blocks_of(match.start, stop, self.block_size)
            own = list(block_tables[0][wanted.start : wanted.stop])
        load = BlockLoad(
            key=key,
            engine=match.engine,
            epoch=match.epoch,
            start=match.start,
            stop=stop,
            unit=match.unit,
            source=match.source.tobytes(),
            generations=match.generations.tobytes(),
            block_ids=own,
            is_handoff=match.is_handoff and request.kv == "await_peer",
            own_generations=self._table.generations_of(own).tobytes(),
            filled=filled,
            continues=begun is not None,
            more=more,
        )
        self._queued.append(load)
        return None

    @property
    def has_pending_work(self) -> bool:
        return bool(self._queued)

    def must_hear_end(self, key: TransferKey) -> bool:
        return False  # the workers ignore it

    def build_connector_meta(self, view: SchedulerView) -> PullMetadata:
        for keys in (view.finished, view.aborted, view.preempted):
            for key in keys:
                self._found.pop(key, None)
                self._named.pop(key, None)
        for key in view.cancelled:
            self._begun.pop(key, None)  # nothing follows
        loads, self._queued = [_without_rest(load, view.cancelled) for load in self._queued], []
        return PullMetadata(step_id=view.step_id, loads=loads, digests=self._digests(view))

    def _digests(self, view: SchedulerView) -> Sequence[DigestOrder]:
        """The digests to make before this step, of what is confirmed, and of hand-offs' tokens that the step before it
        computes: where steps are planned ahead, those are read before a plan knows that they are confirmed.
        """
        computed = [order for order in self._computing if self._is_current(order)]
        if not (view.confirmed or view.scheduled):
            self._computing = []
            return computed
        of = self._table, self.config.kv_checksum, self.config.layout
        self._computing = digest_orders([item for item in view.scheduled if not item.may_be_void], *of)
        return computed + digest_orders(view.confirmed, *of)

    def _is_current(self, order: DigestOrder) -> bool:
        return self._table.generations_of(order.block_ids).tobytes() == order.generations

    def request_finished(self, request: RequestView, block_tables: BlockTables) -> FinishDecision:
        self._found.pop(request.transfer_key, None)
        if request.kv != "handoff":
            return FinishDecision(hold_blocks=False)
        if self.config.layout.groups:
            payload = pack_groups(block_tables, self._table)
        else:
            payload = self._pack(block_tables[0])
        if len(payload) > MAX_BLOB_BYTES:  # too scattered to be named: decode computes it itself, loudly
            return FinishDecision(hold_blocks=False, payload=b"")
        return FinishDecision(hold_blocks=True, payload=payload)

    def name_confirmed(self, request: RequestView, block_tables: BlockTables, num_tokens: int) -> bytes | None:
        if self.config.layout.groups:
            return None  # a window's blocks are known at the end
        payload = self._pack(block_tables[0][: num_tokens // self.block_size])
        return payload if len(payload) <= MAX_BLOB_BYTES else None

    def _pack(self, block_ids: Sequence[int]) -> bytes:
        ids = as_ids(block_ids)
        return pack_blocks(ids, self._table.generations_of(ids))

    def update_connector_output(self, results: TransferResults) -> None:
        self._loading.difference_update(results.finished_receiving, results.failed_receiving)
        for key in results.failed_receiving:
            self._begun.pop(key, None)

    def update_peers(self, cards: Sequence[EngineCard]) -> None:
        self.peers.replace(cards)

    def shutdown(self) -> None:
        self.peers.clear()
        self._found.clear()
        self._named.clear()

    def _match_handoff(self, request: RequestView, handoff: KVHandoff, start: int, stop: int) -> Match | None:
        """Tokens [start, stop) of a hand-off, as far as it goes; None: it cannot be read."""
        unit = self.source_block_size(handoff.engine, handoff.epoch)
        stop = min(stop, handoff.num_tokens)
        if unit is None or start >= stop:
            return None
        named = self._unpack(request, handoff)
        if named is None or (handoff.more and (handoff.start or self.config.layout.groups)):
            return None
        if self.config.layout.groups:
            whole = unit == self.block_size and start % unit == 0
            pairs = find_pairs(self.config.layout, named, start, stop) if whole else None
            return None if pairs is None else Match(handoff.engine, handoff.epoch, start, stop, unit, *pairs)
        wanted, blocks = blocks_of(start, stop, unit), named[0].blocks
        if wanted.stop > blocks.ids.size:
            return None
        part = slice(wanted.start, wanted.stop)
        return Match(handoff.engine, handoff.epoch, start, stop, unit, blocks.ids[part], blocks.generations[part])

    def _unpack(self, request: RequestView, handoff: KVHandoff) -> list[NamedGroup] | None:
        """The blocks in a hand-off's payload by group, unpacked once for all questions about it.

        None: a request of that many tokens cannot have them. A block holds one token at least, and a few bytes may name
        a million blocks.
        """
        key, payload, most = request.transfer_key, handoff.payload, request.num_tokens
        known = self._named.get(key)
        if known is None or known[0] != payload:
            if self.config.layout.groups:
                named = unpack_groups(payload, self.config.layout.num_groups, most)
            else:
                blocks = unpack_blocks(payload, most)
                named = None if blocks is None else [NamedGroup(0, blocks)]
            known = self._named[key] = (payload, named)
        return known[1]


def _without_rest(load: BlockLoad, given_up: Sequence[TransferKey]) -> BlockLoad:
    """A load, or of one that was given up before it began, all that it will ever have."""
    return msgspec.structs.replace(load, more=False) if load.more and load.key in given_up else load
