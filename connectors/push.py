"""Push, whatever the transport: decode names the blocks that it has allocated in a ticket, prefill writes into them.

The scheduler side is in push_scheduler.py. Here is the worker side: each rank of the sender gives each rank of the
receiver the heads that they share; the receiver has a transfer when all its heads of all its tokens are in.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pdkv.connectors.base import ConnectorConfig, KVConnectorMetadata, TransferKey
from pdkv.connectors.io_lanes import LaneConfig
from pdkv.connectors.peers import PeerCards
from pdkv.connectors.planning import HeadPart, sender_parts
from pdkv.connectors.push_scheduler import PushMetadata as PushMetadata  # what a connector needs besides
from pdkv.connectors.push_scheduler import PushScheduler as PushScheduler
from pdkv.connectors.push_scheduler import PushSend as PushSend
from pdkv.connectors.push_scheduler import PushTicket as PushTicket
from pdkv.connectors.transfer_worker import Job, Task, TransferWorker
from pdkv.errors import KVNotFound, PdkvError, PeerGone, TransferError
from pdkv.messages import EngineCard

RECEIVE_TIMEOUT_S = 3600.0
"""A registered receive ends by its data or by a cancel: the engine's own deadline is the one that counts, since it
knows whether prefill has begun. This is only the last resort."""


class PushPiece(NamedTuple):
    """What one job sends: some heads of a batch, to one rank of the receiver."""

    send: PushSend
    card: EngineCard  # the receiver's
    heads: HeadPart


class Incoming:
    """A transfer to this rank: where its tokens go, and which heads of which of them are in."""

    def __init__(self, ticket: PushTicket, block_size: int, num_heads: int) -> None:
        """Raises a TransferError for a ticket that names too few blocks."""
        self.ticket = ticket
        self.block_ids = ticket.block_ids(block_size)  # the first one holds token ticket.start
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._arrived = np.zeros((num_heads, ticket.stop - ticket.start), dtype=np.bool_)

    def check_range(self, first_head: int, num_heads: int, start: int, stop: int) -> None:
        """Check what a peer says that it sends.

        Raises:
            TransferError: it is not within what is wanted here.
        """
        ticket = self.ticket
        inside = 0 <= first_head < first_head + num_heads <= len(self._arrived)
        if not inside or not ticket.start <= start < stop <= ticket.stop:
            raise TransferError(f"heads {first_head} + {num_heads}, tokens [{start}, {stop}) are not wanted")

    def arrived(self, first_head: int, num_heads: int, start: int, stop: int, num_bytes: int) -> bool:
        """Tokens [start, stop) of these heads are in their blocks; once more changes nothing. True: all is in."""
        first = self.ticket.start
        with self._lock:
            part = self._arrived[first_head : first_head + num_heads, start - first : stop - first]
            if not part.all():
                self.num_bytes += num_bytes
                part[:] = True
            return bool(self._arrived.all())


class PushWorker(TransferWorker):
    """Worker side above a transport: one job per batch and peer rank that is sent, one posted job that is received.

    A transport says how a piece is sent (`send`). What comes in calls `find_incoming`, writes between `enter` and
    `leave`, or without them where the peer writes by itself, and then calls `landed`.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        notify: Callable[[], None],
        peers: PeerCards,
        *,
        timeout_s: float,
        lanes: LaneConfig,
        receive_timeout_s: float = RECEIVE_TIMEOUT_S,
    ) -> None:
        super().__init__(notify, timeout_s=timeout_s, lanes=lanes)
        self._receive_timeout_s = receive_timeout_s
        self.config = config
        self.peers = peers

    @abstractmethod
    def send(self, job: Job, piece: PushPiece, scratch: Any) -> int | None:
        """Deliver a piece, on an I/O thread. Returns the bytes, or None: posted; raises a TransferError."""

    def register(self, job: Job, incoming: Incoming) -> None:
        """A receive is registered: what the peer sends for it may land from now on."""

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        if not isinstance(meta, PushMetadata):
            return
        for key in meta.dropped:
            self.drop(key)
        for key in meta.refused:
            self.refuse(key, "receive", TransferError.code)
        for key in meta.unsendable:
            self.refuse(key, "send", KVNotFound.code)
        for ticket in meta.receives:
            self._receive(ticket)
        for send in meta.sends:
            self._send(send)

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        """Sends to an incarnation that is gone fail; who else gets something is not touched."""
        for card in removed:
            self.peers.remove(card.engine, card.epoch)
        for card in added:
            self.peers.add(card)
        gone = {(card.engine, card.epoch) for card in removed}
        if gone:
            self.stop_jobs(lambda job: _receiver(job) in gone, PeerGone.code)
        self.lanes.retire({self.lane_of(c.engine, c.epoch, rank) for c in removed for rank in range(c.tp)})

    def shutdown(self) -> None:
        super().shutdown()
        self.peers.clear()

    def run_job(self, job: Job, scratch: Any) -> int | None:
        piece: PushPiece = job.order
        self.peers.card(piece.card.engine, piece.card.epoch)  # it may have gone while the job waited
        return self.send(job, piece, scratch)

    def lane_of(self, engine: str, epoch: str, peer_rank: int) -> Any:
        """The lane of a peer's rank: by default one of its own."""
        return (engine, epoch, peer_rank)

    # --- what comes in --------------------------------------------------------------------------------------------

    def find_incoming(self, key: TransferKey) -> tuple[Job, Incoming]:
        """The registered receive of a transfer.

        Raises:
            KVNotFound: none is registered (yet, or any more): what comes for it is refused.
        """
        for job in self.open_jobs(key, "receive"):
            if isinstance(job.order, Incoming):
                return job, job.order
        raise KVNotFound("no such transfer is expected", transfer_id=key[0], attempt=key[1])

    def landed(self, job: Job, first_head: int, num_heads: int, start: int, stop: int, num_bytes: int) -> None:
        """Tokens [start, stop) of these heads of this rank are in; ends the receive with the last of them."""
        incoming: Incoming = job.order
        if incoming.arrived(first_head, num_heads, start, stop, num_bytes):
            self.end_job(job, num_bytes=incoming.num_bytes)

    # --- orders ---------------------------------------------------------------------------------------------------

    def _receive(self, ticket: PushTicket) -> None:
        layout = self.config.layout
        try:
            incoming = Incoming(ticket, layout.block_size, layout.num_kv_heads)
        except TransferError as error:
            self.refuse(ticket.key, "receive", error.code)
            return
        for job in self.submit(ticket.key, "receive", [Task(incoming, posted=True, timeout_s=self._receive_timeout_s)]):
            self.register(job, incoming)

    def _send(self, send: PushSend) -> None:
        try:
            tasks = list(self._pieces(send))
        except PdkvError as error:
            self.refuse(send.key, "send", error.code, batch=send.batch)
            return
        self.submit(send.key, "send", tasks, batch=send.batch, last=send.last)

    def _pieces(self, send: PushSend) -> Iterable[Task]:
        """One job per rank of the receiver that takes something from this one."""
        ticket = send.ticket
        card = self.peers.card(ticket.engine, ticket.epoch)
        if (ticket.transfer_id, ticket.attempt) != send.key:
            raise TransferError("the ticket is another transfer's", transfer_id=send.key[0], attempt=send.key[1])
        heads = self.config.layout.kv_heads_of_all_ranks
        for part in sender_parts(self.config.rank, self.config.tp, card.tp, heads):
            lane = self.lane_of(card.engine, card.epoch, part.peer_rank)
            yield Task(PushPiece(send, card, part), lane=lane)


def _receiver(job: Job) -> tuple[str, str] | None:
    """The incarnation that a job sends to."""
    return (job.order.card.engine, job.order.card.epoch) if isinstance(job.order, PushPiece) else None
