"""The input of a step's kernels besides weights and KV, at fixed addresses in device memory.

A step is packed into pinned memory and copied to the device in one piece; nothing waits for the copy. Steps of equal
padded sizes find each of their tensors at the same address, as a captured graph requires.
"""

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pdkv.engine.worker.batch import IntArray, StepInputs
from pdkv.kernels.paged_attention import FEW_QUERIES
from pdkv.kernels.streams import Event, Streams, streams_of

_ALIGNMENT = 64
"""Alignment in bytes. Triton compiles another variant of a kernel for pointers and strides not divisible by 16."""

MOST_TOKENS, MOST_PROMPTS = 2048, 16
"""The largest padded step with prompts."""

_NO_SLOT = -1  # `write_kv` skips such rows


class Padding(NamedTuple):
    """The padded sizes of a step: first requests of few tokens, then prompts."""

    tokens: int
    decodes: int  # requests of few tokens, and all tokens of theirs
    prompts: int = 0
    rows: int | None = None  # for which the last layer returns attention; None: all

    @property
    def seqs(self) -> int:
        """All requests."""
        return self.decodes + self.prompts


class StepTensors(NamedTuple):
    """A step of n tokens in r requests, both with padding. Padding has no slot, and its requests have no queries."""

    token_ids: torch.Tensor  # (n,) int64
    positions: torch.Tensor  # (n,) int64
    slot_mapping: torch.Tensor  # (groups, n) int64, block * block_size + offset; negative: padding
    seq_lens: torch.Tensor  # (r,) int32
    cu_seqlens_q: torch.Tensor  # (r + 1,) int32
    block_tables: torch.Tensor  # (groups, r, blocks of the longest request) int32
    rows: torch.Tensor | None  # (m,) int64


def first_prompt(inputs: StepInputs) -> tuple[int, int]:
    """How many requests of few tokens, and tokens of theirs, a step begins with."""
    is_prompt = np.diff(inputs.cu_seqlens_q) > FEW_QUERIES
    first = int(is_prompt.argmax()) if is_prompt.any() else len(is_prompt)
    return first, int(inputs.cu_seqlens_q[first])


class _HostSlab(NamedTuple):
    """Pinned memory, and the event of the last copy from it."""

    memory: torch.Tensor  # (bytes,) uint8
    copied: Event


class HostSlabs:
    """Host memory to copy steps from. Memory that a device may still read is never given out: two slabs take turns, and
    there are more if a host is further ahead of its device.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._slabs = deque(self._make(0) for _ in range(2))  # least recently used first

    def __len__(self) -> int:
        return len(self._slabs)

    def take(self, num_bytes: int) -> _HostSlab:
        """A slab of at least this many bytes; its event must be recorded after the copy."""
        slab = self._slabs.popleft()
        if not slab.copied.query():  # nor are the others: copies are done in order
            self._slabs.appendleft(slab)
            slab = self._make(num_bytes)
        elif len(slab.memory) < num_bytes:
            slab = self._make(num_bytes)
        self._slabs.append(slab)
        return slab

    def _make(self, num_bytes: int) -> _HostSlab:
        size = 1 << (num_bytes - 1).bit_length() if num_bytes else 0
        return _HostSlab(self._streams.make_pinned(size), self._streams.make_event())


class _Places:
    """Places arrays one after the other, each aligned."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, dtype: type[np.integer], *shape: int) -> "_Place":
        """Add an array after the previous one."""
        place = _Place(self.num_bytes, np.dtype(dtype), shape)
        self.num_bytes += _aligned(place.num_bytes)
        return place


class _Place(NamedTuple):
    """An array within a slab."""

    start: int
    dtype: np.dtype[np.integer]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def in_array(self, slab: NDArray[np.uint8]) -> IntArray:
        part: IntArray = slab[self.start : self.start + self.num_bytes].view(self.dtype)
        return part.reshape(self.shape)

    def in_tensor(self, slab: torch.Tensor) -> torch.Tensor:
        dtype = torch.int64 if self.dtype.itemsize == 8 else torch.int32
        return slab[self.start : self.start + self.num_bytes].view(dtype).view(self.shape)


class _Layout:
    """The places of a step in a slab. All but the rows and the new entries of block tables, which come last and are
    copied by themselves, depend only on the padded sizes.
    """

    def __init__(self, num_groups: int, num_tokens: int, num_seqs: int, num_rows: int, num_entries: int) -> None:
        places = _Places()
        self.token_ids = places.add(np.int64, num_tokens)
        self.positions = places.add(np.int64, num_tokens)
        self.slots = places.add(np.int64, num_groups, _aligned(num_tokens))
        self.seq_lens = places.add(np.int32, num_seqs)
        self.cu_seqlens_q = places.add(np.int32, num_seqs + 1)
        self.batch_slots = places.add(np.int64, num_seqs)
        self.rows = places.add(np.int64, num_rows)
        self.num_step_bytes = places.num_bytes
        self.entries = places.add(np.int64, num_entries)
        self.blocks = places.add(np.int32, num_groups, num_entries)
        self.num_bytes = places.num_bytes


class DeviceTables:
    """The block tables of the whole batch on a device, by KV group and slot: a step brings the new entries alone."""

    def __init__(self, device: torch.device, shape: tuple[int, ...]) -> None:
        """`shape`: (groups, max_num_seqs, max_blocks) of the batch's own."""
        self.shape, self.device = shape, device
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device)

    def write(self, entries: torch.Tensor, blocks: torch.Tensor) -> None:
        """Write blocks (groups, k) into entries (k,), each slot * max_blocks + column."""
        self._tables.view(self.shape[0], -1).index_copy_(1, entries, blocks)

    def read(self, slots: torch.Tensor, out: torch.Tensor) -> None:
        """The first columns of the tables in these slots (r,), into `out` (groups, r, columns)."""
        if out.numel():
            torch.index_select(self._tables[:, :, : out.shape[2]], 1, slots, out=out)


class StepBuffers:
    """The tensors of the latest loaded step; the next `load` overwrites them, on the current stream."""

    def __init__(self, batch_tables: DeviceTables, block_size: int, *, pads: bool = False) -> None:
        """`pads`: there is room for all padded steps; else larger steps move the tensors."""
        self._batch_tables, self._device = batch_tables, batch_tables.device
        self._block_size = block_size
        num_groups, num_seqs, num_blocks = batch_tables.shape
        where: dict[str, Any] = {"dtype": torch.int32, "device": self._device}
        self._tables = torch.zeros(num_groups, num_seqs + MOST_PROMPTS * pads, _aligned(num_blocks), **where)
        self._host = HostSlabs(streams_of(self._device))
        num_tokens = max(num_seqs, MOST_TOKENS) * pads
        size = _Layout(num_groups, num_tokens, num_tokens, num_tokens, 0).num_step_bytes
        self._slab = torch.empty(size, dtype=torch.uint8, device=self._device)

    def load(
        self, inputs: StepInputs, block_tables: IntArray, rows: IntArray | None = None, *, size: Padding | None = None
    ) -> StepTensors:
        """Copy a step to the device, after the work queued on the current stream.

        Args:
            block_tables: (groups, max_num_seqs, max_blocks), the batch's own, by KV group and slot.
            rows: (m,) ascending tokens of the step; None: all of them.
            size: to which the step is padded, in which requests of few tokens come first.
        """
        num_real, num_seqs = len(inputs.positions), len(inputs.slots)
        few = first_prompt(inputs)[0] if size is not None and size.prompts else num_seqs
        sizes = size or Padding(num_real, num_seqs, 0, None if rows is None else len(rows))
        fits = few <= sizes.decodes and num_seqs - few <= sizes.prompts and num_real <= sizes.tokens
        assert fits, (size, num_real, num_seqs, few)
        num_blocks = -(-int(inputs.seq_lens.max(initial=0)) // self._block_size)
        entries, num_groups = inputs.new_entries, len(block_tables)
        layout = _Layout(num_groups, sizes.tokens, sizes.seqs, sizes.rows or 0, len(entries))
        host = self._host.take(layout.num_bytes)
        _pack(layout, host.memory.numpy(), inputs, rows, self._block_size, (few, sizes.decodes))
        layout.blocks.in_array(host.memory.numpy())[:] = block_tables.reshape(num_groups, -1)[:, entries]
        if len(self._slab) < layout.num_step_bytes:
            assert size is None, size  # a graph would read the old addresses
            self._slab = torch.empty(len(host.memory), dtype=torch.uint8, device=self._device)
        self._slab[: layout.num_step_bytes].copy_(host.memory[: layout.num_step_bytes], non_blocking=True)
        if len(entries):
            new = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._device)
            new[layout.num_step_bytes :].copy_(host.memory[layout.num_step_bytes : layout.num_bytes], non_blocking=True)
            self._batch_tables.write(layout.entries.in_tensor(new), layout.blocks.in_tensor(new))
        host.copied.record()
        last = few if few == num_seqs else sizes.decodes + num_seqs - few
        slots = layout.batch_slots.in_tensor(self._slab)[:last]
        self._batch_tables.read(slots, self._tables[:, :last, :num_blocks])
        tables = self._tables[:, : sizes.seqs]
        return StepTensors(
            token_ids=layout.token_ids.in_tensor(self._slab),
            positions=layout.positions.in_tensor(self._slab),
            slot_mapping=layout.slots.in_tensor(self._slab)[:, : sizes.tokens],
            seq_lens=layout.seq_lens.in_tensor(self._slab),
            cu_seqlens_q=layout.cu_seqlens_q.in_tensor(self._slab),
            block_tables=tables if size is not None else tables[..., :num_blocks],
            rows=None if sizes.rows is None else layout.rows.in_tensor(self._slab),
        )


def _pack(
    layout: _Layout, slab: NDArray[np.uint8], inputs: StepInputs, rows: IntArray | None, block_size: int,
    prompts: tuple[int, int],
) -> None:  # fmt: skip
    """Write a step, and all of its padding, into a slab. `prompts`: the first one's index, and its place."""
    num_real = len(inputs.positions)
    slots = layout.slots.in_array(slab)
    slots[:, :num_real], slots[:, num_real:] = inputs.slot_mapping(block_size), _NO_SLOT
    ends = layout.cu_seqlens_q.in_array(slab)
    ends[0] = 0
    _place(ends[1:], inputs.cu_seqlens_q[1:], *prompts, int(inputs.cu_seqlens_q[prompts[0]]), num_real)
    _place(layout.seq_lens.in_array(slab), inputs.seq_lens, *prompts)
    _place(layout.batch_slots.in_array(slab), inputs.slots, *prompts)
    for place, values in ((layout.token_ids, inputs.token_ids), (layout.positions, inputs.positions)):
        _place(place.in_array(slab), values, num_real, num_real)
    layout.entries.in_array(slab)[:] = inputs.new_entries
    if rows is not None:
        _place(layout.rows.in_array(slab), rows, len(rows), len(rows))


def _place(out: IntArray, values: IntArray, first: int, at: int, between: int = 0, behind: int = 0) -> None:
    """Write values into `out`, from the `first` on to `at`, and padding between and behind."""
    stop = at + len(values) - first
    out[:first], out[first:at], out[at:stop], out[stop:] = values[:first], between, values[first:], behind


def _aligned(count: int) -> int:
    """The size rounded up to a multiple of _ALIGNMENT."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT
