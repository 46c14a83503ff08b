"""Copies units out of a rank's KV pool and into it: KV in a form that does not depend on block size or number of ranks.

A unit is one hash block's tokens. Its image has shape (layers, sides, heads, HASH_BLOCK_SIZE, head_size) of the
requested layers and heads; a buffer holds images one after the other.
"""

import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.step_done import ON_HOST, StepDone
from pdkv.connectors.transfer.planning import Bytes, Ids, as_ids
from pdkv.errors import TransferTimeout
from pdkv.kernels.streams import Event, Stream, streams_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_MAX_PARTS = 256
"""The most parts for which a pool remembers the rows."""

LEAST_PLACE_BYTES = 32 << 10
"""Smaller pieces are not read one by one into their places: with 16 KiB, that takes as long as copying all of them."""

COPY_TIMEOUT_S = 30.0
"""Seconds after which a device copy that waits for nothing shows that the device hangs."""


class UnitPart(NamedTuple):
    """A part of a unit: heads in this rank's numbering, and layers."""

    head_start: int
    head_stop: int
    layer_start: int
    layer_stop: int

    @property
    def heads(self) -> tuple[int, int]:
        """The range [start, stop) of heads."""
        return self.head_start, self.head_stop

    @property
    def layers(self) -> tuple[int, int]:
        """The range [start, stop) of layers."""
        return self.layer_start, self.layer_stop

    @property
    def num_heads(self) -> int:
        """KV heads in the part."""
        return self.head_stop - self.head_start

    @property
    def num_layers(self) -> int:
        """Layers in the part."""
        return self.layer_stop - self.layer_start


class _Rows(NamedTuple):
    """A part of a unit as rows of the pool: row = block * rows_per_block + position in the block + offset."""

    row_bytes: int
    rows_per_block: int
    offsets: Ids  # offsets of one unit's rows, in the order of its image


class UnitPool:
    """A KV pool seen as units; unit = block * units_per_block + position in the block. Threads may share it.

    Args:
        kv_cache: (num_blocks, num_layers, sides, num_kv_heads, block_size, head_size), contiguous, on the CPU or a GPU.

    Raises:
        ValueError: another shape, or a block size that is not a multiple of HASH_BLOCK_SIZE.
    """

    def __init__(self, kv_cache: "torch.Tensor") -> None:
        if kv_cache.dim() != 6 or kv_cache.shape[2] > 2 or kv_cache.shape[4] % HASH_BLOCK_SIZE:
            raise ValueError(f"a pool of whole units was expected, got {tuple(kv_cache.shape)}")
        if not kv_cache.is_contiguous():
            raise ValueError("the pool must be contiguous")
        self.kv_cache = kv_cache
        num_blocks, self.num_layers, self._sides, self.num_heads, block_size, head_size = kv_cache.shape
        self.block_size = block_size
        self.units_per_block = block_size // HASH_BLOCK_SIZE
        self.num_units = num_blocks * self.units_per_block
        self.on_cpu = streams_of(kv_cache.device).is_host
        self._piece_bytes = HASH_BLOCK_SIZE * head_size * kv_cache.element_size()  # bytes of one layer, side and head
        self.flat: Bytes | None = _as_bytes(kv_cache) if self.on_cpu else None
        self._of_thread = threading.local()
        self._rows_of: dict[UnitPart, _Rows] = {}

    @property
    def whole(self) -> UnitPart:
        """All heads and layers of this rank."""
        return UnitPart(0, self.num_heads, 0, self.num_layers)

    def unit_bytes(self, part: UnitPart) -> int:
        """Bytes of the image of one unit."""
        return part.num_layers * self._sides * part.num_heads * self._piece_bytes

    def compile_kernels(self) -> None:
        """Compile a device's kernels now, on an unused block, so that no transfer waits for that."""
        if self.on_cpu:
            return
        import torch

        twin, unit = UnitPool(torch.zeros_like(self.kv_cache[:1])), as_ids([0])
        image: Bytes = streams_of(self.kv_cache.device).make_pinned(twin.unit_bytes(twin.whole)).numpy()
        twin.gather(unit, twin.whole, image, after=ON_HOST, timeout_s=0.0)
        twin.scatter(unit, twin.whole, image)

    def cut(self, units: Ids, part: UnitPart, max_bytes: int) -> Iterator[Ids]:
        """Pieces of `units`, in order, with images of at most `max_bytes` each; a larger unit is a piece of its own.

        Raises:
            ValueError: a part that the pool does not have, when the first piece is asked for.
        """
        self._check_part(part)
        count = max(max_bytes // self.unit_bytes(part), 1)
        for first in range(0, units.size, count):
            yield units[first : first + count]

    def gather(self, units: Ids, part: UnitPart, out: Bytes, *, after: StepDone, timeout_s: float) -> None:
        """Copy units out of the pool.

        Args:
            out: (len(units) * unit_bytes(part),), contiguous, pinned if the pool is on a device; written.
            after: the last step that wrote the units.
            timeout_s: limit for that step.

        Raises:
            ValueError: a unit or a part that the pool does not have, or a buffer of another size.
            TransferTimeout: the step does not end; nothing is written.
        """
        self._check(units, part, out)
        if self.flat is None:
            self._gather_from_device(units, part, out, after, timeout_s)
            return
        after.wait(timeout_s)
        rows = self._rows(part)
        # One call that releases the GIL, whatever the order of the blocks.
        pool, image = self.flat.reshape(-1, rows.row_bytes), out.reshape(-1, rows.row_bytes)
        np.take(pool, self._row_ids(units, rows), axis=0, out=image, mode="clip")

    def scatter(self, units: Ids, part: UnitPart, source: Bytes) -> None:
        """Copy images of units into the pool, the inverse of `gather`, and return when that is done.

        The steps of these blocks' previous owners are over: the caller has waited for them.

        Args:
            units: all different.
            source: pinned if the pool is on a device.

        Raises:
            ValueError: as `gather`.
        """
        self._check(units, part, source)
        if self.flat is None:
            self._scatter_to_device(units, part, source)
            return
        rows = self._rows(part)
        self.flat.reshape(-1, rows.row_bytes)[self._row_ids(units, rows)] = source.reshape(-1, rows.row_bytes)

    def places(self, units: Ids, part: UnitPart) -> list[memoryview] | None:
        """Views of the units' images in the pool, in order; data written there is in the pool. None: the pool is on a
        device, or the pieces are smaller than LEAST_PLACE_BYTES.

        Raises:
            ValueError: a unit or a part that the pool does not have.
        """
        self._check_units(units, part)
        if self.flat is None or (rows := self._rows(part)).row_bytes < LEAST_PLACE_BYTES:
            return None
        pool = memoryview(self.flat.data)
        return [pool[row * rows.row_bytes : (row + 1) * rows.row_bytes] for row in self._row_ids(units, rows).tolist()]

    def gather_images(
        self, units: Ids, part: UnitPart, after: StepDone = ON_HOST, timeout_s: float = 0.0
    ) -> "torch.Tensor":
        """Queue a copy of units out of a pool on a device, on the current stream and after `after`.

        Returns:
            (units, layers, sides, heads, HASH_BLOCK_SIZE, head_size), on the device.

        Raises:
            TransferTimeout: that step's kernels were not even queued within that time.
        """
        from pdkv.kernels.kv_copy import copy_units
        from pdkv.kernels.upload import to_tensor

        unit_ids = to_tensor(units, self.kv_cache.device)
        after.wait_on_stream(timeout_s)
        images = self.new_images(units, part)
        copy_units(self.kv_cache, unit_ids, images, part.layers, part.heads, to_pool=False)
        return images

    def new_images(self, units: Ids, part: UnitPart) -> "torch.Tensor":
        """Memory for the result of `gather_images`, allocated on the current stream."""
        import torch

        return torch.empty(self._image_shape(units, part), dtype=self.kv_cache.dtype, device=self.kv_cache.device)

    def scatter_images(self, units: Ids, images: "torch.Tensor", part: UnitPart) -> None:
        """Queue a copy of such images into a pool on a device, on the current stream."""
        from pdkv.kernels.kv_copy import copy_units
        from pdkv.kernels.upload import to_tensor

        unit_ids = to_tensor(units, self.kv_cache.device)
        copy_units(self.kv_cache, unit_ids, images, part.layers, part.heads, to_pool=True)

    def row_ids(self, units: Ids, part: UnitPart) -> tuple[int, Ids]:
        """A part of units as rows of the flat pool: (bytes of a row, numbers of the rows in the images' order)."""
        rows = self._rows(part)
        return rows.row_bytes, self._row_ids(units, rows)

    # --- rows of the pool -----------------------------------------------------------------------------------------

    def _check_part(self, part: UnitPart) -> None:
        if not (
            0 <= part.head_start < part.head_stop <= self.num_heads
            and 0 <= part.layer_start < part.layer_stop <= self.num_layers
        ):
            raise ValueError(f"{part} does not fit {self.num_heads} heads and {self.num_layers} layers")

    def _check_units(self, units: Ids, part: UnitPart) -> None:
        self._check_part(part)
        if units.size and not 0 <= units.min() <= units.max() < self.num_units:
            raise ValueError(f"units {units.min()} to {units.max()} do not exist: the pool has {self.num_units}")

    def _check(self, units: Ids, part: UnitPart, buffer: Bytes) -> None:
        self._check_units(units, part)
        if buffer.size != units.size * self.unit_bytes(part):
            raise ValueError(
                f"{units.size} units of {self.unit_bytes(part)} bytes do not match a buffer of {buffer.size}"
            )

    def _rows(self, part: UnitPart) -> _Rows:
        rows = self._rows_of.get(part)
        if rows is None:
            if len(self._rows_of) >= _MAX_PARTS:
                self._rows_of.clear()
            rows = self._rows_of[part] = self._make_rows(part)
        return rows

    def _make_rows(self, part: UnitPart) -> _Rows:
        """The longest rows of equal size that the part consists of."""
        per_block, heads, sides = self.units_per_block, self.num_heads, self._sides
        pieces_per_block = self.num_layers * sides * heads * per_block
        merged = 1  # adjacent pieces
        if per_block == 1:
            if part == self.whole:
                merged = pieces_per_block
            elif part.num_heads == heads:
                merged = sides * heads
            elif heads % part.num_heads == 0 and part.head_start % part.num_heads == 0:
                merged = part.num_heads
        layers = np.arange(part.layer_start, part.layer_stop, dtype=np.int64)[:, None, None]
        head_ids = np.arange(part.head_start, part.head_stop, dtype=np.int64)[None, None, :]
        pieces = ((layers * sides + np.arange(sides)[None, :, None]) * heads + head_ids).ravel() * per_block
        return _Rows(merged * self._piece_bytes, pieces_per_block // merged, pieces[::merged] // merged)

    def _row_ids(self, units: Ids, rows: _Rows) -> Ids:
        blocks, positions = np.divmod(units, self.units_per_block)
        first = blocks * rows.rows_per_block + positions
        ids: Ids = (first[:, None] + rows.offsets[None, :]).ravel()
        return ids

    # --- device memory --------------------------------------------------------------------------------------------

    def _gather_from_device(self, units: Ids, part: UnitPart, out: Bytes, after: StepDone, timeout_s: float) -> None:
        import torch

        copies = self._copies()
        with copies.stream.on():
            images = self.gather_images(units, part, after, timeout_s)
            after.wait(timeout_s)  # a caller that gives up must leave no copy behind that still writes `out`
            torch.from_numpy(out).copy_(images.view(-1).view(torch.uint8), non_blocking=True)
            copies.done.record()
        await_copy(copies.done)

    def _scatter_to_device(self, units: Ids, part: UnitPart, source: Bytes) -> None:
        import torch

        copies = self._copies()
        with copies.stream.on():
            images = torch.from_numpy(source).to(self.kv_cache.device, non_blocking=True).view(self.kv_cache.dtype)
            self.scatter_images(units, images.view(self._image_shape(units, part)), part)
            copies.done.record()
        await_copy(copies.done)

    def _image_shape(self, units: Ids, part: UnitPart) -> tuple[int, ...]:
        return (units.size, part.num_layers, self._sides, part.num_heads, HASH_BLOCK_SIZE, self.kv_cache.shape[5])

    def _copies(self) -> "_Copies":
        """This thread's own stream: a copy waits only for kernels of the step that it follows."""
        if not hasattr(self._of_thread, "copies"):
            streams = streams_of(self.kv_cache.device)
            self._of_thread.copies = _Copies(streams.make_stream(), streams.make_event())
        copies: _Copies = self._of_thread.copies
        return copies


def await_copy(done: Event) -> None:
    """Wait until a copy has been made, however long that takes.

    Its memory must not be reused before that: a hung device may still write there when it resumes. So the thread, its
    buffer and its blocks stay with the copy; other waits for these have deadlines.
    """
    while True:
        try:
            done.synchronize(COPY_TIMEOUT_S)
            return
        except TransferTimeout:
            logger.error("a copy of KV has taken %g s: the device hangs; its memory is kept", COPY_TIMEOUT_S)


class _Copies(NamedTuple):
    """Objects with which one thread copies."""

    stream: Stream
    done: Event  # its last copy


def _as_bytes(tensor: "torch.Tensor") -> Bytes:
    """A flat view of a contiguous CPU tensor."""
    import torch

    flat: Bytes = tensor.view(-1).view(torch.uint8).numpy()
    return flat
