"""How values share a staging buffer: part by part, each part's values side by side, as the pool gathers them."""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from pdkv.connectors.staging import Bytes
from pdkv.connectors.store_plan import Value, ValuePart


class Piece(NamedTuple):
    """One part of some values, side by side in a buffer."""

    part: ValuePart
    values: Sequence[Value]
    unit_bytes: int

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return sum(value.num_units for value in self.values) * self.unit_bytes


def pack(
    values: Sequence[Value], parts: Sequence[tuple[ValuePart, int]], capacity: int, *, split: bool
) -> Iterator[list[Piece]]:
    """Fill buffers of `capacity` bytes, at least one value of any part, with all parts of all values.

    Args:
        parts: with the bytes of a unit of each.
        split: a layer group begins a buffer of its own.
    """
    pieces: list[Piece] = []
    room = capacity
    for part, unit_bytes in parts:
        if split and pieces and pieces[-1].part.group != part.group:
            yield pieces
            pieces, room = [], capacity
        first = 0
        while first < len(values):
            stop = first
            while stop < len(values) and values[stop].num_units * unit_bytes <= room:
                room -= values[stop].num_units * unit_bytes
                stop += 1
            if stop > first:
                pieces.append(Piece(part, values[first:stop], unit_bytes))
                first = stop
            if first < len(values):
                yield pieces
                pieces, room = [], capacity
    if pieces:
        yield pieces


def lay_out(pieces: Sequence[Piece], buffer: Bytes) -> tuple[list[bytes], list[memoryview]]:
    """Keys of the pieces' values and where in the buffer each has its place; both in the order of their tokens."""
    places: list[tuple[int, bytes, memoryview]] = []
    memory, offset = memoryview(buffer.data), 0
    for piece in pieces:
        for value in piece.values:
            size = value.num_units * piece.unit_bytes
            places.append((value.start, value.key + piece.part.suffix, memory[offset : offset + size]))
            offset += size
    places.sort(key=itemgetter(0))
    return [key for _, key, _ in places], [view for *_, view in places]
