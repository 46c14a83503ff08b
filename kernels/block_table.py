"""Updates many blocks at once in the table of connectors/arena/block_table.py, compiled if the package was built with a
compiler.
"""

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from pdkv.kernels.compiled import POINTER, load_library

_ARRAYS = ("generations", "published", "keys", "entries", "slots")
_SIZES = ("num_blocks", "keys_per_block", "num_sets", "ways")


class _Table(ctypes.Structure):
    """block_table.c's `Table`."""

    _fields_ = (*((name, ctypes.c_void_p) for name in _ARRAYS), *((name, ctypes.c_int64) for name in _SIZES))


@cache
def _library() -> ctypes.CDLL | None:
    any_ = ctypes.py_object
    functions = {"pdkv_reuse_blocks": (any_, [POINTER, any_]), "pdkv_publish_blocks": (any_, [POINTER, any_, any_])}
    return load_library("_block_keys", functions, keeps_gil=True)


def available() -> bool:
    """Whether the compiled form is available."""
    return _library() is not None


class TableWriter:
    """The arrays of one table, which it keeps alive and which never move.

    Args:
        generations, published: (num_blocks,), int64.
        keys: (num_blocks * keys per block, 2), uint64.
        entries: (sets, ways), uint64.
        slots: by unit, int64.
    """

    def __init__(
        self,
        generations: npt.NDArray[np.int64],
        published: npt.NDArray[np.int64],
        keys: npt.NDArray[np.uint64],
        entries: npt.NDArray[np.uint64],
        slots: npt.NDArray[np.int64],
    ) -> None:
        library = _library()
        assert library is not None, "ask available() first"
        self._arrays = (generations, published, keys, entries, slots)
        num_blocks = len(generations)
        sizes = (num_blocks, len(keys) // num_blocks, *entries.shape)
        self._table = _Table(*(array.ctypes.data for array in self._arrays), *sizes)
        self._at = ctypes.addressof(self._table)
        self._reuse, self._publish = library.pdkv_reuse_blocks, library.pdkv_publish_blocks

    def reuse(self, blocks: Sequence[int]) -> None:
        """Increment the blocks' generations and withdraw their keys. Raises IndexError: there is no such block."""
        self._reuse(self._at, list(blocks))

    def publish(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Make the blocks findable. Raises ValueError unless there is one key of 16 bytes per hash block, and
        IndexError as `reuse`.
        """
        self._publish(self._at, list(blocks), list(keys))
