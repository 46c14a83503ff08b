"""Small pieces of memory: which of them go as they lie, and which are gathered first. One decision for all transports.

What goes as it lies costs something for each piece beside its bytes: an entry of a vector, a descriptor, a system call.
What is gathered is copied once more. So pieces below some size are gathered. That size is an option's, or it is
measured once per process, with the transport's own way to move pieces.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.connectors.transfer.block_copy import Bytes, copy_blocks
from pdkv.connectors.transfer.planning import Ids, as_ids

MAX_BELOW = 64 * 1024
"""No measurement says more: pieces of that size take longer by themselves than what goes with each."""

_NUM_PIECES, _PIECE_BYTES = 512, 64
_ROW_BYTES = 4096
_REPEATS = 7
_MEASURE_S = 3e-3

Move = Callable[[Bytes, Ids, int], object]
"""move(rows, ids, num_bytes): moves the first `num_bytes` of each of these rows as they lie, as the transport does it,
to somewhere in this process."""


class Gate(NamedTuple):
    """Pieces of less than `below` bytes are gathered if there are at least `at_least` of them."""

    below: int
    at_least: int = 1  # gathering has a price of its own, such as asking the peer to do it

    def gathers(self, num_pieces: int, piece_bytes: int) -> bool:
        """Whether so many equal pieces are gathered."""
        return piece_bytes < self.below and num_pieces >= self.at_least

    def choose(self, sizes: Ids) -> npt.NDArray[np.bool_]:
        """Which pieces of these sizes in bytes are gathered."""
        small = sizes < self.below
        return small if np.count_nonzero(small) >= self.at_least else np.zeros_like(small)


AS_THEY_LIE = Gate(0)
"""Of mapped memory, for instance: one call of the copy kernel takes all pieces, however small."""

_lock = threading.Lock()
_gates: dict[str, Gate] = {}


def measured_gate(way: str, move: Move, *, copies: int = 2, price_s: float = 0.0) -> Gate:
    """The gate of a transport in this process, measured at the first call; that takes some milliseconds.

    Args:
        way: names how `move` moves pieces: each is measured once.
        copies: that gathering makes: one out of the pool here, one into the pool there.
        price_s: what gathering costs once, however many pieces there are.
    """
    with _lock:
        if way not in _gates:
            _gates[way] = _measure(move, copies, price_s)
        return _gates[way]


def _measure(move: Move, copies: int, price_s: float) -> Gate:
    rows = np.ones((_NUM_PIECES, _ROW_BYTES), np.uint8)
    small_rows = np.ascontiguousarray(rows[:, :_PIECE_BYTES])
    target, order = np.ones_like(rows), as_ids(range(_NUM_PIECES))
    ids = np.random.default_rng(0).permutation(_NUM_PIECES).astype(np.int64)
    small, staging = target.reshape(-1)[: small_rows.size].reshape(small_rows.shape), np.empty(0, np.uint8)
    few, many = small_rows.size // _ROW_BYTES, _NUM_PIECES // 2

    def copy(count: int) -> None:
        copy_blocks(rows, target, ids[:count], order[:count], staging)

    in_pieces, in_one, gathered, copied, copied_more = _least_seconds(
        lambda: move(rows, ids, _PIECE_BYTES),
        lambda: move(rows.reshape(1, -1), order[:1], small_rows.size),
        lambda: copy_blocks(small_rows, small, ids, order, staging),
        lambda: copy(few),
        lambda: copy(many),
    )
    byte_s = copies * max(copied_more - copied, 1e-9) / ((many - few) * _ROW_BYTES)
    saved_s = (in_pieces - in_one) / _NUM_PIECES - copies * max(gathered - copied, 0.0) / _NUM_PIECES
    if saved_s <= 0.0:
        return AS_THEY_LIE
    return Gate(min(int(saved_s / byte_s), MAX_BELOW), max(round(price_s / saved_s), 1))


def _least_seconds(*works: Callable[[], object]) -> list[float]:
    """The least CPU time of each, in turns: time spent waiting for the GIL or for a processor does not count."""
    took = [float("inf")] * len(works)
    deadline = time.monotonic() + _MEASURE_S
    for turn in range(_REPEATS + 1):
        for number, work in enumerate(works):
            before = time.thread_time_ns()
            work()
            if turn:  # it is warm
                took[number] = min(took[number], (time.thread_time_ns() - before) / 1e9)
        if turn >= 2 and time.monotonic() >= deadline:
            break
    return took
