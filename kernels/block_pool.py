"""Holders of many KV blocks at once, compiled (block_pool.c) if the package was built with a compiler; see
engine/kv/block_pool.py.
"""

import ctypes
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.kernels.compiled import NUMBER, POINTER, load_library

Numbers = npt.NDArray[np.int64]


class Freed(NamedTuple):
    """Blocks without holders, in the order in which they were freed."""

    cached: Numbers  # with content
    empty: Numbers


class _Pool(ctypes.Structure):
    """block_pool.c's `Pool`."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("states", "num_in_state", "places")), ("held", ctypes.c_int64))


@cache
def _library() -> ctypes.CDLL | None:
    arguments = [*[POINTER] * 3, NUMBER, NUMBER]
    functions = {"pdkv_hold": (NUMBER, arguments), "pdkv_release": (NUMBER, [*arguments, *[POINTER] * 3])}
    return load_library("_block_keys", functions, keeps_gil=True)


def available() -> bool:
    """Whether the compiled form is available."""
    return _library() is not None


class HolderCounts:
    """The arrays of one pool, which it keeps alive and which never move.

    Args:
        states: (num_blocks,), uint8.
        num_holders: (kinds of holders, num_blocks), int32.
        num_in_state: number of blocks by state.
        places: (num_blocks,), each block's place in the free queue.
        held: the bits of all kinds of holders.
    """

    def __init__(
        self,
        states: npt.NDArray[np.uint8],
        num_holders: npt.NDArray[np.int32],
        num_in_state: Numbers,
        places: Numbers,
        held: int,
    ) -> None:
        library = _library()
        assert library is not None, "call available() first"
        self._hold, self._release = library.pdkv_hold, library.pdkv_release
        self._arrays = (states, num_holders, num_in_state, places)
        self._pool = _Pool(states.ctypes.data, num_in_state.ctypes.data, places.ctypes.data, held)
        self._at = ctypes.addressof(self._pool)
        self._counts_at = [row.ctypes.data for row in num_holders]
        self._num_free = np.zeros(2, dtype=np.int64)
        self._num_free_at = self._num_free.ctypes.data

    def hold(self, blocks: Numbers, holder: IntEnum) -> int:
        """Add a holder of the kind to each block, once for every time it is named. Returns how many were free."""
        return int(self._hold(self._at, self._counts_at[holder], blocks.ctypes.data, blocks.size, 1 << holder))

    def release(self, blocks: Numbers, holder: IntEnum) -> Freed:
        """Remove a holder of the kind from each block, once for every time it is named, starting with the last block.

        Raises:
            AssertionError: a block has no such holder.
        """
        freed = np.empty((2, blocks.size), dtype=np.int64)
        at = freed.ctypes.data
        wrong = self._release(
            self._at, self._counts_at[holder], blocks.ctypes.data, blocks.size, 1 << holder,
            at, at + 8 * blocks.size, self._num_free_at,
        )  # fmt: skip
        if wrong >= 0:
            raise AssertionError(f"block {blocks[wrong]} has no {holder.name} holder")
        num_cached, num_empty = self._num_free.tolist()
        return Freed(freed[0, :num_cached], freed[1, :num_empty])
