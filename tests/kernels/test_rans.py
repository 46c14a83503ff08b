"""rANS: the compiled coder against numpy, bit by bit, and damaged words that must harm nothing."""

import ctypes
import mmap

import numpy as np
import pytest

from pdkv.kernels import cachegen
from pdkv.kernels.compiled import NUMBER, POINTER, load_library
from pdkv.kernels.rans import LANES, SLOTS, Bytes, Coded, Tables, decode, encode

compiled = pytest.mark.skipif(not cachegen.available(), reason="no compiler when pdkv was installed")

WIDTHS = (1, 3, 9, 30)  # of the tables' symbols, around 128


def make_tables() -> Tables:
    frequencies = np.zeros((len(WIDTHS), 256), np.uint32)
    for row, width in zip(frequencies, WIDTHS, strict=True):
        row[128 - width : 129 + width] = (SLOTS - 100) // (2 * width + 1)
        row[128] += SLOTS - row.sum()
    return Tables(frequencies)


TABLES = make_tables()


def draw(rows: int, columns: int, groups: int = 2, seed: int = 0) -> tuple[Bytes, Bytes]:
    """Symbols that their tables have, and contexts whose high bits are the caller's."""
    rng = np.random.default_rng(seed)
    contexts = rng.integers(0, 256, (groups, columns), dtype=np.uint8)
    widths = np.array([*WIDTHS, *[WIDTHS[-1]] * 12])[contexts & 15].repeat(rows // groups, axis=0)
    symbols = 128 + np.rint(rng.uniform(-1, 1, (rows, columns)) * widths)
    return symbols.astype(np.uint8), contexts


class Rows(ctypes.Structure):
    """rans.h's `rans_rows`."""

    _fields_ = (("contexts", POINTER), *((name, NUMBER) for name in ("rows", "columns", "rows_per_context")))

    @classmethod
    def of(cls, symbols: Bytes, contexts: Bytes) -> "Rows":
        return cls(contexts.ctypes.data, *symbols.shape, len(symbols) // len(contexts))


def coder() -> ctypes.CDLL:
    rows = ctypes.POINTER(Rows)
    library = load_library("_codec", {
        "pdkv_rans_encode": (NUMBER, [POINTER, NUMBER, POINTER, POINTER, rows, POINTER]),
        "pdkv_rans_decode": (NUMBER, [POINTER, POINTER, POINTER, NUMBER, rows, POINTER]),
    })  # fmt: skip
    assert library is not None
    return library


def encode_compiled(symbols: Bytes, contexts: Bytes) -> Coded | None:
    """What the compiled coder makes of it; None: a symbol is not in its table."""
    buffer, states = np.empty(symbols.size + 1, np.uint16), np.empty(LANES, np.uint32)
    num_words = coder().pdkv_rans_encode(
        buffer.ctypes.data, buffer.size, states.ctypes.data, symbols.ctypes.data, Rows.of(symbols, contexts),
        TABLES.symbols.ctypes.data,
    )  # fmt: skip
    return None if num_words < 0 else Coded(states, buffer[buffer.size - num_words :])


def decode_compiled(coded: Coded, contexts: Bytes, out: Bytes) -> bool:
    states, words = coded.states.copy(), coded.words
    return not coder().pdkv_rans_decode(
        out.ctypes.data, states.ctypes.data, words.ctypes.data, words.size, Rows.of(out, contexts),
        TABLES.slots.ctypes.data,
    )  # fmt: skip


def guarded(data: bytes) -> tuple[mmap.mmap, int]:
    """A copy that ends where the next page cannot be read or written; the caller keeps the map."""
    size = -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, size + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    protected = libc.mprotect(ctypes.c_void_p(address + size), ctypes.c_size_t(mmap.PAGESIZE), 0)
    assert protected == 0, ctypes.get_errno()
    start = size - len(data)
    pages[start:size] = data
    return pages, start


@compiled
@pytest.mark.parametrize("columns", [1, 7, 16, 24, 32, 80, 128])
def test_compiled_and_numpy_have_the_same_bytes(isa: str, columns: int) -> None:
    symbols, contexts = draw(12, columns)
    coded, reference = encode_compiled(symbols, contexts), encode(symbols, contexts, TABLES)
    assert coded is not None
    assert coded.states.tolist() == reference.states.tolist()
    assert coded.words.tolist() == reference.words.tolist()
    outs = np.zeros((2, *symbols.shape), np.uint8)
    assert decode_compiled(coded, contexts, outs[0])
    assert decode(coded, contexts, TABLES, outs[1])
    assert (outs == symbols).all()


def test_size_is_the_cross_entropy_of_the_tables() -> None:
    symbols, contexts = draw(400, 64)
    coded = encode(symbols, contexts, TABLES)
    frequencies = TABLES.symbols["frequency"][contexts.repeat(200, axis=0) & 15, symbols]
    bits = float(-np.log2(frequencies / SLOTS).sum())
    assert bits <= 16 * coded.words.size + 32 * LANES <= 1.001 * bits + 64 * LANES


@compiled
def test_a_symbol_that_its_table_lacks_is_refused() -> None:
    symbols, contexts = draw(4, 16)
    symbols[2, 5], contexts[1, 5] = 128 + WIDTHS[0] + 1, 0
    assert encode_compiled(symbols, contexts) is None
    with pytest.raises(ValueError, match="table"):
        encode(symbols, contexts, TABLES)


@pytest.mark.parametrize("frequencies", [np.full((1, 256), 15), np.full((17, 256), 16), np.eye(1, 256) * SLOTS])
def test_tables_that_cannot_be_coded_are_refused(frequencies: np.ndarray) -> None:
    with pytest.raises(ValueError, match="expected"):
        Tables(frequencies.astype(np.uint32))


@compiled
@pytest.mark.parametrize("columns", [24, 64])
def test_damaged_words_are_found_and_nothing_else_is_touched(isa: str, columns: int) -> None:
    """Words and symbols each end at a page that cannot be accessed: one byte too far would end the process.

    A flipped bit may be a symbol's alone. Nothing but that remains unseen here; stored values have checksums, too.
    """
    symbols, contexts = draw(16, columns)
    sound = encode(symbols, contexts, TABLES)
    out_pages, out_start = guarded(bytes(symbols.size))
    out = np.frombuffer(out_pages, np.uint8, symbols.size, out_start).reshape(symbols.shape)
    rng = np.random.default_rng(1)
    num_unseen = 0
    for number in range(300):
        states, data = sound.states.copy(), bytearray(sound.words.tobytes())
        match number % 4:
            case 0:
                data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
            case 1:
                del data[2 * int(rng.integers(len(data) // 2)) :]
            case 2:
                data += rng.bytes(2 * int(rng.integers(1, 40)))
            case _:
                data = bytearray(rng.bytes(len(data)))
                states = rng.integers(0, 1 << 32, LANES, dtype=np.uint32)
        pages, start = guarded(bytes(data))
        words = np.frombuffer(pages, np.uint16, len(data) // 2, start)
        results = {
            decode_compiled(Coded(states, words), contexts, out),
            decode(Coded(states, words), contexts, TABLES, np.empty_like(symbols)),
        }
        assert len(results) == 1
        if results == {True}:
            assert number % 4 == 0
            num_unseen += 1
    assert num_unseen < 75 / 2
