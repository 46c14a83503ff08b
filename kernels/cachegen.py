"""KV as quantised deltas from anchors, entropy coded: CacheGen (SIGCOMM '24, arXiv:2310.07240), whole layers at a time.

A plane is K, or V, of one head and layer: (tokens, head_size). Each of its channels has an anchor, the mean over the
tokens, in 127ths of the plane's largest; a token's delta from it is coded in steps. The plane's step is a factor times
its mean absolute delta; each channel doubles the step until its largest delta fits. A channel's mean |delta| selects
its table of symbol frequencies; rans.py codes the symbols of a layer. cachegen.c produces the same bytes, in float32
without fused operations; sums are made token by token, then channel by channel.
"""

import ctypes
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.kernels import rans
from pdkv.kernels.compiled import NUMBER, load_library
from pdkv.kernels.floats import as_floats, store_floats
from pdkv.kernels.host import DTYPES

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

HIGHEST: Final = 1e30
"""Larger steps cannot be coded, so that every decoded number is finite."""

_LARGEST = 127
_ZERO = 128
_MAX_SHIFT = 15
_SMALLEST = np.float32(1e-30)
_ROUNDS = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer
_DONE, _NOT_FINITE = 0, 1


class Shape(NamedTuple):
    """The shape of images side by side: (units, layers, planes, tokens, head_size); planes: K of each head, then V of
    each.
    """

    units: int
    layers: int
    planes: int
    tokens: int  # of a unit
    head_size: int
    dtype: str  # one of host.DTYPES

    @property
    def num_tokens(self) -> int:
        """Tokens of all units."""
        return self.units * self.tokens

    @property
    def layer_symbols(self) -> int:
        """Numbers of one layer, in all units."""
        return self.planes * self.num_tokens * self.head_size


class Model(NamedTuple):
    """How to code channels, by ranges of their mean absolute delta."""

    tables: rans.Tables
    means: Ints  # (MAX_TABLES,) the largest mean |delta| for each table, in steps / 256; ascending
    limits: Ints  # (MAX_TABLES,) the largest |delta| that each has, in steps; the last one's is 127


class Parts(NamedTuple):
    """The parts of coded images."""

    anchor_steps: Floats  # (layers, planes)
    steps: Floats  # (layers, planes)
    anchors: npt.NDArray[np.int8]  # (layers, planes, head_size)
    contexts: Bytes  # (layers, planes, head_size): doublings of the step << 4 | table
    states: rans.States  # (layers, LANES)
    num_words: npt.NDArray[np.int64]  # (layers,)
    words: rans.Words  # of all layers, one behind the other

    @classmethod
    def empty(cls, shape: Shape, num_words: int) -> "Parts":
        """Arrays to be filled."""
        planes = (shape.layers, shape.planes)
        return cls(
            np.empty(planes, np.float32),
            np.empty(planes, np.float32),
            np.empty((*planes, shape.head_size), np.int8),
            np.empty((*planes, shape.head_size), np.uint8),
            np.empty((shape.layers, rans.LANES), np.uint32),
            np.empty(shape.layers, np.int64),
            np.empty(num_words, np.uint16),
        )


class _Args(ctypes.Structure):
    """cachegen.c's `cachegen`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("images", "anchor_steps", "steps", "anchors", "contexts", "states")),
        *((name, ctypes.c_void_p) for name in ("words", "num_words", "factors", "tables", "means", "limits")),
        *((name, ctypes.c_void_p) for name in ("row_scratch", "channel_scratch", "count_scratch", "symbols")),
        ("word_scratch", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("max_words", "units", "layers", "planes", "tokens", "head_size")),
        ("dtype", ctypes.c_int64),
    )


@cache
def _library() -> ctypes.CDLL | None:
    names = ("pdkv_cachegen_encode", "pdkv_cachegen_decode")
    return load_library("_codec", dict.fromkeys(names, (NUMBER, [ctypes.POINTER(_Args)])))


def available() -> bool:
    """Whether the compiled coder is available; without it numpy is used, some hundred times slower."""
    return _library() is not None


def encode(images: Bytes, shape: Shape, factors: Floats, model: Model) -> Parts | None:
    """Code images. Releases the GIL.

    Args:
        images: flat, of the shape.
        factors: (layers, 2), the steps of K and V as multiples of the mean absolute delta; positive.

    Returns:
        None: there are NaN, infinities, or numbers too large for a step.
    """
    assert factors.shape == (shape.layers, 2)
    assert factors.dtype == np.float32
    assert images.size == shape.layers * shape.units * shape.planes * shape.tokens * shape.head_size * _width(shape)
    if (library := _library()) is None:
        return _encode_reference(images, shape, factors, model)
    parts = Parts.empty(shape, shape.layers * shape.layer_symbols)
    scratch = _Scratch(shape)
    args = _args(images, shape, parts, scratch, model)
    args.factors = factors.ctypes.data
    args.tables = model.tables.symbols.ctypes.data
    state: int = library.pdkv_cachegen_encode(args)
    if state == _NOT_FINITE:
        return None
    assert state == _DONE
    return parts._replace(words=parts.words[: int(parts.num_words.sum())])


def decode(parts: Parts, shape: Shape, model: Model, out: Bytes) -> bool:
    """Decode images. Releases the GIL. Never reads or writes outside the arrays, whatever the parts hold.

    Args:
        parts: of the shape, contiguous; `words` are those of all layers, steps are within 0 and HIGHEST.
        out: flat, of the shape; written.

    Returns:
        Whether the words are a valid encoder's output. If not, `out` is undefined.
    """
    assert parts.words.size == parts.num_words.sum()
    assert out.size == shape.layers * shape.units * shape.planes * shape.tokens * shape.head_size * _width(shape)
    if (library := _library()) is None:
        return _decode_reference(parts, shape, model, out)
    scratch = _Scratch(shape)
    parts = parts._replace(states=parts.states.copy())  # which the kernel goes on with
    args = _args(out, shape, parts, scratch, model)
    args.tables = model.tables.slots.ctypes.data
    state: int = library.pdkv_cachegen_decode(args)
    return state == _DONE


def _width(shape: Shape) -> int:
    return 4 if shape.dtype == "float32" else 2


class _Scratch:
    """Memory that a call writes and that is not read afterwards."""

    def __init__(self, shape: Shape) -> None:
        self.rows = np.empty(shape.num_tokens * shape.head_size, np.float32)
        self.channels = np.empty(3 * shape.head_size, np.float32)
        self.counts = np.empty(2 * shape.head_size, np.int32)
        self.symbols = np.empty(shape.layer_symbols, np.uint8)
        self.words = np.empty(shape.layer_symbols, np.uint16)


def _args(images: Bytes, shape: Shape, parts: Parts, scratch: _Scratch, model: Model) -> _Args:
    """The caller keeps all arrays."""
    assert all(array.flags.c_contiguous for array in (images, *parts))
    return _Args(
        images=images.ctypes.data,
        **{name: array.ctypes.data for name, array in parts._asdict().items()},
        means=model.means.ctypes.data,
        limits=model.limits.ctypes.data,
        row_scratch=scratch.rows.ctypes.data,
        channel_scratch=scratch.channels.ctypes.data,
        count_scratch=scratch.counts.ctypes.data,
        symbols=scratch.symbols.ctypes.data,
        word_scratch=scratch.words.ctypes.data,
        max_words=parts.words.size,
        **{name: value for name, value in shape._asdict().items() if name != "dtype"},
        dtype=DTYPES[shape.dtype],
    )


# --- numpy --------------------------------------------------------------------------------------------------------


def _encode_reference(images: Bytes, shape: Shape, factors: Floats, model: Model) -> Parts | None:
    """What the kernel does."""
    parts = Parts.empty(shape, 0)
    numbers = as_floats(images, shape.dtype).reshape(shape[:5])
    words: list[rans.Words] = []
    for layer in range(shape.layers):
        symbols = np.empty((shape.planes, shape.num_tokens, shape.head_size), np.uint8)
        for plane in range(shape.planes):
            rows = numbers[:, layer, plane].reshape(shape.num_tokens, shape.head_size)
            factor = factors[layer, int(plane >= shape.planes // 2)]
            if not _quantise(rows, factor, (layer, plane), parts, model, symbols[plane]):
                return None
        coded = rans.encode(symbols.reshape(-1, shape.head_size), parts.contexts[layer], model.tables)
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


def _decode_reference(parts: Parts, shape: Shape, model: Model, out: Bytes) -> bool:
    """What the kernel does."""
    numbers = np.empty(shape[:5], np.float32)
    first = 0
    for layer, num_words in enumerate(parts.num_words.tolist()):
        symbols = np.empty((shape.planes * shape.num_tokens, shape.head_size), np.uint8)
        coded = rans.Coded(parts.states[layer], parts.words[first : first + num_words])
        first += num_words
        if not rans.decode(coded, parts.contexts[layer], model.tables, symbols):
            return False
        anchors = parts.anchors[layer] * parts.anchor_steps[layer, :, None]
        steps = parts.steps[layer, :, None] * (1 << (parts.contexts[layer] >> 4).astype(np.int32)).astype(np.float32)
        counts = symbols.reshape(shape.planes, shape.num_tokens, shape.head_size).astype(np.float32) - _ZERO
        restored = anchors[:, None] + counts * steps[:, None]
        by_unit = restored.reshape(shape.planes, shape.units, shape.tokens, shape.head_size)
        numbers[:, layer] = by_unit.swapaxes(0, 1)
    store_floats(numbers, shape.dtype, out)
    return True
