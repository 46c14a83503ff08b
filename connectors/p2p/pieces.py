"""How a piece travels over a group: as few, large messages, straight from block to block or by way of buffers.

Runs of blocks that are adjacent on both sides, and large, go as they lie. All else is gathered into a buffer here and
scattered out of one there: whole blocks where both ends have the same, else units (units.py). Both ends derive the
same messages from the offer.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdkv.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.p2p.wire import Offer
from pdkv.connectors.step_done import ON_HOST
from pdkv.connectors.transfer.block_copy import STAGING_BYTES, Bytes, copy_blocks
from pdkv.connectors.transfer.planning import Ids, as_ids, blocks_of, split_runs, unit_index
from pdkv.connectors.transfer.units import UnitPart, UnitPool
from pdkv.errors import TransferError
from pdkv.wire.messages import KVLayout

if TYPE_CHECKING:
    import torch

DIRECT_BYTES = 256 * 1024
"""Smaller runs are gathered: a message costs as much as copying so many bytes."""

MESSAGE_BYTES = 4 * 1024 * 1024
"""Of a message that goes as it lies; between two of them a cancel and the deadline are seen."""

BUFFER_BYTES = 2 * 1024 * 1024
NUM_BUFFERS = 4
"""Of gathered messages. Gloo has the receiver ask for each: with less under way the connection runs dry meanwhile."""

MAX_MESSAGES = 1 << 20


class Message(NamedTuple):
    """Blocks or units of a piece, numbered from the request's first one."""

    positions: Ids
    is_direct: bool


def plan_blocks(
    source: Sequence[int], target: Sequence[int] | Ids, first: int, block_bytes: int
) -> list[tuple[int, int]]:
    """The runs of an offer in whole blocks: (first block of the request, count) that need no buffer.

    Args:
        source, target: blocks here and there; both begin with block `first` of the request.
    """
    split = split_runs(source, target, -(-DIRECT_BYTES // block_bytes))
    longest = max(MESSAGE_BYTES // block_bytes, 1)
    return [
        (first + position + done, min(longest, run.num_blocks - done))
        for run, position in zip(split.runs, split.positions, strict=True)
        for done in range(0, run.num_blocks, longest)
    ]


def messages_of(offer: Offer, block_size: int) -> Iterator[Message]:
    """The messages of an offer, in order.

    Raises:
        TransferError: the offer contradicts itself.
    """
    wanted = blocks_of(offer.piece.start, offer.piece.stop, block_size)
    if offer.per_message < 1 or len(wanted) > MAX_MESSAGES * offer.per_message or len(offer.runs) > MAX_MESSAGES:
        raise TransferError(f"an offer of {len(wanted)} blocks in messages of {offer.per_message}")
    rest = np.ones(len(wanted), dtype=np.bool_)
    for first, count in offer.runs:
        if count < 1 or first < wanted.start or first + count > wanted.stop:
            raise TransferError(f"a run of {count} blocks from {first}, in an offer of {wanted}")
        run = slice(first - wanted.start, first - wanted.start + count)
        if not rest[run].all():
            raise TransferError(f"a run of {count} blocks from {first} is offered twice")
        rest[run] = False
        yield Message(as_ids(range(first, first + count)), True)
    positions = (np.flatnonzero(rest) + wanted.start).astype(np.int64)
    for begin in range(0, positions.size, offer.per_message):
        yield Message(positions[begin : begin + offer.per_message], False)


class PieceBuffers:
    """One thread's buffers, used in turn. Host memory for Gloo, device memory for NCCL."""

    def __init__(self, num_bytes: int, device: "torch.device") -> None:
        import torch

        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        self._turn = 0
        self.staging = np.empty(STAGING_BYTES, dtype=np.uint8)

    def next(self, num_bytes: int) -> "torch.Tensor":
        """The buffer that was returned longest ago, (num_bytes,).

        Raises:
            TransferError: it is not so large; a receive that is smaller than its message would end the process.
        """
        if num_bytes > self._buffers[0].numel():
            raise TransferError(f"a message of {num_bytes} bytes, in buffers of {self._buffers[0].numel()}")
        self._turn = (self._turn + 1) % NUM_BUFFERS
        return self._buffers[self._turn][:num_bytes]


class PiecePool:
    """A rank's KV pool, out of which and into which messages go. Threads may share it.

    Args:
        kv_cache: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_size), contiguous.
    """

    def __init__(self, kv_cache: "torch.Tensor", layout: KVLayout) -> None:
        import torch

        self.layout = layout
        self.device = kv_cache.device
        self._flat = kv_cache.view(-1).view(torch.uint8)
        self._blocks = self._flat.view(len(kv_cache), -1)
        self._units = UnitPool(kv_cache)
        self._rows: Bytes | None = self._blocks.numpy() if kv_cache.device.type == "cpu" else None

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self._blocks)

    def buffers(self) -> PieceBuffers:
        """Buffers for one thread."""
        unit = self._units.unit_bytes(self._units.whole)
        return PieceBuffers(max(BUFFER_BYTES, self.layout.block_bytes, unit), self.device)

    def direct(self, block_ids: Ids) -> "torch.Tensor":
        """Adjacent blocks as they lie, flat.

        Raises:
            TransferError: they are not adjacent.
        """
        first, count = int(block_ids[0]), int(block_ids.size)
        if (block_ids != np.arange(first, first + count)).any():
            raise TransferError("blocks that are not adjacent cannot go in one piece")
        return self._blocks[first : first + count].view(-1)

    def message_bytes(self, count: int, part: UnitPart | None) -> int:
        """Bytes of a gathered message of `count` units, or, without a part, of whole blocks."""
        return count * (self.layout.block_bytes if part is None else self._units.unit_bytes(part))

    def gather(self, ids: Ids, part: UnitPart | None, buffers: PieceBuffers) -> "torch.Tensor":
        """Copy units, or whole blocks, into the next buffer."""
        image = buffers.next(self.message_bytes(ids.size, part))
        if part is not None:
            self._gather_units(ids, part, image)
        elif self._rows is not None:
            target = image.numpy().reshape(ids.size, -1)
            copy_blocks(self._rows, target, ids, np.arange(ids.size, dtype=np.int64), buffers.staging)
        else:
            self._gather_rows(self._blocks, ids, image)
        return image

    def scatter(self, ids: Ids, part: UnitPart | None, image: "torch.Tensor", buffers: PieceBuffers) -> None:
        """The inverse of `gather`."""
        if part is not None:
            self._scatter_units(ids, part, image)
        elif self._rows is not None:
            source = image.numpy().reshape(ids.size, -1)
            copy_blocks(source, self._rows, np.arange(ids.size, dtype=np.int64), ids, buffers.staging)
        else:
            self._scatter_rows(self._blocks, ids, image)

    def _gather_units(self, units: Ids, part: UnitPart, image: "torch.Tensor") -> None:
        if self._rows is not None:
            self._units.gather(units, part, image.numpy(), after=ON_HOST, timeout_s=0.0)  # run_job has waited
            return
        row_bytes, row_ids = self._units.row_ids(units, part)
        self._gather_rows(self._flat.view(-1, row_bytes), row_ids, image)

    def _scatter_units(self, units: Ids, part: UnitPart, image: "torch.Tensor") -> None:
        if self._rows is not None:
            self._units.scatter(units, part, image.numpy())
            return
        row_bytes, row_ids = self._units.row_ids(units, part)
        self._scatter_rows(self._flat.view(-1, row_bytes), row_ids, image)

    def _gather_rows(self, rows: "torch.Tensor", ids: Ids, image: "torch.Tensor") -> None:
        import torch

        torch.index_select(rows, 0, torch.from_numpy(ids).to(self.device), out=image.view(ids.size, -1))

    def _scatter_rows(self, rows: "torch.Tensor", ids: Ids, image: "torch.Tensor") -> None:
        import torch

        rows.index_copy_(0, torch.from_numpy(ids).to(self.device), image.view(ids.size, -1))


def piece_ids(
    block_ids: Sequence[int] | Ids, block_size: int, start: int, stop: int, *, table_start: int, in_units: bool
) -> Ids:
    """The blocks or units of tokens [start, stop) in a pool; the messages' positions count from the first of them.

    Args:
        block_ids: the first one holds token `table_start`.

    Raises:
        TransferError: units of a range that does not begin with one, or blocks that are not there.
    """
    origin = table_start // block_size * block_size
    if start % (HASH_BLOCK_SIZE if in_units else block_size) or stop > origin + len(block_ids) * block_size:
        raise TransferError(f"tokens [{start}, {stop}) are not in {len(block_ids)} blocks from token {origin} on")
    if in_units:
        return unit_index(block_ids, block_size, start - origin, stop - origin)
    wanted = blocks_of(start - origin, stop - origin, block_size)
    return as_ids(block_ids)[wanted.start : wanted.stop]
