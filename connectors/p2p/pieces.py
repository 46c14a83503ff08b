"""The parts of a rank's pool that make up a piece, as rows for the sockets; KV on a GPU goes through a pinned buffer.

A piece is sent as whole blocks if both ends have equal blocks in host memory, else as units (units.py). In both
forms it is a fixed sequence of bytes: each end cuts it into the rows of its own pool.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.p2p.sockets import NO_PIPE, Connection, Rows, stream_rows
from pdkv.connectors.p2p.wire import Offer
from pdkv.connectors.peer.push_worker import Incoming, PushPiece, piece_ids, range_of
from pdkv.connectors.step_done import ON_HOST
from pdkv.connectors.transfer.digest import PieceDigests
from pdkv.connectors.transfer.planning import Bytes, Ids, run_starts
from pdkv.connectors.transfer.units import UnitPart, UnitPool
from pdkv.errors import TransferError
from pdkv.kernels import stream
from pdkv.kernels.streams import streams_of
from pdkv.wire.kv import KVLayout

if TYPE_CHECKING:
    import torch

BATCH_BYTES = 1 << 20
"""Bytes moved by one call: between two of them a cancel and the deadline are noticed."""

STEP_BYTES = 256 << 10
"""Bytes digested at a time, while they are in the cache."""

WINDOW_BYTES = 64 << 20
"""Bytes moved by one call of the compiled kernel, which knows the cancel and the deadline itself."""

STAGED_BYTES = 4 << 20
"""Bytes moved by one call through a staging buffer."""

SPLICED_ROW_BYTES = 4 << 10
"""Average row size, in bytes, from which on rows are sent without a copy; smaller ones cost more than that each."""

LARGE_ROW_BYTES = 32 * 1024
"""Smaller rows are digested from a copy: one call instead of one for each."""


class MovePlan(NamedTuple):
    """A piece and its rows in this rank's pool."""

    offer: Offer
    ids: Ids  # blocks or units, in transfer order
    part: UnitPart | None  # None: whole blocks

    def over_sockets(self, count: int) -> "MovePlan":
        """The same plan over this many sockets."""
        return self._replace(offer=msgspec.structs.replace(self.offer, num_sockets=count))

    def batches(self) -> Iterator[Ids]:
        """The batches, one call each."""
        count = self.offer.per_batch
        for first in range(0, self.ids.size, count):
            yield self.ids[first : first + count]


class PiecePool:
    """A rank's KV pool. Threads may share it.

    Args:
        kv_cache: (num_blocks, num_layers, sides, num_kv_heads, block_size, head_size), contiguous.
    """

    def __init__(self, kv_cache: "torch.Tensor", layout: KVLayout) -> None:
        self.layout = layout
        self.units = UnitPool(kv_cache)
        self.units.compile_kernels()
        self.device = kv_cache.device
        self.on_host = self.units.on_cpu
        self._num_blocks = len(kv_cache)
        self._flat = self.units.flat

    def unit_bytes(self, part: UnitPart | None) -> int:
        """Bytes of one unit's part, or without a unit, of a block."""
        return self.layout.block_bytes if part is None else self.units.unit_bytes(part)

    def make_buffer(self) -> Bytes | None:
        """The buffer of one end of a link: pinned memory for KV on a GPU."""
        if self.on_host:
            return None
        size = max(STAGED_BYTES, self.units.unit_bytes(self.units.whole))
        buffer: Bytes = streams_of(self.device).make_pinned(size).numpy()
        return buffer

    def outgoing(self, ids: Ids, part: UnitPart | None, buffer: Bytes | None) -> Rows:
        """Memory from which the KV of some blocks or units is read."""
        if buffer is None or part is None:
            return self._memory(ids, part)
        image = self._image(ids, part, buffer)
        self.units.gather(ids, part, image, after=ON_HOST, timeout_s=0.0)  # run_job has waited
        return [image.data]

    def incoming(self, ids: Ids, part: UnitPart | None, buffer: Bytes | None) -> Rows:
        """Memory into which the KV of some blocks or units is written; `landed` must follow."""
        if buffer is None or part is None:
            return self._memory(ids, part)
        return [self._image(ids, part, buffer).data]

    def landed(self, ids: Ids, part: UnitPart | None, buffer: Bytes | None) -> None:
        """Bring arrived data into the pool, if it is not there yet."""
        if buffer is not None and part is not None:
            self.units.scatter(ids, part, self._image(ids, part, buffer))

    @property
    def can_stream(self) -> bool:
        """Whether the compiled kernel can move pieces."""
        return self.on_host and stream.available()

    def stream(
        self,
        plan: MovePlan,
        sockets: Sequence[Connection],
        digests: PieceDigests | None,
        way: Literal["send", "receive"],
        remaining_s: Callable[[], float],
    ) -> None:
        """Send or receive the whole piece by the compiled kernel, with its digests. Raises a TransferError."""
        assert self._flat is not None
        size, per_batch = self.unit_bytes(plan.part), plan.offer.per_batch
        window = max(WINDOW_BYTES // (2 * per_batch * size), 1) * 2 * per_batch
        per_step, slices = max(STEP_BYTES // size, 1), self._slices(plan.part)
        if len(sockets) == 1:
            per_batch = window
        elif per_batch % per_step:
            per_step = per_batch
        per_id = self.layout.block_size // HASH_BLOCK_SIZE if plan.part is None else 1
        args = stream.StreamArgs(base=self._flat.ctypes.data, sends=way == "send", num_fds=len(sockets), slices=slices)
        args.batch_bytes = per_batch * size
        args.step_bytes = args.batch_bytes if digests is None else per_step * size // slices
        for first in range(0, plan.ids.size, window):
            ids = plan.ids[first : first + window]
            rows = self._row_table(ids, plan.part)
            args.rows, args.num_rows, args.num_bytes = rows.ctypes.data, len(rows), ids.size * size
            splices = args.sends and args.num_bytes >= len(rows) * SPLICED_ROW_BYTES
            args.pipe[:] = sockets[0].pipe() if splices else NO_PIPE
            if digests is not None:
                digests.fill(args, first * per_id, ids.size * per_id, per_step * per_id)
            stream_rows(args, sockets, remaining_s())

    def digest(self, add: Callable[[memoryview], None], ids: Ids, part: UnitPart | None, buffer: Bytes | None) -> None:
        """Pass the bytes of some blocks or units to `add`, in transfer order."""
        if buffer is not None and part is not None:
            add(self._image(ids, part, buffer).data)
            return
        assert self._flat is not None
        row_bytes, rows = self._rows(ids, part)
        table = self._flat.reshape(-1, row_bytes)
        if row_bytes < LARGE_ROW_BYTES:
            add(np.take(table, rows, axis=0, mode="clip").data)
        else:
            for row in rows.tolist():
                add(table[row].data)

    def _slices(self, part: UnitPart | None) -> int:
        """The number of equal parts, of whole layers or K or V of one, into which a block or unit is cut to be
        digested.
        """
        size, layout = self.unit_bytes(part), self.layout
        outer = layout.sides * (layout.num_layers if part is None else part.num_layers)
        return next((n for n in range(1, outer) if outer % n == 0 and size <= n * STEP_BYTES), outer)

    def _rows(self, ids: Ids, part: UnitPart | None) -> tuple[int, Ids]:
        """(bytes of a row, numbers of the rows). Raises TransferError for rows outside of the pool."""
        most = self._num_blocks if part is None else self.units.num_units
        if ids.size and not 0 <= ids.min() <= ids.max() < most:
            raise TransferError(f"blocks or units {ids.min()} to {ids.max()} are not in a pool of {most}")
        return (self.layout.block_bytes, ids) if part is None else self.units.row_ids(ids, part)

    def _row_table(self, ids: Ids, part: UnitPart | None) -> Ids:
        """Rows in transfer order, adjacent ones merged: (n, 2), offset in the pool and length."""
        row_bytes, rows = self._rows(ids, part)
        starts = run_starts(rows)
        return np.stack((rows[starts] * row_bytes, np.diff(starts, append=rows.size) * row_bytes), axis=1)

    def _memory(self, ids: Ids, part: UnitPart | None) -> Rows:
        assert self._flat is not None, "KV on a GPU needs a buffer"
        pool = self._flat.data
        return [pool[first : first + size] for first, size in self._row_table(ids, part).tolist()]

    def _image(self, ids: Ids, part: UnitPart, buffer: Bytes) -> Bytes:
        size = ids.size * self.units.unit_bytes(part)
        if size > buffer.size:
            raise TransferError(f"{size} bytes at a time do not fit into a buffer of {buffer.size}")
        return buffer[:size]


def plan_sending(piece: PushPiece, pool: PiecePool, timeout_s: float, *, in_blocks: bool) -> MovePlan:
    """Plan a piece to send: whole blocks if both sides have the same ones, else units.

    Args:
        in_blocks: the receiver accepts whole blocks.

    Raises:
        TransferError: the ticket or the order contradicts itself.
    """
    send, heads, own, theirs = piece.send, piece.heads, pool.layout, piece.card.layout
    whole = own.block_size == theirs.block_size and own.num_kv_heads == theirs.num_kv_heads == heads.num_heads
    whole = whole and len(piece.layers) == own.num_layers  # else a block is not one piece of memory
    part = None if whole and in_blocks and pool.on_host else piece.part
    ids = piece_ids(
        send.block_ids, own.block_size, send.start, send.stop, table_start=send.start, in_units=part is not None
    )
    size = pool.unit_bytes(part)
    offer = Offer(
        transfer_id=send.ticket.transfer_id,
        attempt=send.ticket.attempt,
        piece=range_of(piece),
        form="blocks" if part is None else "units",
        num_bytes=ids.size * size,
        per_batch=max((BATCH_BYTES if in_blocks and pool.on_host else STAGED_BYTES) // size, 1),
        timeout_s=timeout_s,
    )
    return MovePlan(offer, ids, part)


def plan_receiving(offer: Offer, incoming: Incoming, pool: PiecePool) -> MovePlan:
    """Plan the destination of an offer's bytes.

    Raises:
        TransferError: they are not wanted here, or not in that form, or the offer contradicts itself.
    """
    piece, layout = offer.piece, pool.layout
    incoming.check_range(piece)
    in_units = offer.form == "units"
    whole = pool.on_host and (piece.num_heads, piece.num_layers) == (layout.num_kv_heads, layout.num_layers)
    if not in_units and not whole:
        raise TransferError(f"{piece} cannot be received as whole blocks")
    start, size = incoming.ticket.start, layout.block_size
    ids = piece_ids(incoming.block_ids, size, piece.start, piece.stop, table_start=start, in_units=in_units)
    part = piece.part if in_units else None
    unit_bytes = pool.unit_bytes(part)
    num_bytes, most = ids.size * unit_bytes, max(WINDOW_BYTES // unit_bytes, 1)
    if offer.num_bytes != num_bytes or not 1 <= offer.per_batch <= most:
        raise TransferError(
            f"{piece} has {num_bytes} bytes here, but {offer.num_bytes} in batches of {offer.per_batch} are offered"
        )
    return MovePlan(offer, ids, part)
