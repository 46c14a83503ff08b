"""Lists of ints as arrays: compiled (int_lists.c) if the package was built with a compiler, else by numpy, which is
slow.
"""

import ctypes
from collections.abc import Callable, Collection
from functools import cache

import numpy as np
import numpy.typing as npt

from pdkv.kernels.compiled import NUMBER, load_library

_FEW = 8
"""Below, the way to the compiled form costs more than it saves."""


@cache
def _array_of() -> Callable[[object, int], bytearray] | None:
    functions = {"pdkv_array_of": (ctypes.py_object, [ctypes.py_object, NUMBER])}
    library = load_library("_block_keys", functions, keeps_gil=True)
    return None if library is None else library.pdkv_array_of


def available() -> bool:
    """Whether the compiled form is available."""
    return _array_of() is not None


def int64_array(numbers: Collection[int]) -> npt.NDArray[np.int64]:
    """The numbers, (n,) int64, writable. Raises OverflowError for a number that does not fit."""
    if type(numbers) in (list, tuple) and len(numbers) > _FEW and (array_of := _array_of()) is not None:
        return np.frombuffer(array_of(numbers, 8), np.int64)
    return np.fromiter(numbers, np.int64, len(numbers))


def int32_array(numbers: Collection[int]) -> npt.NDArray[np.int32]:
    """The numbers, (n,) int32, writable. Raises OverflowError for a number that does not fit."""
    if type(numbers) in (list, tuple) and len(numbers) > _FEW and (array_of := _array_of()) is not None:
        return np.frombuffer(array_of(numbers, 4), np.int32)
    return np.fromiter(numbers, np.int32, len(numbers))


_array_of()  # now: the first call may come from a step thread, which reads no files
