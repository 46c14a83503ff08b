"""A linear layer: its weight laid out once for its device, fused with the operations before and after if possible."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from pdkv.host.processor import flags
from pdkv.kernels.linear import GATED_GELU, EightBits, PackedWeight, Weight, available, parts_of
from pdkv.models.passes import CompiledRMSNorm, RMSNorm, RowPass

_SAMPLED_ROWS = 8
"""Rows by which a weight that is not of bfloat16 is recognised: nearly always the first of them."""

_ROWS_BYTES = 1 << 20
"""Bytes of float32 rows that are narrowed and compared while they are in a cache."""


class Linear(Protocol):
    """x (n, in) -> (n, out), or x of another shape, which `before` turns into (n, in)."""

    def __call__(self, x: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        """before(x) @ weight.T + bias."""

    def add(self, x: torch.Tensor, residual: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        """before(x) @ weight.T + bias + residual; `residual` (n, out) may be overwritten, so the caller must not use it
        afterwards.
        """


class PlainLinear:
    """A dense weight (out, in), on any device."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        if _is_row(x):
            return self._row(x, before)
        return F.linear(_after(before, x), self.weight, self._bias)

    def add(self, x: torch.Tensor, residual: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        if _is_row(x):
            return self._row(x, before, residual)
        x = _after(before, x)
        if _adds_in_place(x):
            residual = residual if self._bias is None else residual.add_(self._bias)
            return residual.addmm_(x, self.weight.t())
        return F.linear(x, self.weight, self._bias).add_(residual)

    def gated(self, x: torch.Tensor, before: RowPass | None, act: RowPass) -> torch.Tensor | None:
        """act(before(x) @ weight.T + bias) by one kernel; None: there is none for these rows."""
        return self._row(x, before, act=act) if _is_row(x) else None

    def _row(
        self, x: torch.Tensor, before: RowPass | None, residual: torch.Tensor | None = None, act: RowPass | None = None
    ) -> torch.Tensor:
        from pdkv.kernels.linear_row_triton import linear_row_triton  # Triton, which a CPU need not have

        norm = (before.weight, before.fused.epsilon) if isinstance(before, RMSNorm) else None
        x = x if norm is not None else _after(before, x)
        name: Literal["silu", "gelu"] | None = None
        if act is not None:
            name = "gelu" if act.fused == GATED_GELU else "silu"
        return linear_row_triton(x, self.weight, self._bias, residual, norm, name)


class PackedLinear:
    """A weight in oneDNN's blocked layout: 2x faster for few rows, since nothing is reordered per call (CPU)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias
        # The overloads by name: resolving them at every call costs more than a small matrix product.
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._linear_add = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        out: torch.Tensor = self._linear(_after(before, x), self._weight, self._bias, "none", [], "")
        return out

    def add(self, x: torch.Tensor, residual: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        out: torch.Tensor = self._linear_add(_after(before, x), residual, self._weight, self._bias, "add")
        return out


class CompiledLinear:
    """A weight laid out for the compiled kernels (docs/cpu-linears.md): near memory bandwidth from 1 row to 64."""

    def __init__(
        self, weight: Weight | EightBits, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """`dtype` of inputs and outputs; None: the weight's."""
        if not isinstance(weight, EightBits):
            parts = parts_of(weight)
            dtype = dtype or parts[0].dtype
            weight = _narrowed_if_all(parts, dtype)
        assert dtype is not None, "a weight of 8 bits does not say it"
        self.weight = PackedWeight(weight, bias, dtype)

    def __call__(self, x: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        return self.weight.multiply(x, None, torch.get_num_threads(), None if before is None else before.fused)

    def add(self, x: torch.Tensor, residual: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        return self.weight.multiply(x, residual, torch.get_num_threads(), None if before is None else before.fused)


def _is_row(x: torch.Tensor) -> bool:
    """Whether one kernel multiplies x with what is done before and behind: a single row is bound by memory, which
    float32 on a GPU need not be.
    """
    return x.is_cuda and len(x) == 1 and x.dtype != torch.float32


def _adds_in_place(x: torch.Tensor) -> bool:
    """Whether a product adds to memory that is there for no more than writing it: not on a CPU."""
    return x.is_cuda


def _after(before: RowPass | None, x: torch.Tensor) -> torch.Tensor:
    return x if before is None else before(x)


def narrowed(weight: torch.Tensor) -> torch.Tensor:
    """The weight as bfloat16 if that is lossless, as for a bfloat16 checkpoint computed in float32: half the bytes to
    read.

    The test reads only a few rows of other weights, and each number once of a weight that is narrowed.
    """
    if weight.dtype != torch.float32 or not _is_narrow(weight[:: max(1, len(weight) // _SAMPLED_ROWS)]):
        return weight
    narrow = torch.empty(weight.shape, dtype=torch.bfloat16)
    rows = max(1, _ROWS_BYTES // (4 * weight.shape[1]))
    for start in range(0, len(weight), rows):
        some = weight[start : start + rows]
        if not torch.equal(narrow[start : start + rows].copy_(some).float(), some):
            return weight
    return narrow


def _narrowed_if_all(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> Sequence[torch.Tensor]:
    narrow = [narrowed(part) for part in parts]
    return narrow if len({part.dtype for part in narrow}) == 1 else [part.to(dtype) for part in parts]


def _is_narrow(weight: torch.Tensor) -> bool:
    return torch.equal(weight.bfloat16().float(), weight)


LinearKind = Literal["compiled", "packed", "plain"]
"""CompiledLinear, PackedLinear, PlainLinear."""


def linear_kind(dtype: torch.dtype, device: torch.device, choice: Literal["auto", "torch"] = "auto") -> LinearKind:
    """The kind of linear layers for `dtype`, a function of build, processor and arguments alone, so that engines agree.

    `choice` torch: without pdkv's kernels.
    """
    if choice == "auto" and can_compile(dtype, device):
        return "compiled"
    return "packed" if can_pack(dtype, device) else "plain"


def can_compile(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build and this processor have compiled kernels for `dtype`, and oneDNN has no better ones (AMX)."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16) or not available():
        return False
    return dtype == torch.float32 or "amx_bf16" not in flags()


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch and this processor have oneDNN's packed layers for `dtype`. Tries one small layer."""
    if device.type != "cpu":
        return False
    try:
        x, weight = torch.ones(2, 32, dtype=dtype), torch.eye(32, dtype=dtype)
        packed = PackedLinear(weight)
        return bool(torch.equal(packed(x), x) and torch.equal(packed.add(x, x), x + x))
    except (AttributeError, RuntimeError):  # an operator that is absent or refuses the dtype: the plain layer serves
        return False


def make_linear(
    weight: Weight, bias: torch.Tensor | None, kind: LinearKind, dtype: torch.dtype | None = None
) -> Linear:
    """The layer for a weight (outputs, inputs) that is already in its final dtype and on its device.

    Args:
        dtype: of inputs and outputs; None: the weight's. Compiled layers of float32 also read bfloat16.
    """
    if kind == "compiled":
        return CompiledLinear(weight, bias, dtype)
    parts = parts_of(weight)
    dense = parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts))
    return PackedLinear(dense, bias) if kind == "packed" else PlainLinear(dense, bias)


def make_norm(weight: torch.Tensor, epsilon: float, kind: LinearKind) -> RMSNorm:
    """The norm to use before layers of that kind."""
    return CompiledRMSNorm(weight, epsilon) if kind == "compiled" else RMSNorm(weight, epsilon)
