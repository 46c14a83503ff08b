"""Guesses at what follows some tokens: the last of them are looked up in texts, and what follows there is guessed.

Compiled (ngrams.c), and there only if the package was built with a compiler: ask `available()`. A text's positions are
chained by the hash of the tokens before them, its *gram*, and the chain of the looked-up gram is followed from its
newest position on, so a lookup takes the same time in a long text. The longest match wins, the newest of equally long
ones.
"""

import ctypes
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.kernels.compiled import NUMBER, POINTER, load_library

Tokens = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]

_TEXT = ("tokens", "previous", "table", "size", "num_indexed", "bits", "gram", "last_at", "last_size")
_SIZE = _TEXT.index("size")
_MAX_BITS = 16


class Job(NamedTuple):
    """One lookup; several of one place compete."""

    tokens: int  # address of the int32 tokens, the last of which are looked up
    size: int  # number of them
    text: int  # the text's number
    min: int  # least length of a match, at least the text's gram
    max: int  # length from which on a match is long enough
    follows: bool  # first try where the text would be if it had been followed since the last lookup
    place: int  # row of the result
    wanted: int  # the most guesses


class Found(NamedTuple):
    """Guesses by place."""

    counts: Numbers  # (places,)
    token_ids: Tokens  # (places, width)


@cache
def _look_up() -> Any:
    arguments = [POINTER, POINTER, NUMBER, POINTER, NUMBER, POINTER, POINTER, ctypes.c_double]
    library = load_library("_block_keys", {"pdkv_look_up": (None, arguments)}, keeps_gil=True)
    return None if library is None else library.pdkv_look_up


def available() -> bool:
    """Whether lookups are possible."""
    return _look_up() is not None


class Texts:
    """Texts by number, each with its index, which grows with lookups. Tokens below 0 match nothing and end a guess."""

    def __init__(self, num_texts: int) -> None:
        self._fields = np.zeros((num_texts, len(_TEXT)), np.int64)
        self._arrays: list[Any] = [None] * num_texts

    def set(self, number: int, tokens: Tokens, size: int, gram: int) -> None:
        """Let a number stand for the first `size` of these tokens (contiguous, read at each lookup)."""
        bits = min(max(len(tokens).bit_length(), 8), _MAX_BITS)
        previous, table = np.zeros(len(tokens) + 1, np.int32), np.zeros(1 << bits, np.int32)
        self._arrays[number] = tokens, previous, table
        addresses = [array.ctypes.data for array in (tokens, previous, table)]
        self._fields[number] = [*addresses, size, 0, bits, gram, 0, 0]

    def resize(self, number: int, size: int) -> None:
        """Tell that tokens were appended in place."""
        self._fields[number, _SIZE] = size

    def clear(self, number: int) -> None:
        """Forget a text."""
        self._arrays[number] = None
        self._fields[number] = 0

    def look_up(self, jobs: Numbers, num_places: int, width: int, factor: float = 0.0) -> Found:
        """Run jobs, (n, 8), rows as `Job`, at most one per text.

        Args:
            width: the most guesses of a place.
            factor: guesses per matched token, at least one; 0: as many as wanted.
        """
        counts, lengths = np.zeros((2, num_places), np.int64)
        guesses = np.zeros((num_places, width), np.int32)
        fields, look_up = self._fields, _look_up()
        assert look_up is not None, "ask available() first"
        arrays = (array.ctypes.data for array in (guesses, counts, lengths))
        at, counts_at, lengths_at = arrays
        look_up(fields.ctypes.data, jobs.ctypes.data, len(jobs), at, width, counts_at, lengths_at, factor)
        return Found(counts, guesses)


_look_up()  # now: the first call may come from a step thread, which reads no files
