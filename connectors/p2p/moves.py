"""A piece as messages between a pool and a group: planned on either side, sent, received.

Several messages are under way at a time: while one travels, the next is gathered, or the last one scattered.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pdkv.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.p2p.group import Group
from pdkv.connectors.p2p.pieces import (
    BUFFER_BYTES,
    NUM_BUFFERS,
    Message,
    PieceBuffers,
    PiecePool,
    messages_of,
    piece_ids,
    plan_blocks,
)
from pdkv.connectors.p2p.wire import Offer
from pdkv.connectors.peer.push_worker import Incoming, PushPiece, range_of
from pdkv.connectors.transfer.planning import Ids
from pdkv.connectors.transfer.units import UnitPart
from pdkv.connectors.transfer.worker import Job
from pdkv.errors import TransferCancelled, TransferError
from pdkv.wire.messages import KVLayout

if TYPE_CHECKING:
    import torch

MAX_POSTED = 128
"""Gloo asks the receiver about each message: where few are posted, the connection runs dry meanwhile."""


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
    whole = own.block_size == theirs.block_size and own.num_kv_heads == theirs.num_kv_heads == heads.num_heads
    whole = whole and len(piece.layers) == own.num_layers  # else a block is no piece of memory
    part = None if whole else piece.part
    ids = piece_ids(send.block_ids, own.block_size, send.start, send.stop, table_start=send.start, in_units=not whole)
    runs: list[tuple[int, int]] = []
    if whole:
        first = send.start // own.block_size
        table = send.ticket.block_ids(theirs.block_size)
        skipped = first - send.ticket.start // theirs.block_size
        runs = plan_blocks(send.block_ids, table[skipped : skipped + len(send.block_ids)], first, own.block_bytes)
    offer = Offer(
        transfer_id=send.ticket.transfer_id,
        attempt=send.ticket.attempt,
        piece=range_of(piece),
        form="blocks" if whole else "units",
        runs=runs,
        per_message=max(BUFFER_BYTES // pool.message_bytes(1, part), 1),
        timeout_s=timeout_s,
    )
    return _plan(offer, ids, part, own)


def plan_receiving(offer: Offer, incoming: Incoming, layout: KVLayout) -> MovePlan:
    """Where the messages of an offer go.

    Raises:
        TransferError: they are not wanted here, or not in that form.
    """
    piece = offer.piece
    incoming.check_range(piece)
    in_units = offer.form == "units"
    if not in_units and (piece.num_heads, piece.num_layers) != (layout.num_kv_heads, layout.num_layers):
        raise TransferError(f"{piece} cannot be whole blocks here")
    start = incoming.ticket.start
    size = layout.block_size
    ids = piece_ids(incoming.block_ids, size, piece.start, piece.stop, table_start=start, in_units=in_units)
    return _plan(offer, ids, piece.part if in_units else None, layout)


def _plan(offer: Offer, ids: Ids, part: UnitPart | None, layout: KVLayout) -> MovePlan:
    unit_tokens = layout.block_size if part is None else HASH_BLOCK_SIZE
    return MovePlan(offer, ids, offer.piece.start // unit_tokens, part, unit_tokens)


def send_messages(job: Job, plan: MovePlan, pool: PiecePool, group: Group, buffers: PieceBuffers) -> int:
    """Post all of a piece whose offer was accepted; returns the bytes. The last messages may still be under way.

    Raises:
        TransferError: close the group; the receiver waits for what will not come.
    """
    num_bytes = 0
    posted: deque[Message] = deque()
    for message in messages_of(plan.offer, plan.unit_tokens):
        while _is_full(posted, message):
            group.wait(job.remaining_s())
            posted.popleft()
        job.check()
        ids = plan.ids[message.positions - plan.first]
        tensor = pool.direct(ids) if message.is_direct else pool.gather(ids, plan.part, buffers)
        group.send(tensor)
        num_bytes += tensor.numel()
        posted.append(message)
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
    posted: deque[Message] = deque()
    images: deque[tuple[Ids, torch.Tensor]] = deque()  # of posted messages that are scattered when they are in

    def land() -> None:
        group.wait(max(deadline - time.monotonic(), 1e-3))
        if not posted.popleft().is_direct:
            ids, image = images.popleft()
            pool.scatter(ids, plan.part, image, buffers)

    for message in messages_of(plan.offer, plan.unit_tokens):
        while _is_full(posted, message):
            land()
        if job.stop_code:
            raise TransferCancelled("the receiver gave the transfer up")
        ids = plan.ids[message.positions - plan.first]
        tensor = pool.direct(ids) if message.is_direct else buffers.next(pool.message_bytes(ids.size, plan.part))
        group.receive(tensor)
        num_bytes += tensor.numel()
        posted.append(message)
        if not message.is_direct:
            images.append((ids, tensor))
    while posted:
        land()
    return num_bytes


def _is_full(posted: Sequence[Message], message: Message) -> bool:
    """Whether `message` has to wait for the oldest one that is posted."""
    num_buffered = sum(not other.is_direct for other in posted)
    return len(posted) == MAX_POSTED or (not message.is_direct and num_buffered == NUM_BUFFERS)
