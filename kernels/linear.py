"""Linear layers over packed weights in host memory (linear.c): float32 and bfloat16.

They are there where a compiler was at hand when the package was built: `available()` says so, callers have torch's
beside. Calls release the GIL. A row's result does not depend on the rows beside it or on the number of threads, to the
bit.
"""

import ctypes
import threading
from functools import cache
from typing import Final, Literal

import torch

from pdkv.host.huge_pages import HugeMemory
from pdkv.kernels.compiled import NUMBER, POINTER, load_library
from pdkv.kernels.host import DTYPES

COLUMNS = 32
"""Outputs of a panel of packed weights."""

BLOCK_ROWS = 126
"""Rows that are laid out at once."""

_CHUNK_INPUTS = {torch.float32: 16, torch.bfloat16: 32}
"""Inputs of a chunk of packed weights, by their dtype."""

_weights = HugeMemory()


class Norm:
    """An RMSNorm that a layer's rows go through before they are multiplied."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        """`weight` (inputs,), float32."""
        assert (weight.dim(), weight.dtype, weight.is_contiguous()) == (1, torch.float32, True), weight.dtype
        self.weight = weight  # keeps the memory at `address`
        self.size = len(weight)
        self.address = weight.data_ptr()
        self.epsilon = epsilon


AS_THEY_ARE, NORMED, _GATED = range(3)
"""What becomes of rows, by numbers in passes.h."""

GATED: Final = "gated"
"""Rows of (rows, 2 * inputs), gates and what they gate: silu(gate) * up is multiplied."""


class _Layer(ctypes.Structure):
    """linear.c's `layer`: what its comments say."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "dtype", "weights_dtype")),
    )


class Scratch(threading.local):
    """Room for what one call lays out; grows, and ends with the thread that calls."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def address(self, num_bytes: int) -> int:
        """Where that many bytes are, at a multiple of 64, until the thread's next call."""
        if len(self._bytes) < num_bytes:
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)  # torch aligns it
        return self._bytes.data_ptr()


_scratch = Scratch()


@cache
def _library() -> ctypes.CDLL | None:
    layer = ctypes.POINTER(_Layer)
    functions = {
        "pdkv_linear_row_bytes": (NUMBER, [layer]),
        "pdkv_linear": (None, [layer, *[POINTER, NUMBER] * 4, NUMBER, POINTER, ctypes.c_double]),
        "pdkv_pass_heads": (None, ()),  # which passes.py calls
    }
    return load_library("_linear", functions)


def available() -> bool:
    """Whether the compiled kernels are there. Import torch first: they share its OpenMP threads."""
    return _library() is not None


def pack(weight: torch.Tensor) -> torch.Tensor:
    """(outputs, inputs) as (panels, chunks of 2 KiB): a panel's outputs side by side, by input, or by pair of bfloat16.

    Padded with zeros to whole panels and chunks. In huge pages, beside other weights.
    """
    outputs, inputs = weight.shape
    chunk = _CHUNK_INPUTS[weight.dtype]
    padding = (0, -inputs % chunk, 0, -outputs % COLUMNS)
    if any(padding):
        weight = torch.nn.functional.pad(weight, padding)
    in_pair = chunk // 16
    panels = weight.reshape(-1, COLUMNS, weight.shape[1] // in_pair, in_pair).transpose(1, 2)
    packed = torch.frombuffer(_weights.take(panels.nbytes), dtype=weight.dtype).view(panels.shape)
    return packed.copy_(panels)


class PackedWeight:
    """A weight as the kernels read it, in its own memory."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """`weight` (outputs, inputs) of `dtype`, that of inputs and outputs, or of bfloat16; `bias` (outputs,)."""
        library = _library()
        assert library is not None, "ask available() first"
        assert weight.dtype in (dtype, torch.bfloat16), (weight.dtype, dtype)
        self.outputs, self.inputs = weight.shape
        self.dtype = dtype
        self.packed = pack(weight)
        self.bias = None if bias is None else bias.to(torch.float32, copy=True)
        self._layer = _Layer(
            weights=self.packed.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            inputs=self.inputs,
            outputs=self.outputs,
            dtype=DTYPES[str(dtype).removeprefix("torch.")],
            weights_dtype=DTYPES[str(weight.dtype).removeprefix("torch.")],
        )
        self._address = ctypes.byref(self._layer)
        self._row_bytes = int(library.pdkv_linear_row_bytes(self._address))
        self._run = library.pdkv_linear

    def multiply(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        num_threads: int,
        before: Norm | Literal["gated"] | None = None,
    ) -> torch.Tensor:
        """before(x) @ weight.T + bias + residual, rounded once; x (rows, inputs), residual (rows, outputs).

        What `before` gives is rounded where torch rounds it: a norm once, silu and its product one after the other.
        """
        rows, columns = x.shape
        what, norm, epsilon = AS_THEY_ARE, None, 0.0
        expected = self.inputs
        if before == GATED:
            what, expected = _GATED, 2 * self.inputs
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
