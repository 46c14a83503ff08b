"""Block keys of many tokens at once, compiled (block_keys.c) if the package was built with a compiler.

Otherwise hashlib makes the keys, with the same result (pdkv.base.block_keys.extend_keys). The compiled form releases
the GIL.
"""

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from pdkv.base.block_keys import extend_keys
from pdkv.kernels.compiled import NUMBER, POINTER, load_library
from pdkv.kernels.int_lists import int32_array

KEY_BYTES = 16
Tokens = npt.NDArray[np.int32]
_FEW_KEYS = 8
"""Below, the way to the compiled form costs more than it saves."""


@cache
def _library() -> ctypes.CDLL | None:
    return load_library("_block_keys", {"pdkv_block_keys": (None, [*[POINTER] * 3, NUMBER, NUMBER])})


def available() -> bool:
    """Whether the compiled form is available."""
    return _library() is not None


def as_tokens(token_ids: Sequence[int]) -> Tokens:
    """Token ids as an array. Raises OverflowError for one that does not fit into int32."""
    return int32_array(token_ids)


def keys_behind(parent: bytes, token_ids: Sequence[int] | Tokens, *, hash_block_size: int) -> list[bytes]:
    """The keys of the full hash blocks of `token_ids`, the first of which follows `parent`.

    Raises:
        OverflowError: a token does not fit into int32.
    """
    num_keys = len(token_ids) // hash_block_size
    library = _library()
    if library is None or num_keys < _FEW_KEYS:
        keys: list[bytes] = []
        known = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        extend_keys(keys, parent, known, hash_block_size=hash_block_size)
        return keys
    assert len(parent) == KEY_BYTES
    tokens = token_ids if isinstance(token_ids, np.ndarray) else as_tokens(token_ids)
    tokens = tokens.astype("<i4", copy=False)
    out: npt.NDArray[np.void] = np.empty(num_keys, dtype=f"V{KEY_BYTES}")
    library.pdkv_block_keys(out.ctypes.data, parent, tokens.ctypes.data, num_keys, hash_block_size)
    found: list[bytes] = out.tolist()
    return found
