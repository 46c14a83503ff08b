"""Layout of values in a staging buffer: part by part, each part's values side by side, each value followed by an
envelope.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pdkv.connectors.store.envelope import ENVELOPE_BYTES
from pdkv.connectors.store.plan import Value, ValuePart, form_suffix
from pdkv.connectors.transfer.planning import Bytes


class Piece(NamedTuple):
    """One part of some values, side by side in a buffer."""

    part: ValuePart
    values: Sequence[Value]  # as large as the first one; the last may be smaller
    body_bytes: Callable[[int], int]  # bytes of a value with this many units
    form: int = 0  # in which they are stored

    @property
    def num_bytes(self) -> int:
        """Bytes of all bodies."""
        return sum(map(self.bytes_of, self.values))

    def bytes_of(self, value: Value) -> int:
        """Bytes of the value's body."""
        return self.body_bytes(value.num_units)


class Slot(NamedTuple):
    """A value's place in a buffer."""

    value: Value
    part: ValuePart
    key: bytes
    data: Bytes  # its body and its envelope
    form: int = 0

    @property
    def body(self) -> Bytes:
        """The images of the value's units, or a codec's encoding of them."""
        return self.data[:-ENVELOPE_BYTES]

    @property
    def view(self) -> memoryview:
        """The whole value, as passed to a store."""
        return memoryview(self.data.data)


def buffer_bytes(capacity: int, smallest: int) -> int:
    """Bytes of a buffer for `capacity` bytes of bodies and their envelopes; `smallest`: bytes of the smallest body."""
    return capacity + capacity // smallest * ENVELOPE_BYTES


def pack(pieces: Sequence[Piece], capacity: int, *, split: bool) -> Iterator[list[Piece]]:
    """Distribute all values of all pieces over buffers, each with at most `capacity` bytes of bodies, but at least one
    value of any part.

    Args:
        split: each stage begins a new buffer.
    """
    packed: list[Piece] = []
    room = capacity
    for piece in pieces:
        part, values = piece.part, piece.values
        if split and packed and packed[-1].part.stage != part.stage:
            yield packed
            packed, room = [], capacity
        first = 0
        while first < len(values):
            size = piece.bytes_of(values[first])
            stop = first + min(room // size, len(values) - first)
            if stop > first:
                room -= (stop - first - 1) * size + piece.bytes_of(values[stop - 1])
            while stop < len(values) and piece.bytes_of(values[stop]) <= room:
                room -= piece.bytes_of(values[stop])
                stop += 1
            if stop > first:
                packed.append(piece._replace(values=values[first:stop]))
                first = stop
            if first < len(values):
                yield packed
                packed, room = [], capacity
    if packed:
        yield packed


def lay_out(pieces: Sequence[Piece], buffer: Bytes) -> list[Slot]:
    """The place in the buffer of each value of the pieces, in token order."""
    slots: list[Slot] = []
    offset = 0
    for piece in pieces:
        suffix = piece.part.suffix + form_suffix(piece.form)
        for value in piece.values:
            stop = offset + piece.bytes_of(value) + ENVELOPE_BYTES
            slots.append(Slot(value, piece.part, value.key + suffix, buffer[offset:stop], piece.form))
            offset = stop
    slots.sort(key=lambda slot: slot.value.start)
    return slots
