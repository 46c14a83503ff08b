"""How values share a staging buffer: part by part, each part's values side by side, an envelope behind each."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pdkv.connectors.store.envelope import ENVELOPE_BYTES
from pdkv.connectors.store.plan import Value, ValuePart
from pdkv.connectors.transfer.planning import Bytes


class Piece(NamedTuple):
    """One part of some values, side by side in a buffer."""

    part: ValuePart
    values: Sequence[Value]  # as large as the first one; the last may be smaller
    unit_bytes: int


class Slot(NamedTuple):
    """A value's place in a buffer."""

    value: Value
    part: ValuePart
    key: bytes
    data: Bytes  # images of its units, and its envelope

    @property
    def body(self) -> Bytes:
        """The images."""
        return self.data[:-ENVELOPE_BYTES]

    @property
    def view(self) -> memoryview:
        """The whole value, as a store takes it."""
        return memoryview(self.data.data)


def buffer_bytes(capacity: int, unit_bytes: int) -> int:
    """Bytes of a buffer for `capacity` bytes of images and their envelopes; `unit_bytes`: of the smallest image."""
    return capacity + capacity // unit_bytes * ENVELOPE_BYTES


def pack(pieces: Sequence[Piece], capacity: int, *, split: bool) -> Iterator[list[Piece]]:
    """Fill buffers of `capacity` bytes of images, at least one value of any part, with all values of all pieces.

    Args:
        split: a stage begins a buffer of its own.
    """
    packed: list[Piece] = []
    room = capacity
    for part, values, unit_bytes in pieces:
        if split and packed and packed[-1].part.stage != part.stage:
            yield packed
            packed, room = [], capacity
        first = 0
        while first < len(values):
            size = values[first].num_units * unit_bytes
            stop = first + min(room // size, len(values) - first)
            if stop > first:
                room -= (stop - first - 1) * size + values[stop - 1].num_units * unit_bytes
            while stop < len(values) and values[stop].num_units * unit_bytes <= room:
                room -= values[stop].num_units * unit_bytes
                stop += 1
            if stop > first:
                packed.append(Piece(part, values[first:stop], unit_bytes))
                first = stop
            if first < len(values):
                yield packed
                packed, room = [], capacity
    if packed:
        yield packed


def lay_out(pieces: Sequence[Piece], buffer: Bytes) -> list[Slot]:
    """Where in the buffer each of the pieces' values has its place; in the order of their tokens."""
    slots: list[Slot] = []
    offset = 0
    for piece in pieces:
        for value in piece.values:
            stop = offset + value.num_units * piece.unit_bytes + ENVELOPE_BYTES
            slots.append(Slot(value, piece.part, value.key + piece.part.suffix, buffer[offset:stop]))
            offset = stop
    slots.sort(key=lambda slot: slot.value.start)
    return slots
