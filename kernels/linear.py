"""Linear layers over packed weights in host memory (linear.c): float32, bfloat16, and weights of 8 bits.

They exist if the package was built with a compiler: see `available()`; callers also have torch's. Calls release the
GIL. A row's result is bit-identical for any other rows in the call and any number of threads.
"""

import ctypes
import math
import os
import threading
from collections.abc import Sequence
from contextvars import ContextVar
from functools import cache
from typing import Final, Literal, NamedTuple

import torch

from pdkv.host.huge_pages import HugeMemory
from pdkv.kernels.compiled import NUMBER, POINTER, load_library
from pdkv.kernels.host import DTYPES

COLUMNS = 32
"""Outputs of a panel of packed weights."""

BLOCK_ROWS = 126
"""Rows that are laid out at once."""

_CHUNKS = {torch.float32: (16, 1), torch.bfloat16: (32, 2), torch.int8: (64, 1), torch.float8_e4m3fn: (64, 1)}
"""Inputs of a chunk of packed weights, and those that lie together, by their dtype."""

_NUMBERS = {
    torch.float32: DTYPES["float32"], torch.bfloat16: DTYPES["bfloat16"], torch.int8: 3, torch.float8_e4m3fn: 4,
}  # fmt: skip
"""The same dtypes in linear.c."""

GROUP_MULTIPLE = 64
"""Groups of inputs with a scale of their own have multiples of so many."""

_MOST_TO_LAY_OUT = 8
"""CPUs that lay out weights at once, unless steps have more threads."""

_FP8_FACTOR = 256.0
"""linear.c's floats of FP8 numbers are so many times too small."""

_private = HugeMemory()
weights_memory: ContextVar[HugeMemory] = ContextVar("weights_memory", default=_private)
"""Where weights lie that are laid out from now on."""


class Norm:
    """An RMSNorm that a layer's rows go through before they are multiplied."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        """`weight` (inputs,), float32."""
        assert (weight.dim(), weight.dtype, weight.is_contiguous()) == (1, torch.float32, True), weight.dtype
        self.weight = weight  # keeps the memory at `address`
        self.size = len(weight)
        self.address = weight.data_ptr()
        self.epsilon = epsilon


AS_THEY_ARE, NORMED = range(2)
"""What becomes of rows, by numbers in passes.h."""

Gated = Literal["gated", "gated gelu"]
GATED: Final = "gated"
"""Rows of (rows, 2 * inputs), gates and what they gate: silu(gate) * up is multiplied."""

GATED_GELU: Final = "gated gelu"
"""As GATED, with gelu by tanh instead of silu."""

_GATES = {GATED: 2, GATED_GELU: 3}


Weight = torch.Tensor | Sequence[torch.Tensor]
"""(outputs, inputs), or some of its outputs each, in this order: (some of the outputs, inputs)."""


def parts_of(weight: Weight) -> Sequence[torch.Tensor]:
    """The tensors that have a weight's outputs."""
    return [weight] if isinstance(weight, torch.Tensor) else weight


class EightBits(NamedTuple):
    """A weight (outputs, inputs): each number times the scale of its output and group of inputs."""

    numbers: torch.Tensor  # (outputs, inputs) int8, or float8_e4m3fn without NaN
    scales: torch.Tensor  # (outputs, groups) float32; groups of equal sizes, the last one maybe smaller
    group_size: int  # a multiple of GROUP_MULTIPLE; one group may be of any size

    def dense(self) -> torch.Tensor:
        """(outputs, inputs) float32."""
        return self.numbers.float() * _of_inputs(self.scales, self.group_size, self.numbers.shape[1])


def _of_inputs(scales: torch.Tensor, group_size: int, inputs: int) -> torch.Tensor:
    """(rows, groups) -> (rows, inputs), or (rows, 1) where there is one group."""
    return scales if scales.shape[1] == 1 else scales.repeat_interleave(group_size, 1)[:, :inputs]


class _Layer(ctypes.Structure):
    """linear.c's `layer`: what its comments say."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "dtype", "weights_dtype")),
        ("scales", ctypes.c_void_p),
        ("group_chunks", ctypes.c_int64),
    )


class Scratch(threading.local):
    """Scratch memory for one call's data; it grows, and is freed when the calling thread ends."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def address(self, num_bytes: int) -> int:
        """The address of this many bytes, a multiple of 64, valid until the thread's next call."""
        if self._bytes.nbytes < num_bytes:
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)  # torch aligns it
        return self._bytes.data_ptr()


_scratch = Scratch()


@cache
def _library() -> ctypes.CDLL | None:
    layer = ctypes.POINTER(_Layer)
    functions = {
        "pdkv_linear_row_bytes": (NUMBER, [layer]),
        "pdkv_linear_pack": (None, [POINTER, *[NUMBER] * 4, POINTER, *[NUMBER] * 2]),
        "pdkv_linear": (None, [layer, *[POINTER, NUMBER] * 4, NUMBER, POINTER, ctypes.c_double]),
        "pdkv_experts": (None, [ctypes.POINTER(_Experts)]),
        "pdkv_pass_heads": (None, ()),  # which passes.py calls
    }
    return load_library("_linear", functions)


def available() -> bool:
    """Whether the compiled kernels are available. Import torch first: they share its OpenMP threads."""
    return _library() is not None


def pack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Lay out the rows of all parts (outputs, inputs) as (panels, chunks of 2 KiB): for each input (or pair of bfloat16
    inputs), a panel's outputs side by side.

    Padded with zeros to whole panels and chunks, in huge pages shared with other weights. Getting these takes longest,
    so several CPUs of the process take part, whatever threads its steps have.
    """
    library = _library()
    assert library is not None, "ask available() first"
    dtype, inputs = parts[0].dtype, parts[0].shape[1]
    assert all((part.dtype, part.shape[1]) == (dtype, inputs) for part in parts), [part.shape for part in parts]
    chunk, together = _CHUNKS[dtype]
    shape = -(-sum(map(len, parts)) // COLUMNS), -(-inputs // chunk) * chunk // together, COLUMNS, together
    memory = weights_memory.get()
    packed = torch.frombuffer(memory.take(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
    if memory.is_filled:
        return packed
    first, num_threads = 0, max(torch.get_num_threads(), min(len(os.sched_getaffinity(0)), _MOST_TO_LAY_OUT))
    for part in parts:
        part = part if part.stride(1) == 1 else part.contiguous()
        library.pdkv_linear_pack(
            part.data_ptr(), len(part), inputs * dtype.itemsize, part.stride(0) * dtype.itemsize, dtype.itemsize == 1,
            packed.data_ptr(), first, num_threads,
        )  # fmt: skip
        first += len(part)
    return packed


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy beside the packed weights."""
    memory = weights_memory.get()
    copy = torch.frombuffer(memory.take(tensor.nbytes), dtype=tensor.dtype).view(tensor.shape)
    return copy if memory.is_filled else copy.copy_(tensor)


class PackedWeight:
    """A weight as the kernels read it, in its own memory."""

    def __init__(self, weight: Weight | EightBits, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """`weight` (outputs, inputs) of `dtype`, that of inputs and outputs, of bfloat16 or of 8 bits; `bias`
        (outputs,).
        """
        library = _library()
        assert library is not None, "ask available() first"
        parts = parts_of(weight.numbers if isinstance(weight, EightBits) else weight)
        weight_dtype = parts[0].dtype
        self.outputs, self.inputs = sum(map(len, parts)), parts[0].shape[1]
        self.dtype = dtype
        self.packed = pack(parts)
        self.bias = None if bias is None else bias.to(torch.float32, copy=True)
        self._scales: torch.Tensor | None = None  # (panels, groups, COLUMNS)
        self._group_size, group_chunks = self.inputs, 0
        if isinstance(weight, EightBits):
            factor = _FP8_FACTOR if weight_dtype == torch.float8_e4m3fn else 1.0
            padded = torch.nn.functional.pad(weight.scales * factor, (0, 0, 0, -self.outputs % COLUMNS))
            self._scales = padded.view(-1, COLUMNS, padded.shape[1]).transpose(1, 2).contiguous()
            if self._scales.shape[1] > 1:
                assert weight.group_size % GROUP_MULTIPLE == 0, weight.group_size
                assert self._scales.shape[1] == -(-self.inputs // weight.group_size), (weight.scales.shape, self.inputs)
                self._group_size, group_chunks = weight.group_size, weight.group_size // GROUP_MULTIPLE
        else:
            assert weight_dtype in (dtype, torch.bfloat16), (weight_dtype, dtype)
        self._layer = _Layer(
            weights=self.packed.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            inputs=self.inputs,
            outputs=self.outputs,
            dtype=_NUMBERS[dtype],
            weights_dtype=_NUMBERS[weight_dtype],
            scales=None if self._scales is None else self._scales.data_ptr(),
            group_chunks=group_chunks,
        )
        self._address = ctypes.byref(self._layer)
        self._row_bytes = int(library.pdkv_linear_row_bytes(self._address))
        self._run = library.pdkv_linear

    @property
    def num_bytes(self) -> int:
        """Memory of the weight, with its scales."""
        return self.packed.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """The weights (n, inputs) of some outputs (n,) int64, in `dtype`: an embedding's rows, of a head tied to it."""
        panels, columns = outputs // COLUMNS, outputs % COLUMNS
        packed = self.packed.view(torch.int8) if self._scales is not None else self.packed
        rows = packed[panels, :, columns].flatten(1)[:, : self.inputs].view(self.packed.dtype)
        if self._scales is not None:
            scales = _of_inputs(self._scales[panels, :, columns], self._group_size, self.inputs)
            if rows.dtype == torch.float8_e4m3fn:
                scales = scales / _FP8_FACTOR
            rows = rows.float() * scales
        return rows.to(self.dtype)

    def multiply(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        num_threads: int,
        before: Norm | Gated | None = None,
    ) -> torch.Tensor:
        """before(x) @ weight.T + bias + residual, rounded once; x (rows, inputs), residual (rows, outputs).

        The result of `before` is rounded as in torch: a norm once, silu and then its product.
        """
        rows, columns = x.shape
        what, norm, epsilon = AS_THEY_ARE, None, 0.0
        expected = self.inputs
        if isinstance(before, str):
            what, expected = _GATES[before], 2 * self.inputs
        elif before is not None:
            assert before.size == self.inputs, (before.size, self.inputs)
            what, norm, epsilon = NORMED, before.address, before.epsilon
        assert columns == expected, (x.shape, expected)
        assert x.dtype == self.dtype, (x.dtype, self.dtype)
        stride, step = x.stride()
        if step != 1:
            x, stride = x.contiguous(), columns
        added, added_stride = None, 0
        if residual is not None:
            assert (residual.shape, residual.dtype) == ((rows, self.outputs), self.dtype), residual.shape
            residual = residual if residual.stride(1) == 1 else residual.contiguous()
            added, added_stride = residual.data_ptr(), residual.stride(0)
        out = torch.empty((rows, self.outputs), dtype=self.dtype)
        scratch = _scratch.address(min(rows, BLOCK_ROWS) * self._row_bytes)
        self._run(
            self._address, x.data_ptr(), stride, added, added_stride, out.data_ptr(), rows, scratch, num_threads, what,
            norm, epsilon,
        )  # fmt: skip
        return out


class _Experts(ctypes.Structure):
    """linear.c's `experts`: what its comments say."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_up", "down", "x", "residual", "experts", "weights")),
        *((name, ctypes.c_void_p) for name in ("out", "gates", "products", "scratch", "indices")),
        *((name, ctypes.c_int64) for name in ("num", "rows", "chosen", "num_threads")),
    )


class PackedExperts:
    """Gated MLPs of equal sizes, of which each row goes through a few."""

    def __init__(self, gate_up: Sequence[PackedWeight], down: Sequence[PackedWeight]) -> None:
        library = _library()
        assert library is not None, "ask available() first"
        self._num, self._hidden, self._dtype = len(gate_up), gate_up[0].inputs, gate_up[0].dtype
        self._weights = *gate_up, *down  # keeps what `_layers` points at
        shapes = {(weight.outputs, weight.inputs, weight.dtype) for weight in self._weights}
        assert shapes == {
            (2 * down[0].inputs, self._hidden, self._dtype), (self._hidden, down[0].inputs, self._dtype)
        }, shapes  # fmt: skip
        self._layers = [
            (ctypes.c_void_p * len(each))(*[ctypes.addressof(weight._layer) for weight in each])
            for each in (gate_up, down)
        ]
        self._row_bytes = max(weight._row_bytes for weight in self._weights)
        self._run = library.pdkv_experts

    def add(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None,
        num_threads: int,
    ) -> torch.Tensor:  # fmt: skip
        """residual + the weighted sum of each row's experts, rounded once, (n, hidden); products are rounded, too.

        Args:
            x: (n, hidden).
            experts: (n, chosen) int64.
            weights: (n, chosen) float32.
            residual: (n, hidden); None: 0.
        """
        (n, chosen), hidden, dtype = experts.shape, self._hidden, self._dtype
        assert (x.shape, x.dtype) == ((n, hidden), dtype), (x.shape, x.dtype)
        assert (experts.dtype, weights.dtype) == (torch.int64, torch.float32), (experts.dtype, weights.dtype)
        assert weights.shape == experts.shape, (weights.shape, experts.shape)
        assert residual is None or (residual.shape, residual.dtype) == (x.shape, dtype), x.shape
        count = n * chosen
        out, gates, products = (
            torch.empty((rows, size), dtype=dtype)
            for rows, size in ((n, hidden), (count, self._weights[0].outputs), (count, hidden))
        )
        indices = torch.empty(self._num + 2 * count, dtype=torch.int64)
        x, experts, weights = x.contiguous(), experts.contiguous(), weights.contiguous()
        residual = None if residual is None else residual.contiguous()
        args = _Experts(
            *map(ctypes.addressof, self._layers), x.data_ptr(), None if residual is None else residual.data_ptr(),
            experts.data_ptr(), weights.data_ptr(), out.data_ptr(), gates.data_ptr(), products.data_ptr(),
            _scratch.address(min(count, BLOCK_ROWS) * self._row_bytes), indices.data_ptr(), self._num, n, chosen,
            num_threads,
        )  # fmt: skip
        self._run(ctypes.byref(args))
        return out
