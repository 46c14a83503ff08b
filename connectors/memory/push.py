"""Push mode of the `memory` connector: prefill writes into blocks that decode has allocated and named in a ticket."""

from msgspec.structs import replace

from pdkv.connectors.base import Direction, KVConnectorMetadata, TransferKey, TransferResults
from pdkv.connectors.memory.base import MemoryMode, MemoryScheduler, MemoryWorker
from pdkv.connectors.memory.fabric import Content, Operation, copy_in, copy_out
from pdkv.connectors.peer.cards import PeerCards
from pdkv.connectors.peer.push_scheduler import PushMetadata, PushScheduler, PushSend
from pdkv.connectors.peer.push_worker import Incoming, PieceRange
from pdkv.connectors.plan import PUSH_ORDERS
from pdkv.connectors.step_done import ON_HOST
from pdkv.connectors.transfer.planning import blocks_of
from pdkv.errors import KVCorrupted, KVNotFound, TransferCancelled, TransferError, TransferTimeout


class MemoryPushScheduler(MemoryScheduler, PushScheduler):
    """Scheduler side of push."""

    def __init__(self, connector: MemoryMode) -> None:
        MemoryScheduler.__init__(self, connector)
        PushScheduler.__init__(self, connector.config, PeerCards(connector.config))

    def may_receive_from(self, engine: str, epoch: str) -> bool:
        return self.epochs.get(engine) == epoch


class _Outgoing:
    """A transfer from here: its pending batches, whether more will come, and the deadline."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.batches: set[TransferKey] = set()
        self.is_complete = False
        self.num_acknowledged = 0  # blocks


class MemoryPushWorker(MemoryWorker):
    """Worker side: registered receives, posted writes."""

    def __init__(self, connector: MemoryMode) -> None:
        super().__init__(connector)
        self._outgoing: dict[TransferKey, _Outgoing] = {}
        self._incoming: dict[TransferKey, Incoming] = {}
        self._in_step: list[Write] = []  # ranges that this step computes
        self._layout = connector.config.layout

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        assert isinstance(meta, PushMetadata)
        for key in meta.dropped:
            self.stop_sending(key, TransferCancelled("no ticket wants it"))
        for key in meta.refused:
            self.receive_failed(key, TransferError.code)
        for key in meta.unsendable:
            self._outgoing.setdefault(key, _Outgoing(self.fabric.clock()))
            self.stop_sending(key, KVNotFound("the ticket wants more than there is"))
        for ticket in meta.receives:
            self._incoming[ticket.key] = Incoming(ticket, self._layout, meta.earlier_steps or ON_HOST)
        for send in meta.sends:
            deadline = self.fabric.clock() + self.options.transfer_timeout_s
            outgoing = self._outgoing.setdefault(send.key, _Outgoing(deadline))
            outgoing.batches.add(send.batch)
            write = Write(self, outgoing, send)
            if send.during_step:
                self._in_step.append(write)
            else:
                self.fabric.post(write)
        for key in meta.completed:
            if key in self._outgoing:
                self._outgoing[key].is_complete = True
                self._end_if_delivered(key)

    def wait_for_save(self) -> None:
        in_step, self._in_step = self._in_step, []
        for write in in_step:
            self.fabric.post(write)

    def get_finished(self) -> TransferResults:
        now = self.fabric.clock()
        for key in [key for key, outgoing in self._outgoing.items() if outgoing.deadline <= now]:
            self.stop_sending(key, TransferTimeout("no acknowledgement"))
        return super().get_finished()

    def stop(self, key: TransferKey, direction: Direction) -> None:
        stop = self.stop_receiving if direction == "receive" else self.stop_sending
        stop(key, TransferCancelled("cancelled"))

    def is_sending(self, key: TransferKey, outgoing: _Outgoing) -> bool:
        """Whether the transfer's blocks may still be read."""
        return self._outgoing.get(key) is outgoing

    def stop_sending(self, key: TransferKey, error: TransferError) -> None:
        """Stop sending: nothing reads the transfer's blocks from now on."""
        outgoing = self._outgoing.pop(key, None)
        if outgoing is not None:
            for batch in (*outgoing.batches, key):
                self.send_failed(batch, error.code)

    def acknowledge(self, send: PushSend) -> None:
        """Note that the peer has the batch. A duplicate changes nothing."""
        key = send.key
        outgoing = self._outgoing.get(key)
        if outgoing is None or send.batch not in outgoing.batches:
            return
        outgoing.batches.remove(send.batch)
        self.sent(send.batch, len(send.block_ids))
        outgoing.num_acknowledged += len(send.block_ids)
        self._end_if_delivered(key)

    def _end_if_delivered(self, key: TransferKey) -> None:
        outgoing = self._outgoing[key]
        if outgoing.is_complete and not outgoing.batches:
            del self._outgoing[key]
            self.sent(key, outgoing.num_acknowledged)

    def incoming(self, key: TransferKey) -> Incoming | None:
        """The registered receive of a transfer; None: its data is too late and is refused."""
        return self._incoming.get(key)

    def digests_of(self, send: PushSend, receiver: MemoryWorker) -> bytes:
        """Digests of a batch at its source; empty if one of the ends has checksums off."""
        if not self.checksums.are_wanted(receiver.config.kv_checksum, send.ticket.transfer_id):
            return b""
        tokens, part = range(send.start, send.stop), self.checksums.pool.whole
        return self.checksums.of(send.block_ids, send.start, tokens, part, send.ticket.key)

    def land(self, send: PushSend, content: Content, digests: bytes, sender: "MemoryPushWorker") -> bool:
        """Write a batch into the registered blocks. False: the transfer has ended here, and the write is refused.

        Raises:
            KVCorrupted: the landed data does not match `digests`; the transfer has ended.
        """
        key = send.ticket.key
        incoming = self.incoming(key)
        if incoming is None:
            self.fabric.num_refused += 1
            return False
        first = send.ticket.start // self.block_size
        blocks = blocks_of(send.start, send.stop, self.block_size)
        copy_in(self.pool, incoming.block_ids[blocks.start - first : blocks.stop - first].tolist(), content)
        if self.checksums.are_wanted(sender.config.kv_checksum, key.transfer_id):
            tokens, part = range(send.start, send.stop), self.checksums.pool.whole
            own = self.checksums.of(incoming.block_ids, incoming.ticket.start, tokens, part, key)
            try:
                self.checksums.compare(own, digests, tokens, key, sender.engine)
            except KVCorrupted as error:
                self.stop_receiving(key, error)
                raise
        layers, heads = self._layout.num_layers, self._layout.num_kv_heads
        if incoming.arrived(PieceRange(0, layers, 0, heads, send.start, send.stop), 0):
            self._incoming.pop(key, None)
            self.received(key, len(incoming.block_ids))
        return True

    def stop_receiving(self, key: TransferKey, error: TransferError) -> None:
        """Stop receiving: nothing of this transfer lands from now on."""
        if self._incoming.pop(key, None) is not None:
            self.receive_failed(key, error.code)


class Write(Operation):
    """A write in two stages: the data leaves the source, then it lands."""

    def __init__(self, worker: MemoryPushWorker, outgoing: _Outgoing, send: PushSend) -> None:
        self.worker = worker
        self.outgoing = outgoing
        self.send = send
        self.content: Content = None
        self.digests = b""

    def deliver(self) -> Operation | None:
        worker, send = self.worker, self.send
        try:
            if self.content is None:
                if not worker.is_sending(send.key, self.outgoing):
                    return None
                self.digests = worker.digests_of(send, self._receiver())
                self.content = copy_out(worker.pool, send.block_ids)
                return self
            if not self._receiver().land(send, self.content, self.digests, worker):
                raise TransferCancelled("the receiver has ended the transfer")
        except TransferError as error:
            if worker.is_sending(send.key, self.outgoing):
                worker.stop_sending(send.key, error)
            return None
        worker.acknowledge(send)
        return None

    def _receiver(self) -> MemoryPushWorker:
        ticket = self.send.ticket
        peer = self.worker.fabric.endpoint(ticket.engine, ticket.epoch)
        assert isinstance(peer, MemoryPushWorker)
        return peer


class MemoryPushConnector(MemoryMode):
    """The connector in push mode: prefill writes into decode's blocks."""

    declares = replace(MemoryMode.declares, kind="push", orders=(*PUSH_ORDERS, "concurrent"))
    scheduler_type = MemoryPushScheduler
    worker_type = MemoryPushWorker
