"""A piece as messages between a pool and a group: planned on either side, sent, received.

Many messages are under way at a time, so that neither end of the group ever waits for this thread; of gathered ones
as many as there are buffers: while some travel, the next is gathered, or the last one scattered.
"""

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from pdkv.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.p2p_group import Group
from pdkv.connectors.p2p_pieces import (
    BUFFER_BYTES,
    MIN_BUFFER_BYTES,
    NUM_BUFFERS,
    Message,
    PieceBuffers,
    PiecePool,
    messages_of,
    piece_ids,
    plan_blocks,
)
from pdkv.connectors.p2p_wire import Offer
from pdkv.connectors.planning import Ids
from pdkv.connectors.push import Incoming, PieceRange, PushPiece, range_of
from pdkv.connectors.transfer_worker import Job
from pdkv.connectors.units import UnitPart
from pdkv.errors import TransferCancelled, TransferError
from pdkv.messages import KVLayout

if TYPE_CHECKING:
    import torch

MAX_POSTED = 256
"""Gloo asks the receiver about each message: where few are posted, the connection runs dry meanwhile."""

MIN_MESSAGES = 8
"""Of a piece that is gathered, where that leaves them MIN_BUFFER_BYTES: else nothing overlaps."""


class MovePlan(NamedTuple):
    """A piece as messages of the own pool."""

    offer: Offer
    ids: Ids  # blocks or units; the first one is number `first` of the request
    first: int
    part: UnitPart | None  # None: whole blocks
    unit_tokens: int  # of what the offer's positions count


def plan_sending(piece: PushPiece, pool: PiecePool, timeout_s: float) -> MovePlan:
    """Whole blocks where both sides have the same ones, else units.

    Raises:
        TransferError: the ticket or the order contradicts itself.
    """
    send, heads, own, theirs = piece.send, piece.heads, pool.layout, piece.card.layout
    layers, wanted = piece.layers, range_of(piece)
    whole = own.block_size == theirs.block_size and own.num_kv_heads == theirs.num_kv_heads == heads.num_heads
    whole = whole and len(layers) == own.num_layers  # else a block is no piece of memory
    part = None if whole else UnitPart(heads.first, heads.first + heads.num_heads, layers.start, layers.stop)
    ids = piece_ids(send.block_ids, own.block_size, send.start, send.stop, table_start=send.start, in_units=not whole)
    runs: list[tuple[int, int]] = []
    if whole:
        first = send.start // own.block_size
        table = send.ticket.block_ids(theirs.block_size)
        skipped = first - send.ticket.start // theirs.block_size
        runs = plan_blocks(send.block_ids, table[skipped : skipped + len(send.block_ids)], first, own.block_bytes)
    offer = Offer(
        transfer_id=send.key[0],
        attempt=send.key[1],
        **wanted._asdict(),
        form="blocks" if whole else "units",
        runs=runs,
        per_message=_per_message(ids.size - sum(count for _, count in runs), pool.message_bytes(1, part)),
        timeout_s=timeout_s,
    )
    return _plan(offer, ids, part, own)


def plan_receiving(offer: Offer, incoming: Incoming, layout: KVLayout) -> MovePlan:
    """Where the messages of an offer go.

    Raises:
        TransferError: they are not wanted here, or not in that form.
    """
    piece = offered(offer)
    incoming.check_range(piece)
    in_units = offer.form == "units"
    if not in_units and (offer.num_heads, offer.num_layers) != (layout.num_kv_heads, layout.num_layers):
        raise TransferError(f"{piece} cannot be whole blocks here")
    first_layer, first_head = offer.first_layer, offer.first_head
    part = UnitPart(first_head, first_head + offer.num_heads, first_layer, first_layer + offer.num_layers)
    start = incoming.ticket.start
    size = layout.block_size
    ids = piece_ids(incoming.block_ids, size, offer.start, offer.stop, table_start=start, in_units=in_units)
    return _plan(offer, ids, part if in_units else None, layout)


def _per_message(count: int, unit_bytes: int) -> int:
    """Blocks or units of a gathered message, of `count` in all."""
    num_bytes = min(BUFFER_BYTES, max(count * unit_bytes // MIN_MESSAGES, MIN_BUFFER_BYTES))
    return max(num_bytes // unit_bytes, 1)


def offered(offer: Offer) -> PieceRange:
    """What an offer brings."""
    return PieceRange(offer.first_layer, offer.num_layers, offer.first_head, offer.num_heads, offer.start, offer.stop)


def _plan(offer: Offer, ids: Ids, part: UnitPart | None, layout: KVLayout) -> MovePlan:
    unit_tokens = layout.block_size if part is None else HASH_BLOCK_SIZE
    return MovePlan(offer, ids, offer.start // unit_tokens, part, unit_tokens)


def send_messages(job: Job, plan: MovePlan, pool: PiecePool, group: Group, buffers: PieceBuffers) -> int:
    """Send a piece whose offer was accepted; returns the bytes.

    Raises:
        TransferError: close the group; the receiver waits for what will not come.
    """
    num_bytes = 0
    posted = _Posted()
    for message in messages_of(plan.offer, plan.unit_tokens):
        while posted.is_full(message):
            group.wait(job.remaining_s())
            posted.pop()
        job.check()
        ids = plan.ids[message.positions - plan.first]
        tensor = pool.direct(ids) if message.is_direct else pool.gather(ids, plan.part, buffers)
        group.send(tensor)
        num_bytes += tensor.numel()
        posted.append(message, ids, tensor)
    while group.num_posted:
        group.wait(job.remaining_s())
    return num_bytes


def receive_messages(
    job: Job, plan: MovePlan, pool: PiecePool, group: Group, buffers: PieceBuffers, timeout_s: float
) -> int:
    """Receive a piece whose offer was accepted; returns the bytes.

    Raises:
        TransferError: close the group; what is posted on it may still land until then.
    """
    deadline = time.monotonic() + timeout_s
    num_bytes = 0
    posted = _Posted()

    def land() -> None:
        group.wait(max(deadline - time.monotonic(), 1e-3))
        message, ids, image = posted.pop()
        if not message.is_direct:
            pool.scatter(ids, plan.part, image, buffers)

    for message in messages_of(plan.offer, plan.unit_tokens):
        while posted.is_full(message):
            land()
        if job.stop_code:
            raise TransferCancelled("the receiver gave the transfer up")
        ids = plan.ids[message.positions - plan.first]
        tensor = pool.direct(ids) if message.is_direct else buffers.next(pool.message_bytes(ids.size, plan.part))
        group.receive(tensor)
        num_bytes += tensor.numel()
        posted.append(message, ids, tensor)
    while group.num_posted:
        land()
    return num_bytes


class _Posted:
    """Messages under way, oldest first."""

    def __init__(self) -> None:
        self._messages: deque[tuple[Message, Ids, torch.Tensor]] = deque()
        self._num_buffered = 0

    def append(self, message: Message, ids: Ids, tensor: "torch.Tensor") -> None:
        """One more: its blocks or units here, and what is sent or received."""
        self._messages.append((message, ids, tensor))
        self._num_buffered += not message.is_direct

    def pop(self) -> tuple[Message, Ids, "torch.Tensor"]:
        """The oldest one is through."""
        oldest = self._messages.popleft()
        self._num_buffered -= not oldest[0].is_direct
        return oldest

    def is_full(self, message: Message) -> bool:
        """Whether `message` has to wait for the oldest one."""
        is_buffered = not message.is_direct and self._num_buffered == NUM_BUFFERS
        return is_buffered or len(self._messages) == MAX_POSTED
