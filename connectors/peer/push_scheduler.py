"""The scheduler side of every push: tickets for KV that is wanted here, batches of KV that is wanted elsewhere.

KV of a step is sent while it runs, layer by layer; KV computed before the ticket arrived is sent at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import msgspec

from pdkv.connectors.base import (
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
    ScheduledRange,
    SchedulerConnector,
    SchedulerView,
    Shown,
    TransferKey,
    TransferOutcome,
    TransferResults,
)
from pdkv.connectors.peer.cards import PeerCards
from pdkv.connectors.peer.group_entries import entries_to_load, own_blocks
from pdkv.connectors.transfer.block_runs import MAX_BLOCKS, pack_blocks, unpack_blocks
from pdkv.connectors.transfer.planning import Ids, blocks_of
from pdkv.errors import MalformedMessage, TransferError
from pdkv.wire.decoding import decode_total
from pdkv.wire.kv import EngineCard
from pdkv.wire.types import MAX_BLOB_BYTES


class PushTicket(msgspec.Struct, frozen=True, array_like=True):
    """The destination of tokens [start, stop) of a transfer: the receiver's blocks, the first one of which holds
    `start`.
    """

    engine: str
    epoch: str
    transfer_id: str
    attempt: int
    start: int
    stop: int
    blocks: bytes  # packed (block_runs.py)

    @property
    def key(self) -> TransferKey:
        """The name of the transfer at the receiver."""
        return TransferKey(self.transfer_id, self.attempt)

    def may_have(self, source: TransferKey) -> bool:
        """Whether the ticket may ask for that hand-off, which must belong to its transfer or be lent to it, and not be
        of a later attempt.
        """
        return self.transfer_id == source.transfer_id and self.attempt >= source.attempt

    def block_ids(self, block_size: int) -> Ids:
        """The receiver's blocks, of the size on its card.

        Raises:
            TransferError: their number is not what the tokens need.
        """
        num_blocks = len(blocks_of(self.start, self.stop, block_size))
        blocks = unpack_blocks(self.blocks, min(num_blocks, MAX_BLOCKS))
        if blocks is None or blocks.ids.size != num_blocks:
            raise TransferError(f"a ticket of engine {self.engine} does not name its blocks", key=self.key)
        return blocks.ids


_TICKETS = msgspec.msgpack.Decoder(PushTicket)


def decode_ticket(data: bytes) -> PushTicket | None:
    """Decode a ticket; None if the bytes are not a valid one."""
    try:
        ticket = decode_total(_TICKETS, data)
    except MalformedMessage:
        return None
    return ticket if 0 <= ticket.start <= ticket.stop else None


class PushSend(msgspec.Struct, frozen=True):
    """One batch of a transfer: tokens [start, stop), in `block_ids`, the first of which holds `start`."""

    key: TransferKey  # of this sending: the hand-off's for its first ticket, another one for each later ticket
    source: TransferKey  # the hand-off's
    batch: TransferKey  # name of this batch's hold on its source blocks
    ticket: PushTicket
    start: int
    stop: int
    block_ids: list[int]
    during_step: bool = False  # this step computes its end: a layer may be sent when the step has computed it


class PushMetadata(KVConnectorMetadata, kw_only=True):
    """Receives to register and sends to post in this step."""

    receives: list[PushTicket] = msgspec.field(default_factory=list)
    refused: list[TransferKey] = msgspec.field(default_factory=list)  # loads for which no ticket could be made
    unsendable: list[TransferKey] = msgspec.field(default_factory=list)  # sends with tickets that cannot be served
    sends: list[PushSend] = msgspec.field(default_factory=list)
    completed: list[TransferKey] = msgspec.field(default_factory=list)  # sends without further batches
    dropped: list[TransferKey] = msgspec.field(default_factory=list)  # sends that are no longer wanted


@dataclass(slots=True)
class _Sending:
    """The part of a ticket that has been given to the worker."""

    encoded: bytes
    ticket: PushTicket | None  # None: the data was not a ticket of a reader of this transfer
    key: TransferKey  # PushSend.key
    num_sent: int = 0  # tokens [ticket.start, num_sent) are in flight or delivered
    num_batches: int = 0  # for earlier tickets, too
    completed: bool = False
    failed: bool = False
    ended: bool = False  # the worker has reported it

    @property
    def is_open(self) -> bool:
        """Whether the worker will still report the transfer."""
        return not self.ended and (self.num_sent > self.ticket.start if self.ticket is not None else self.failed)


class PushScheduler(SchedulerConnector):
    """Scheduler side: tickets for the KV wanted here, batches of the KV wanted elsewhere."""

    observes = Observed(Shown.HANDOFFS, Shown.HANDOFFS, waiting_keys=False)

    def __init__(self, config: ConnectorConfig, peers: PeerCards) -> None:
        self.config = config
        self.block_size = config.layout.block_size
        self.peers = peers
        self._orders = PushMetadata(step_id=0)  # of the next step, as far as known
        self._sending: dict[TransferKey, _Sending] = {}  # by hand-off, for its latest ticket
        self._superseded: set[TransferKey] = set()  # sendings for earlier tickets, with ends that are not reported
        self._parts = count(1)  # numbers of batches, and of repeated sendings

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> MatchedTokens:
        if request.kv_ready is False:
            return NO_MATCH
        if request.kv == "await_peer":
            return MatchedTokens(request.num_wanted - num_computed_tokens)
        lent = request.handoff
        if lent is None or not self.may_receive_from(lent.engine, lent.epoch):
            return NO_MATCH
        return MatchedTokens(max(min(lent.num_tokens, request.num_wanted) - num_computed_tokens, 0))

    def may_receive_from(self, engine: str, epoch: str) -> bool:
        """Whether that incarnation is a peer with matching KV."""
        return self.peers.knows(engine, epoch)

    def update_state_after_alloc(
        self, request: RequestView, block_tables: BlockTables, num_external_tokens: int
    ) -> bytes | None:
        """Make the ticket. Blocks too scattered to be named within its limit fail the load at once."""
        if request.kv != "await_peer" and (request.handoff is None or not num_external_tokens):
            return None
        start, stop = request.num_local_hit, request.num_local_hit + num_external_tokens
        own = self._own_blocks(block_tables, start, stop)
        if own is None:
            self._orders.refused.append(request.transfer_key)
            return None
        ticket = PushTicket(
            self.config.engine, self.config.epoch, *request.transfer_key[:2], start, stop, pack_blocks(own)
        )
        encoded = msgspec.msgpack.encode(ticket)
        if len(encoded) > MAX_BLOB_BYTES:
            self._orders.refused.append(request.transfer_key)
            return None
        if num_external_tokens:
            self._orders.receives.append(self._for_workers(ticket))
        return encoded

    def _own_blocks(self, block_tables: BlockTables, start: int, stop: int) -> Sequence[int] | None:
        """The destination of tokens [start, stop); with KV groups, group after group. None: blocks are missing."""
        if self.config.layout.groups:
            return own_blocks(self.config.layout, block_tables, start, stop)
        wanted = blocks_of(start, stop, self.block_size)
        return block_tables[0][wanted.start : wanted.stop]

    def _for_workers(self, ticket: PushTicket) -> PushTicket:
        """The ticket in workers' numbering: with KV groups, tokens are those of the blocks that it names, from 0 on."""
        if not self.config.layout.groups:
            return ticket
        num_blocks = sum(map(len, entries_to_load(self.config.layout, ticket.start, ticket.stop)))
        return msgspec.structs.replace(ticket, start=0, stop=num_blocks * self.block_size)

    def build_connector_meta(self, view: SchedulerView) -> PushMetadata:
        sends = [send for confirmed in view.confirmed for send in self._confirmed_batches(confirmed)]
        sends += [send for scheduled in view.scheduled if (send := self._step_batch(scheduled)) is not None]
        for key in view.aborted:
            if (sending := self._sending.pop(key, None)) is not None:
                self._orders.dropped.append(sending.key)
                if sending.is_open and sending.key != key:
                    self._superseded.add(sending.key)
        orders, self._orders = self._orders, PushMetadata(step_id=0)
        orders.step_id, orders.sends = view.step_id, sends
        orders.needs_layer_hooks = any(send.during_step for send in sends)
        orders.holds = [BlockHold(send.batch, send.block_ids, send.source) for send in sends]
        return orders

    def must_hear_end(self, key: TransferKey) -> bool:
        sending = self._sending.get(key)
        return sending is not None and sending.is_open

    def request_finished(self, request: RequestView, block_tables: BlockTables) -> FinishDecision:
        return FinishDecision(hold_blocks=request.kv == "handoff", until_release=True)

    def resolve_results(self, results: TransferResults) -> TransferResults:
        """Rename the sending for a hand-off's latest ticket, which workers know by another name."""
        if not (results.finished_sending or results.failed_sending):
            return results
        current = {sending.key: source for source, sending in self._sending.items() if sending.key != source}
        if not current and not self._superseded:
            return results

        def resolved(outcomes: Mapping[TransferKey, TransferOutcome]) -> dict[TransferKey, TransferOutcome]:
            wanted = {key: o for key, o in outcomes.items() if key not in self._superseded}
            self._superseded.difference_update(outcomes)
            return {current.get(key, key): outcome for key, outcome in wanted.items()}

        sending = (resolved(results.finished_sending), resolved(results.failed_sending))
        return results._replace(finished_sending=sending[0], failed_sending=sending[1])

    def update_connector_output(self, results: TransferResults) -> None:
        for outcomes, failed in ((results.finished_sending, False), (results.failed_sending, True)):
            for key in outcomes:
                if key in self._sending:
                    self._sending[key].ended = True
                    self._sending[key].failed |= failed  # nothing more of it is sent; `aborted` forgets it

    def update_peers(self, cards: Sequence[EngineCard]) -> None:
        self.peers.replace(cards)

    def shutdown(self) -> None:
        self.peers.clear()
        self._sending.clear()

    def _confirmed_batches(self, confirmed: ConfirmedRange) -> list[PushSend]:
        """The wanted part of a confirmed range that has not been sent yet."""
        sending = self._find_sending(confirmed.request)
        if sending is None:
            return []
        key, ticket = confirmed.request.transfer_key, sending.ticket
        if not sending.failed and (ticket is None or (confirmed.last and confirmed.stop < ticket.stop)):
            sending.failed = True
            self._orders.unsendable.append(sending.key)  # it wants tokens that will never exist here
        if self.config.layout.groups:
            batches = self._group_batches(key, sending, confirmed)
        else:
            batch = self._next_batch(key, sending, confirmed.stop, confirmed.block_tables[0], is_all=confirmed.last)
            batches = [batch] if batch is not None else []
        # Not before the hand-off: the transfer's end may only be reported for one that exists.
        if confirmed.last and sending.num_batches and not (sending.completed or sending.failed):
            sending.completed = True
            self._orders.completed.append(sending.key)
        return batches

    def _step_batch(self, scheduled: ScheduledRange) -> PushSend | None:
        """The wanted part of a step's tokens, if they are valid when computed."""
        if scheduled.may_be_void:
            return None
        request = scheduled.request
        sending = self._find_sending(request)
        if sending is None or sending.ticket is None or self.config.layout.groups:
            return None  # a group's layers are not those that a step computes one after the other
        is_all = scheduled.stop >= sending.ticket.stop
        key, block_ids = request.transfer_key, scheduled.block_tables[0]
        return self._next_batch(key, sending, scheduled.stop, block_ids, is_all=is_all, during_step=True)

    def _find_sending(self, request: RequestView) -> _Sending | None:
        """The sending for a request's transfer; None: it is not wanted (yet).

        With another ticket it starts over, and data in flight for the earlier one is dropped.
        """
        if request.kv != "handoff" or request.ticket is None:
            return None
        key = request.transfer_key
        last = self._sending.get(key)
        if last is not None and last.encoded == request.ticket:
            return last
        ticket = decode_ticket(request.ticket)
        if ticket is not None and not ticket.may_have(key):
            ticket = None  # of another request, or of an attempt that was over when this one began
        sending = _Sending(request.ticket, ticket, key, ticket.start if ticket is not None else 0)
        if last is not None:
            sending.num_batches = last.num_batches
            sending.key = key._replace(part=next(self._parts))
            if last.is_open:
                self._superseded.add(last.key)
                self._orders.dropped.append(last.key)
        self._sending[key] = sending
        return sending

    def _group_batches(self, key: TransferKey, sending: _Sending, confirmed: ConfirmedRange) -> list[PushSend]:
        """`_next_batch` for each KV group; with a window, only blocks that the receiver's next token sees."""
        ticket, size = sending.ticket, self.block_size
        if ticket is None or sending.failed:
            return []
        stop = min(confirmed.stop if confirmed.last else confirmed.stop // size * size, ticket.stop)
        sends: list[PushSend] = []
        before = 0  # blocks of the groups before, in the ticket's numbering
        for table, entries in zip(
            confirmed.block_tables, entries_to_load(self.config.layout, ticket.start, ticket.stop), strict=True
        ):
            first = max(sending.num_sent // size, entries.start)
            last = min(-(-stop // size), entries.stop)
            blocks = list(table[first:last])
            if min(blocks, default=0) < 0:
                sending.failed = True
                self._orders.unsendable.append(sending.key)  # the window that it wants ended earlier
                return []
            if blocks:
                sending.num_batches += 1
                batch = key._replace(part=next(self._parts))
                start = (before + first - entries.start) * size
                sends.append(
                    PushSend(
                        sending.key, key, batch, self._for_workers(ticket), start, start + len(blocks) * size, blocks
                    )
                )
            before += len(entries)
        if sends:
            sending.num_sent = stop
        return sends

    def _next_batch(
        self,
        key: TransferKey,
        sending: _Sending,
        stop: int,
        block_ids: Sequence[int],
        *,
        is_all: bool,
        during_step: bool = False,
    ) -> PushSend | None:
        """The wanted part of tokens [0, stop) that has not been sent yet; a partial block only with all of it."""
        ticket = sending.ticket
        if ticket is None or sending.failed:
            return None
        stop = min(stop if is_all else stop // self.block_size * self.block_size, ticket.stop)
        if stop <= sending.num_sent:
            return None
        start, sending.num_sent = sending.num_sent, stop
        sending.num_batches += 1
        batch = key._replace(part=next(self._parts))
        blocks = blocks_of(start, stop, self.block_size)
        own = list(block_ids[blocks.start : blocks.stop])
        return PushSend(sending.key, key, batch, ticket, start, stop, own, during_step)
