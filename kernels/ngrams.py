"""Guesses at what follows some tokens: the last of them are looked up in texts, and what follows there is guessed.

Compiled (ngrams.c) if the package was built with a compiler, else by numpy, which is slow. A text's positions are
chained by the hash of the tokens before them, its *gram*, and the chain of the looked-up gram is followed from its
newest position on, so a lookup takes the same time in a long text. The longest match wins, the newest of equally long
ones.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.kernels.compiled import NUMBER, POINTER, load_library

Tokens = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]

_TEXT = ("tokens", "previous", "table", "size", "num_indexed", "bits", "gram", "last_at", "last_size")
_COLUMN = {name: i for i, name in enumerate(_TEXT)}
_PROBES, _HINTED = 32, 1 << 20
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
    """Whether the compiled form is available."""
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
        self._fields[number, _COLUMN["size"]] = size

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
        if look_up is None:
            self._look_up_slowly(jobs, guesses, counts, lengths, factor)
            return Found(counts, guesses)
        arrays = (array.ctypes.data for array in (guesses, counts, lengths))
        at, counts_at, lengths_at = arrays
        look_up(fields.ctypes.data, jobs.ctypes.data, len(jobs), at, width, counts_at, lengths_at, factor)
        return Found(counts, guesses)

    def _look_up_slowly(self, jobs: Numbers, guesses: Tokens, counts: Numbers, lengths: Numbers, factor: float) -> None:
        for job in map(Job._make, jobs.tolist()):
            tokens, is_own = self._arrays[job.text][0], self._fields[job.text, 0] == job.tokens
            size = job.size if is_own else int(self._fields[job.text, _COLUMN["size"]])
            query = (
                np.ctypeslib.as_array((ctypes.c_int32 * job.size).from_address(job.tokens)) if job.size else tokens[:0]
            )
            length, at = self._find(job, tokens[:size], query)
            if length <= lengths[job.place]:
                continue
            wanted = min(job.wanted, guesses.shape[1])
            if factor and length < _HINTED and wanted > factor * length:
                wanted = int(factor * length) + 1
            found = _followed(tokens[at:size].tolist(), wanted, repeats=bool(is_own))
            if found:
                guesses[job.place, : len(found)] = found
                counts[job.place], lengths[job.place] = len(found), length

    def _find(self, job: Job, text: Tokens, query: Tokens) -> tuple[int, int]:
        fields = self._fields[job.text]
        if job.follows:
            at = int(fields[_COLUMN["last_at"]] + job.size - fields[_COLUMN["last_size"]])
            fields[_COLUMN["last_at"]], fields[_COLUMN["last_size"]] = at, job.size
            if job.size and 0 < at < len(text) and text[at - 1] == query[-1]:
                return _HINTED, at
        gram, best, best_at = int(fields[_COLUMN["gram"]]), 0, 0
        is_candidate = np.ones(max(len(text) - gram, 0), np.bool_)
        for i in range(min(gram, job.size)):
            is_candidate &= text[gram - 1 - i : len(text) - 1 - i] == query[-1 - i]
        for at in (np.flatnonzero(is_candidate)[::-1][:_PROBES] + gram).tolist() if job.size >= gram else ():
            length = _common(text[:at], query, job.max)
            if length > best:
                best, best_at = length, at
            if best >= job.max:
                break
        if best < job.min:
            return 0, 0
        if job.follows:
            fields[_COLUMN["last_at"]] = best_at
        return best, best_at


def _common(text: Tokens, query: Tokens, most: int) -> int:
    """The length of the common end of both."""
    most = min(most, len(text), len(query))
    differs = np.flatnonzero(text[len(text) - most :][::-1] != query[len(query) - most :][::-1])
    return int(differs[0]) if differs.size else most


def _followed(behind: Sequence[int], wanted: int, *, repeats: bool) -> list[int]:
    """The next tokens, up to the end of an output. A text that repeats itself goes on for longer than it is."""
    found: list[int] = []
    for i in range(wanted if repeats else min(wanted, len(behind))):
        token_id = behind[i] if i < len(behind) else found[i - len(behind)]
        if token_id < 0:
            break
        found.append(token_id)
    return found


_look_up()  # now: the first call may come from a step thread, which reads no files
