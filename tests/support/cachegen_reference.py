"""`cachegen` and its rANS in numpy: what the C code computes, bit by bit, some hundred times slower."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.kernels.cachegen import HIGHEST, Bytes, Floats, Model, Parts, Shape
from pdkv.kernels.rans import BITS, LANES, MAX_TABLES, SLOTS, States, Tables, Words

_LOW = 1 << 16
_LARGEST = 127
_ZERO = 128
_MAX_SHIFT = 15
_SMALLEST = np.float32(1e-30)
_ROUNDS = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer
_BFLOAT16_MAX = np.float32(3.3895314e38)
_FLOAT16_MAX = np.float32(65504.0)


def as_floats(data: Bytes, dtype: str) -> Floats:
    """Flat bytes of a dtype ("float32", "bfloat16" or "float16") as float32."""
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(dtype).astype(np.float32)


def store_floats(numbers: Floats, dtype: str, out: Bytes) -> None:
    """Write finite numbers as a dtype, rounded to nearest, ties to even; too large numbers become the largest one.

    Args:
        out: flat; written.
    """
    if dtype == "bfloat16":
        bits = numbers.clip(-_BFLOAT16_MAX, _BFLOAT16_MAX).reshape(-1).view(np.uint32)
        out.view(np.uint16)[:] = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    elif dtype == "float16":
        out.view(np.float16)[:] = numbers.reshape(-1).clip(-_FLOAT16_MAX, _FLOAT16_MAX)
    else:
        out.view(np.float32)[:] = numbers.reshape(-1)


# --- rANS ------------------------------------------------------------------------------------------------------------


class Coded(NamedTuple):
    """Symbols as coded by the encoder."""

    states: States  # (LANES,)
    words: Words  # at most one a symbol


def encode_symbols(symbols: Bytes, contexts: Bytes, tables: Tables) -> Coded:
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


def decode_symbols(coded: Coded, contexts: Bytes, tables: Tables, out: Bytes) -> bool:
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


# --- cachegen --------------------------------------------------------------------------------------------------------


def encode(images: Bytes, shape: Shape, factors: Floats, model: Model) -> Parts | None:
    """As cachegen.encode."""
    parts = Parts.empty(shape, 0)
    numbers = as_floats(images, shape.dtype).reshape(shape[:5])
    words: list[Words] = []
    for layer in range(shape.layers):
        symbols = np.empty((shape.planes, shape.num_tokens, shape.head_size), np.uint8)
        for plane in range(shape.planes):
            rows = numbers[:, layer, plane].reshape(shape.num_tokens, shape.head_size)
            factor = factors[layer, int(plane >= shape.planes // 2)]
            if not _quantise(rows, factor, (layer, plane), parts, model, symbols[plane]):
                return None
        coded = encode_symbols(symbols.reshape(-1, shape.head_size), parts.contexts[layer], model.tables)
        parts.states[layer], parts.num_words[layer] = coded.states, coded.words.size
        words.append(coded.words)
    return parts._replace(words=np.concatenate(words))


def _quantise(
    rows: Floats, factor: np.float32, index: tuple[int, int], parts: Parts, model: Model, symbols: Bytes
) -> bool:
    """Fill a plane's parts and symbols, (num_tokens, head_size); False: not finite."""
    with np.errstate(all="ignore"):
        means = rows.cumsum(axis=0, dtype=np.float32)[-1] / np.float32(len(rows))
        anchor_step = np.abs(means).max() / np.float32(_LARGEST)
        anchors = _rounded(means * _inverse(anchor_step))
        deltas = rows - anchors * anchor_step
        sizes = np.abs(deltas)
        total = sizes.cumsum(axis=0, dtype=np.float32)[-1].cumsum(dtype=np.float32)[-1]
        step = factor * (total / np.float32(rows.size))
        if not (step <= HIGHEST and anchor_step <= HIGHEST):
            return False
        shifts = np.zeros(rows.shape[1], np.int32)
        most = step * np.float32(_LARGEST + 0.5)
        for _ in range(_MAX_SHIFT):
            shifts += sizes.max(axis=0) > most * (1 << shifts).astype(np.float32)
        counts = _rounded(deltas * _inverse(step * (1 << shifts).astype(np.float32))).astype(np.int32)
    tops, sums = np.abs(counts).max(axis=0), np.abs(counts).sum(axis=0)
    fits = (sums[:, None] * 256 <= model.means * len(rows)) & (tops[:, None] <= model.limits)
    fits[:, -1] = True
    parts.anchor_steps[index], parts.steps[index], parts.anchors[index] = anchor_step, step, anchors
    parts.contexts[index] = shifts << 4 | fits.argmax(axis=1)
    symbols[:] = counts + _ZERO
    return True


def _rounded(x: Floats) -> Floats:
    x = np.where(x < _LARGEST, x, np.float32(_LARGEST))
    x = np.where(x > -_LARGEST, x, np.float32(-_LARGEST))
    return (x + _ROUNDS) - _ROUNDS


def _inverse(steps: npt.NDArray[np.float32] | np.float32) -> Floats:
    inverses: Floats = np.where(steps > _SMALLEST, np.float32(1) / steps, np.float32(0))
    return inverses


def decode(parts: Parts, shape: Shape, model: Model, out: Bytes) -> bool:
    """As cachegen.decode."""
    numbers = np.empty(shape[:5], np.float32)
    first = 0
    for layer, num_words in enumerate(parts.num_words.tolist()):
        symbols = np.empty((shape.planes * shape.num_tokens, shape.head_size), np.uint8)
        coded = Coded(parts.states[layer], parts.words[first : first + num_words])
        first += num_words
        if not decode_symbols(coded, parts.contexts[layer], model.tables, symbols):
            return False
        anchors = parts.anchors[layer] * parts.anchor_steps[layer, :, None]
        steps = parts.steps[layer, :, None] * (1 << (parts.contexts[layer] >> 4).astype(np.int32)).astype(np.float32)
        counts = symbols.reshape(shape.planes, shape.num_tokens, shape.head_size).astype(np.float32) - _ZERO
        restored = anchors[:, None] + counts * steps[:, None]
        by_unit = restored.reshape(shape.planes, shape.units, shape.tokens, shape.head_size)
        numbers[:, layer] = by_unit.swapaxes(0, 1)
    store_floats(numbers, shape.dtype, out)
    return True
