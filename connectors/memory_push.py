"""Push mode of the `memory` connector: prefill writes into blocks that decode has allocated and named in a ticket."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from pdkv.connectors.base import (
    NO_MATCH,
    BlockHold,
    ConfirmedRange,
    Finished,
    KVConnectorMetadata,
    MatchedTokens,
    RequestView,
    SchedulerView,
    TransferKey,
    TransferResults,
)
from pdkv.connectors.memory import MemoryConnector, MemoryScheduler, MemoryWorker
from pdkv.connectors.memory_fabric import Content, Operation, copy_in, copy_out
from pdkv.errors import TransferCancelled, TransferError, TransferTimeout
from pdkv.messages import ConnectorKind


class PushTicket(msgspec.Struct, array_like=True):
    """Where the KV of token blocks [first_block, first_block + len(block_ids)) is wanted."""

    engine: str
    epoch: str
    transfer_id: str
    attempt: int
    first_block: int
    block_ids: list[int]


class Send(msgspec.Struct, frozen=True):
    """Write whole blocks, one batch of a transfer: piece pieces[i] of the ticket from block source[i]."""

    key: TransferKey
    batch: TransferKey  # names this batch's hold on its source blocks
    ticket: PushTicket
    pieces: list[int]
    source: list[int]


class PushMetadata(KVConnectorMetadata, kw_only=True):
    """Receives to be registered and sends to be posted in this step."""

    receives: list[PushTicket] = msgspec.field(default_factory=list)
    sends: list[Send] = msgspec.field(default_factory=list)


@dataclass(slots=True)
class _SendState:
    """What of a ticket has been given to the worker."""

    ticket: PushTicket
    sent: set[int] = field(default_factory=set)
    num_batches: int = 0
    failed: bool = False


class PushScheduler(MemoryScheduler):
    """Scheduler side: confirmed blocks go out while later chunks compute; the tail goes last."""

    def __init__(self, connector: MemoryConnector) -> None:
        super().__init__(connector)
        self._receives: list[PushTicket] = []
        self._sends: dict[TransferKey, _SendState] = {}

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> MatchedTokens:
        if request.kv != "await_peer":
            return NO_MATCH
        return MatchedTokens(request.num_wanted - num_computed_tokens)

    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> bytes | None:
        if request.kv != "await_peer":
            return None
        first = request.num_local_hit // self.block_size
        stop = -(-(request.num_local_hit + num_external_tokens) // self.block_size)
        ticket = PushTicket(
            self.config.engine, self.config.epoch, *request.transfer_key, first, list(block_ids[first:stop])
        )
        if num_external_tokens:
            self._receives.append(ticket)
        return msgspec.msgpack.encode(ticket)

    def build_connector_meta(self, view: SchedulerView) -> KVConnectorMetadata:
        sends = [send for confirmed in view.confirmed if (send := self._new_pieces(confirmed)) is not None]
        for key in view.aborted:
            self._sends.pop(key, None)
        receives, self._receives = self._receives, []
        holds = [BlockHold(send.batch, send.source, send.key) for send in sends]
        return PushMetadata(step_id=view.step_id, receives=receives, sends=sends, holds=holds)

    def request_finished(self, request: RequestView, block_ids: Sequence[int]) -> Finished:
        return Finished(hold_blocks=request.kv == "handoff")

    def update_connector_output(self, results: TransferResults) -> None:
        for key in results.finished_sending:
            self._sends.pop(key, None)
        for key in results.failed_sending:
            if key in self._sends:
                self._sends[key].failed = True  # nothing more of it is sent; `aborted` forgets it

    def _new_pieces(self, confirmed: ConfirmedRange) -> Send | None:
        """What of a confirmed range has not been sent yet."""
        request = confirmed.request
        if request.kv != "handoff" or request.ticket is None:
            return None
        key = request.transfer_key
        state = self._sends.get(key)
        if state is None:
            ticket = msgspec.msgpack.decode(request.ticket, type=PushTicket)
            state = self._sends.setdefault(key, _SendState(ticket))
        ticket = state.ticket
        stop = -(-confirmed.stop // self.block_size) if confirmed.last else confirmed.stop // self.block_size
        ready = range(ticket.first_block, min(stop, ticket.first_block + len(ticket.block_ids)))
        pieces = [block - ticket.first_block for block in ready if block - ticket.first_block not in state.sent]
        if not pieces or state.failed:
            return None
        state.sent.update(pieces)
        state.num_batches += 1
        batch = (f"{key[0]}/{state.num_batches}", key[1])
        return Send(key, batch, ticket, pieces, [confirmed.block_ids[ticket.first_block + piece] for piece in pieces])


class _Outgoing:
    """A transfer from here: batches under way, pieces that were acknowledged, and the deadline."""

    def __init__(self, ticket: PushTicket, deadline: float) -> None:
        self.ticket = ticket
        self.deadline = deadline
        self.batches: set[TransferKey] = set()
        self.acknowledged: set[int] = set()


class _Incoming:
    """A transfer to here: pieces that are in."""

    def __init__(self, ticket: PushTicket) -> None:
        self.ticket = ticket
        self.arrived: set[int] = set()


class PushWorker(MemoryWorker):
    """Worker side: registered receives, posted writes."""

    def __init__(self, connector: MemoryConnector) -> None:
        super().__init__(connector)
        self._outgoing: dict[TransferKey, _Outgoing] = {}
        self._incoming: dict[TransferKey, _Incoming] = {}

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        assert isinstance(meta, PushMetadata)
        for ticket in meta.receives:
            self._incoming[(ticket.transfer_id, ticket.attempt)] = _Incoming(ticket)
        for send in meta.sends:
            deadline = self.fabric.clock() + self.options.transfer_timeout_s
            outgoing = self._outgoing.setdefault(send.key, _Outgoing(send.ticket, deadline))
            outgoing.batches.add(send.batch)
            self.fabric.post(Write(self, outgoing, send))

    def get_finished(self) -> TransferResults:
        now = self.fabric.clock()
        for key in [key for key, outgoing in self._outgoing.items() if outgoing.deadline <= now]:
            self.stop_sending(key, TransferTimeout("no acknowledgement"))
        return super().get_finished()

    def cancel(self, key: TransferKey) -> None:
        self.fabric.post(CancelTransfer(self, key))

    def is_sending(self, key: TransferKey, outgoing: _Outgoing) -> bool:
        """Whether the transfer's blocks may still be read."""
        return self._outgoing.get(key) is outgoing

    def stop_sending(self, key: TransferKey, error: TransferError) -> None:
        """Nothing reads the transfer's blocks from now on."""
        outgoing = self._outgoing.pop(key, None)
        if outgoing is not None:
            for batch in (*outgoing.batches, key):
                self.send_failed(batch, error.code)

    def acknowledge(self, send: Send) -> None:
        """The peer has the batch. A duplicate changes nothing."""
        key = send.key
        outgoing = self._outgoing.get(key)
        if outgoing is None or send.batch not in outgoing.batches:
            return
        outgoing.batches.remove(send.batch)
        self.sent(send.batch, len(send.pieces))
        outgoing.acknowledged.update(send.pieces)
        if len(outgoing.acknowledged) == len(outgoing.ticket.block_ids):
            del self._outgoing[key]
            self.sent(key, len(outgoing.acknowledged))

    def incoming(self, key: TransferKey) -> _Incoming | None:
        """The registered receive of a transfer; None: what arrives for it is late and refused."""
        return self._incoming.get(key)

    def land(self, ticket: PushTicket, pieces: Sequence[int], content: Content) -> bool:
        """Write pieces into the registered blocks. False: the transfer has ended here, the write is refused."""
        key = (ticket.transfer_id, ticket.attempt)
        incoming = self.incoming(key)
        if incoming is None:
            self.fabric.num_refused += 1
            return False
        copy_in(self.pool, [ticket.block_ids[piece] for piece in pieces], content)
        incoming.arrived.update(pieces)
        if len(incoming.arrived) == len(ticket.block_ids):
            self._incoming.pop(key, None)
            self.received(key, len(incoming.arrived))
        return True

    def stop_receiving(self, key: TransferKey) -> None:
        """Nothing of this transfer lands from now on."""
        if self._incoming.pop(key, None) is not None:
            self.receive_failed(key, TransferCancelled.code)


class Write(Operation):
    """Two stages: the data leaves the source, the data lands."""

    def __init__(self, worker: PushWorker, outgoing: _Outgoing, send: Send) -> None:
        self.worker = worker
        self.outgoing = outgoing
        self.send = send
        self.content: Content = None

    def deliver(self) -> Operation | None:
        worker, send = self.worker, self.send
        if self.content is None:
            if not worker.is_sending(send.key, self.outgoing):
                return None
            self.content = copy_out(worker.pool, send.source)
            return self
        try:
            peer = worker.fabric.endpoint(send.ticket.engine, send.ticket.epoch)
            assert isinstance(peer, PushWorker)
            if not peer.land(send.ticket, send.pieces, self.content):
                raise TransferCancelled("the receiver has ended the transfer")
        except TransferError as error:
            if worker.is_sending(send.key, self.outgoing):
                worker.stop_sending(send.key, error)
            return None
        worker.acknowledge(send)
        return None


class CancelTransfer(Operation):
    """The confirmation of a cancel, on whichever side asked."""

    def __init__(self, worker: PushWorker, key: TransferKey) -> None:
        self.worker = worker
        self.key = key

    def deliver(self) -> Operation | None:
        self.worker.stop_receiving(self.key)
        self.worker.stop_sending(self.key, TransferCancelled("cancelled"))
        return None


class MemoryPushConnector(MemoryConnector):
    """Prefill writes into decode's blocks."""

    kind: ClassVar[ConnectorKind] = "push"
    concurrent = True
    needs_peer_first = False

    def make_scheduler_side(self) -> PushScheduler:
        return PushScheduler(self)

    def make_worker_side(self, rank: int) -> PushWorker:
        return PushWorker(self)
