"""Interleaved rANS: entropy coding of bytes with static tables (Duda, arXiv:1311.2540; interleaved: Giesen, 1402.3392).

Symbols are (rows, columns) bytes. Column c belongs to state c % LANES, and its context, which stays for a number of
rows, chooses one of the tables. States have 32 bits, in [2^16, 2^32), and give or take at most one 16-bit word for each
symbol; words of all states share one sequence, in the order in which the decoder takes them. rans.c, which cachegen.c
calls, has the same bytes some hundred times faster.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
States = npt.NDArray[np.uint32]

LANES: Final = 16
BITS: Final = 12
SLOTS: Final = 1 << BITS
"""What the frequencies of a table add up to."""
MAX_TABLES: Final = 16

_LOW = 1 << 16
_SHIFT = 44
_SYMBOL = np.dtype([("reciprocal", "<u8"), ("frequency", "<u4"), ("start", "<u4")])


class Tables:
    """How frequent each symbol is in each context, in the forms that the coder reads.

    Args:
        frequencies: (tables, 256), at most MAX_TABLES tables; each adds up to SLOTS, and no symbol has all slots.

    Raises:
        ValueError: anything else.
    """

    def __init__(self, frequencies: npt.NDArray[np.uint32]) -> None:
        num_tables = len(frequencies)
        if frequencies.shape[1:] != (256,) or not 0 < num_tables <= MAX_TABLES:
            raise ValueError(f"expected at most {MAX_TABLES} tables of 256 frequencies, got {frequencies.shape}")
        if (frequencies.sum(axis=1) != SLOTS).any() or frequencies.max() >= SLOTS:
            raise ValueError(f"expected frequencies below {SLOTS} that add up to it")
        padded = frequencies[np.minimum(np.arange(MAX_TABLES), num_tables - 1)]  # any context has a table
        self.symbols: npt.NDArray[np.void] = np.zeros((MAX_TABLES, 256), dtype=_SYMBOL)
        """(MAX_TABLES, 256): what the encoder reads."""
        self.symbols["frequency"] = padded
        self.symbols["start"] = padded.cumsum(axis=1) - padded
        self.symbols["reciprocal"] = (1 << _SHIFT) // np.maximum(padded, 1).astype(np.uint64) + np.uint64(1)
        self.slots: npt.NDArray[np.uint32] = np.stack([_slots_of(row) for row in padded])
        """(MAX_TABLES, SLOTS): symbol << 24 | frequency << 12 | slot - start."""


def _slots_of(frequencies: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    symbols = np.repeat(np.arange(256, dtype=np.uint32), frequencies)
    offsets = np.arange(SLOTS, dtype=np.uint32) - np.repeat(frequencies.cumsum() - frequencies, frequencies)
    return (symbols << 24 | frequencies[symbols] << 12 | offsets).astype(np.uint32)


class Coded(NamedTuple):
    """Symbols as coded by the encoder."""

    states: States  # (LANES,)
    words: Words  # at most one a symbol


def encode(symbols: Bytes, contexts: Bytes, tables: Tables) -> Coded:
    """Code symbols, all lanes of a step at once.

    Args:
        symbols: (rows, columns).
        contexts: (groups, columns): of rows / groups rows each; the low 4 bits say which table.

    Raises:
        ValueError: a symbol that its table does not have.
    """
    states = np.full(LANES, _LOW, dtype=np.uint64)
    taken: list[Words] = []
    rows_per_context = len(symbols) // len(contexts)
    for row in range(len(symbols) - 1, -1, -1):
        entries = tables.symbols[contexts[row // rows_per_context] & (MAX_TABLES - 1), symbols[row]]
        if not entries["frequency"].all():
            raise ValueError("a symbol is not in its table")
        for first in range((symbols.shape[1] - 1) // LANES * LANES, -1, -LANES):
            entry = entries[first : first + LANES]
            x = states[: len(entry)]
            is_full = x >> np.uint64(20) >= entry["frequency"]
            taken.append(x[is_full].astype(np.uint16))
            x = np.where(is_full, x >> np.uint64(16), x)
            quotient, rest = np.divmod(x, entry["frequency"].astype(np.uint64))
            states[: len(entry)] = (quotient << np.uint64(BITS)) + rest + entry["start"]
    return Coded(states.astype(np.uint32), np.concatenate(taken[::-1]))


def decode(coded: Coded, contexts: Bytes, tables: Tables, out: Bytes) -> bool:
    """Decode symbols, all lanes of a step at once.

    Args:
        contexts: as for `encode`.
        out: (rows, columns); written.

    Returns:
        Whether all words were taken and every state is where the encoder began. If not, `out` is undefined.
    """
    states, word = coded.states.astype(np.uint64), 0
    rows_per_context = len(out) // len(contexts)
    for row in range(len(out)):
        table = contexts[row // rows_per_context] & (MAX_TABLES - 1)
        for first in range(0, out.shape[1], LANES):
            x = states[: min(LANES, out.shape[1] - first)]
            slots = tables.slots[table[first : first + LANES], x & np.uint64(SLOTS - 1)].astype(np.uint64)
            out[row, first : first + LANES] = slots >> np.uint64(24)
            x[:] = (slots >> np.uint64(12) & np.uint64(SLOTS - 1)) * (x >> np.uint64(BITS)) + (
                slots & np.uint64(SLOTS - 1)
            )
            is_low = x < _LOW
            words = coded.words[word : word + int(is_low.sum())]
            word += words.size
            if words.size < is_low.sum():
                return False
            x[is_low] = x[is_low] << np.uint64(16) | words
    return word == coded.words.size and bool((states == _LOW).all())
