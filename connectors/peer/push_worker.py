"""The worker side of every push: decode names allocated blocks in a ticket (push_scheduler.py), prefill fills them.

Each rank of the sender gives each rank of the receiver the heads that they share, layer group by layer group, while the
step that computes them runs. A transfer is complete when all layers and heads of all its tokens have arrived.
"""

import math
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import KVConnectorMetadata, TransferKey
from pdkv.connectors.peer.cards import Incarnation
from pdkv.connectors.peer.checksums import Checksums
from pdkv.connectors.peer.push_scheduler import PushMetadata, PushSend, PushTicket
from pdkv.connectors.peer.worker import PeerWorker
from pdkv.connectors.step_done import ON_HOST, StepDone, make_step_done
from pdkv.connectors.transfer.digest import PieceDigests
from pdkv.connectors.transfer.planning import HeadPart, Ids, as_ids, blocks_of, sender_parts, unit_index
from pdkv.connectors.transfer.units import UnitPart
from pdkv.connectors.transfer.worker import Job, Task
from pdkv.errors import KVCorrupted, KVNotFound, PdkvError, PeerGone, TransferError
from pdkv.wire.kv import EngineCard, KVLayout

if TYPE_CHECKING:
    import torch

MAX_LAYER_GROUPS = 8
MIN_GROUP_BYTES = 2 << 20
"""Equal groups in which a rank's KV of one step is sent while it computes, unless they would be smaller than the next
bound.
"""

STEP_TIMEOUT_S = 3600.0
"""Seconds that a send waits for its layers: a step ends, or the process does. A send's own deadline counts from
then.
"""

RECEIVE_TIMEOUT_S = 3600.0
"""A registered receive ends with its data or a cancel: the engine's own deadline is the one that counts, since it knows
whether prefill has begun. This limit is only the last resort.
"""


class PushPiece(NamedTuple):
    """Some heads of some layers of a batch, sent by one job to one rank of the receiver."""

    send: PushSend
    card: EngineCard  # the receiver's
    heads: HeadPart
    layers: range
    after: StepDone  # of the step's layers, or of the steps, that wrote it

    @property
    def part(self) -> UnitPart:
        """The heads and layers of the piece in the sender's units."""
        heads, layers = self.heads, self.layers
        return UnitPart(heads.first, heads.first + heads.num_heads, layers.start, layers.stop)


class PieceRange(NamedTuple):
    """Layers, heads and tokens [start, stop) of a transfer, in the receiving rank's numbering."""

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    start: int
    stop: int

    @property
    def part(self) -> UnitPart:
        """The heads and layers of the piece in the receiver's units."""
        first_head, first_layer = self.first_head, self.first_layer
        return UnitPart(first_head, first_head + self.num_heads, first_layer, first_layer + self.num_layers)


def range_of(piece: PushPiece) -> PieceRange:
    """A piece in its receiver's numbering."""
    heads, layers, send = piece.heads, piece.layers, piece.send
    return PieceRange(layers.start, len(layers), heads.peer_first, heads.num_heads, send.start, send.stop)


def piece_ids(
    block_ids: Sequence[int] | Ids, block_size: int, start: int, stop: int, *, table_start: int, in_units: bool
) -> Ids:
    """The blocks or units of tokens [start, stop) in a pool.

    Args:
        block_ids: the first one holds token `table_start`.

    Raises:
        TransferError: the range does not begin with a unit, or blocks are missing.
    """
    origin = table_start // block_size * block_size
    if start % (HASH_BLOCK_SIZE if in_units else block_size) or stop > origin + len(block_ids) * block_size:
        raise TransferError(f"tokens [{start}, {stop}) are not in {len(block_ids)} blocks from token {origin} on")
    if in_units:
        return unit_index(block_ids, block_size, start - origin, stop - origin)
    wanted = blocks_of(start - origin, stop - origin, block_size)
    return as_ids(block_ids)[wanted.start : wanted.stop]


def layer_groups(num_layers: int, num_bytes: int) -> list[range]:
    """Cut the layers of a step's KV, `num_bytes` in total, into groups that are sent when they are computed.

    They are equal except at the end, so that as little as possible is left to send after the forward pass.
    """
    count = max(min(num_bytes // MIN_GROUP_BYTES, MAX_LAYER_GROUPS, num_layers), 1)
    cuts = [i * num_layers // count for i in range(count + 1)]
    while (left := cuts[-1] - cuts[-2]) > 1 and num_bytes * left // (2 * num_layers) >= MIN_GROUP_BYTES:
        cuts.insert(-1, cuts[-1] - left // 2)
    return [range(first, stop) for first, stop in pairwise(cuts)]


class Incoming:
    """A transfer to this rank: where its tokens go, and which layers and heads have arrived."""

    def __init__(self, ticket: PushTicket, layout: KVLayout, after: StepDone) -> None:
        """Raises a TransferError for a ticket that names too few blocks.

        `after`: the last step of the blocks' previous owner; writes wait for it.
        """
        self.ticket = ticket
        self.after = after
        self.block_ids = ticket.block_ids(layout.block_size)  # the first one holds token ticket.start
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._unit = math.gcd(HASH_BLOCK_SIZE, layout.block_size)  # tokens that arrive together
        shape = (layout.num_layers, layout.num_kv_heads, self._end(ticket.stop) - self._first(ticket.start))
        self._arrived = np.zeros(shape, dtype=np.bool_)
        self._num_missing = self._arrived.size

    def check_range(self, piece: PieceRange) -> None:
        """Check the range that a peer sends.

        Raises:
            TransferError: it is not within what is wanted here.
        """
        ticket, (num_layers, num_heads, _) = self.ticket, self._arrived.shape
        inside = 0 <= piece.first_layer < piece.first_layer + piece.num_layers <= num_layers
        inside &= 0 <= piece.first_head < piece.first_head + piece.num_heads <= num_heads
        inside &= ticket.start <= piece.start < piece.stop <= ticket.stop
        if not inside:
            raise TransferError(f"{piece} is not wanted")
        if (piece.start % self._unit and piece.start != ticket.start) or (
            piece.stop % self._unit and piece.stop != ticket.stop
        ):
            raise TransferError(f"{piece} is not cut at {self._unit} tokens")

    def arrived(self, piece: PieceRange, num_bytes: int) -> bool:
        """Note that a range accepted by `check_range` is in its blocks; repeating that changes nothing. True:
        everything has arrived.
        """
        layers = slice(piece.first_layer, piece.first_layer + piece.num_layers)
        heads = slice(piece.first_head, piece.first_head + piece.num_heads)
        first = self._first(self.ticket.start)
        units = slice(self._first(piece.start) - first, self._end(piece.stop) - first)
        with self._lock:
            part = self._arrived[layers, heads, units]
            num_new = part.size - int(np.count_nonzero(part))
            if num_new:
                self.num_bytes += num_bytes
                self._num_missing -= num_new
                part[:] = True
            return not self._num_missing

    def _first(self, token: int) -> int:
        return token // self._unit

    def _end(self, token: int) -> int:
        return -(-token // self._unit)


def _last_layer(job: Job) -> int:
    """The layer after which a send's KV is complete."""
    stop: int = job.order.layers.stop
    return stop


class PushWorker(PeerWorker):
    """Worker side above a transport: one job per batch, layer group and peer rank that is sent, one posted job that is
    received.

    A transport implements sending a piece (`send`), and carries its digests to the receiver. For incoming data it calls
    `find_incoming`, waits for the step that precedes the receive, writes between `enter` and `leave` (not needed if the
    peer itself writes), and then calls `landed`, or `confirm` if it has digested the piece itself.
    """

    metadata_type = PushMetadata
    checksums: Checksums

    @abstractmethod
    def send(self, job: Job, piece: PushPiece, scratch: Any) -> int | None:
        """Deliver a piece, on an I/O thread. Returns the bytes, or None: posted; raises a TransferError.

        The data is in its blocks: `run_job` has waited for `piece.after`.
        """

    def register(self, job: Job, incoming: Incoming) -> None:
        """Note a registered receive: the peer's data for it may land from now on."""

    def register_kv_caches(self, kv_cache: "torch.Tensor") -> None:
        self.checksums = Checksums(self.config, kv_cache)
        self._device = kv_cache.device
        self._in_step: deque[Job] = deque()  # sends of layers that this step has not computed yet, in order

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        if not isinstance(meta, PushMetadata):
            return
        for key in meta.dropped:
            self.drop(key, "send")
        for key in meta.refused:
            self.refuse(key, "receive", TransferError.code)
        for key in meta.unsendable:
            self.refuse(key, "send", KVNotFound.code)
        for ticket in meta.receives:
            self._receive(ticket, meta.earlier_steps or ON_HOST)
        self._begin_sending(self.config.layout.num_layers)  # of the last step, if its device has only computed them now
        for send in meta.sends:
            self._send(send, meta.earlier_steps or ON_HOST)
        if any(send.during_step for send in meta.sends):
            self._in_step = deque(sorted(self._in_step, key=_last_layer))
        for key in meta.completed:
            self.submit(key, "send", [])

    def save_kv_layer(self, layer: int, kv_cache: "torch.Tensor", meta: KVConnectorMetadata) -> None:
        self._begin_sending(layer + 1)

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        """Fail sends to an incarnation that is gone; others are not affected."""
        super().update_peers(added, removed)
        gone = {(card.engine, card.epoch) for card in removed}
        if gone:
            self.stop_jobs(lambda job: _receiver(job) in gone, PeerGone.code)

    def run_job(self, job: Job, scratch: Any) -> int | None:
        piece: PushPiece = job.order
        self.peers.card(piece.card.engine, piece.card.epoch)  # it may have gone while the job waited
        piece.after.wait(job.remaining_s())  # the peer, or another stream, reads
        return self.send(job, piece, scratch)

    def begin_digests(self, piece: PushPiece) -> PieceDigests | None:
        """Begin the digests that the receiver compares with landed data; None: one of the ends does not want any."""
        send = piece.send
        if not self.checksums.are_wanted(piece.card.kv_checksum, send.ticket.transfer_id):
            return None
        tokens = range(send.start, send.stop)
        return self.checksums.begin(send.block_ids, send.start, tokens, piece.part, send.ticket.key)

    # --- incoming data --------------------------------------------------------------------------------------------

    def find_incoming(self, key: TransferKey) -> tuple[Job, Incoming]:
        """The registered receive of a transfer.

        Raises:
            KVNotFound: none is registered (yet, or any more): its data is refused.
        """
        for job in self.open_jobs(key, "receive"):
            if isinstance(job.order, Incoming):
                return job, job.order
        raise KVNotFound("no such transfer is expected", key=key)

    def digests_for(self, incoming: Incoming, piece: PieceRange, sender: Incarnation) -> PieceDigests | None:
        """Digests of an engine's data as it lands; None: one of the ends does not want any."""
        ticket = incoming.ticket
        mode = self.peers.card(*sender).kv_checksum if self.peers.knows(*sender) else "on"
        if not self.checksums.are_wanted(mode, ticket.transfer_id):
            return None
        tokens = range(piece.start, piece.stop)
        return self.checksums.begin(incoming.block_ids, ticket.start, tokens, piece.part, ticket.key)

    def landed(
        self,
        job: Job,
        piece: PieceRange,
        num_bytes: int,
        digests: bytes,
        sender: Incarnation,
        own: PieceDigests | None = None,
    ) -> None:
        """Note that a piece is in the blocks of this rank; the last one ends the receive. As `confirm`.

        Args:
            own: the result of `digests_for` for it, if that was called.
        """
        if not self.enter(job):
            return  # it has ended, or must: its blocks' content belongs to no transfer any more
        try:
            own = own or self.digests_for(job.order, piece, sender)
            found = None if own is None else own.finish()
        finally:
            self.leave(job)
        self.confirm(job, piece, num_bytes, digests, sender, found)

    def confirm(
        self, job: Job, piece: PieceRange, num_bytes: int, digests: bytes, sender: Incarnation, found: bytes | None
    ) -> None:
        """As `landed`, for a piece already digested in its blocks.

        Args:
            digests: the sender's.
            sender: its (engine, epoch).
            found: digests of the blocks' content; None: they are not compared.

        Raises:
            KVCorrupted: it is not what was sent; the transfer has failed.
        """
        incoming: Incoming = job.order
        if not self.enter(job):
            return
        try:
            if found is not None:
                tokens = range(piece.start, piece.stop)
                self.checksums.compare(found, digests, tokens, incoming.ticket.key, sender[0])
        except KVCorrupted:
            self.stop_jobs(lambda other: other is job, KVCorrupted.code)
            raise
        finally:
            self.leave(job)
        if incoming.arrived(piece, num_bytes):
            self.end_job(job, num_bytes=incoming.num_bytes)

    # --- orders ---------------------------------------------------------------------------------------------------

    def _receive(self, ticket: PushTicket, after: StepDone) -> None:
        try:
            incoming = Incoming(ticket, self.config.layout, after)
        except TransferError as error:
            self.refuse(ticket.key, "receive", error.code)
            return
        for job in self.submit(ticket.key, "receive", [Task(incoming, posted=True, timeout_s=RECEIVE_TIMEOUT_S)]):
            self.register(job, incoming)

    def _send(self, send: PushSend, after: StepDone) -> None:
        try:
            tasks = list(self._pieces(send, after))
        except PdkvError as error:
            self.refuse(send.key, "send", error.code, batch=send.batch)
            return
        jobs = self.submit(send.key, "send", tasks, batch=send.batch, last=False)
        if send.during_step:
            self._in_step += jobs

    def _begin_sending(self, num_layers: int) -> None:
        """Begin to send: the first layers of the step are in their blocks, or will be when the device is behind what it
        has been given so far.
        """
        ready: list[Job] = []
        while self._in_step and _last_layer(self._in_step[0]) <= num_layers:
            ready.append(self._in_step.popleft())
        for done in {id(job.order.after): job.order.after for job in ready}.values():
            done.record()
        if ready:
            self.start_jobs(ready)

    def _pieces(self, send: PushSend, after: StepDone) -> Iterable[Task]:
        """One job per rank of the receiver that takes something from this one, and per layer group.

        All jobs of a step exist from its beginning, so that its batch ends, and releases its blocks, with the last of
        them, whichever that is.
        """
        ticket = send.ticket
        card = self.peers.card(ticket.engine, ticket.epoch)
        if not ticket.may_have(send.source):
            raise TransferError("the ticket belongs to another transfer", key=send.key)
        layout, in_step = self.config.layout, send.during_step
        num_bytes = (send.stop - send.start) * layout.token_bytes
        parts = sender_parts(self.config.rank, self.config.tp, card.tp, layout.kv_heads_of_all_ranks)
        groups = layer_groups(layout.num_layers, num_bytes) if in_step else [range(layout.num_layers)]
        for layers in groups:
            after = make_step_done(self._device) if in_step else after
            for part in parts:
                lane = self.lane_of(card.engine, card.epoch, part.peer_rank)
                order = PushPiece(send, card, part, layers, after)
                yield Task(order, lane=lane, posted=in_step, timeout_s=STEP_TIMEOUT_S if in_step else None)


def _receiver(job: Job) -> tuple[str, str] | None:
    """The (engine, epoch) that a job sends to; None for a receive."""
    return (job.order.card.engine, job.order.card.epoch) if isinstance(job.order, PushPiece) else None
