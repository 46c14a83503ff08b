"""Linear layers that keep the weights of a quantized checkpoint quantized."""

import torch

from pdkv.kernels.int4_weight import Int4Weight
from pdkv.kernels.linear_int4 import linear_int4
from pdkv.kernels.quantize_fp8 import quantize_rows
from pdkv.models.config import ModelConfig
from pdkv.models.passes import RowPass

_FP8_MULTIPLE = 16
"""torch._scaled_mm takes inputs and outputs by so many."""

_FP8_CAPABILITY = (8, 9)
"""CUDA's, from which on devices multiply FP8: Ada and Hopper."""


class Int4Linear:
    """4-bit weights in groups, with inputs that are not quantized. Computes the same as the dense weights."""

    def __init__(self, weight: Int4Weight, bias: torch.Tensor | None, order: torch.Tensor | None) -> None:
        """`order` (columns,): the input that each column of the weight belongs to; None: they are in order."""
        self._weight = weight
        self._bias = bias
        self._order = order

    def __call__(self, x: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        return linear_int4(self._ordered(x, before), self._weight, self._bias)

    def add(self, x: torch.Tensor, residual: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        return linear_int4(self._ordered(x, before), self._weight, self._bias, residual)

    def _ordered(self, x: torch.Tensor, before: RowPass | None) -> torch.Tensor:
        x = x if before is None else before(x)
        return x if self._order is None else x.index_select(1, self._order)


class Fp8Linear:
    """FP8 weights with a scale for each output, times inputs that are quantized row by row.

    Row-wise scaling is always used, with a whole tensor's scale repeated for each row: it covers every checkpoint, and
    every device that multiplies FP8 supports it, with bfloat16 results.
    """

    def __init__(
        self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, input_scale: torch.Tensor | None
    ) -> None:
        """`weight` (outputs, inputs) float8_e4m3fn, `scales` (outputs,) float32, `input_scale` () float32; None: each
        row has its own scale.
        """
        assert weight.dtype == torch.float8_e4m3fn, weight.dtype
        assert scales.dtype == torch.float32, scales.dtype
        self._weight = weight.contiguous()
        self._scales = scales.reshape(1, -1).contiguous()
        self._bias = bias
        self._input_scale = input_scale

    def __call__(self, x: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        numbers, scales = quantize_rows(x if before is None else before(x), self._input_scale)
        out: torch.Tensor = torch._scaled_mm(
            numbers, self._weight.t(), scale_a=scales, scale_b=self._scales, out_dtype=torch.bfloat16
        )
        return out if self._bias is None else out.add_(self._bias)

    def add(self, x: torch.Tensor, residual: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        return self(x, before).add_(residual)


def why_not_fp8(config: ModelConfig, dtype: torch.dtype, device: torch.device, num_ranks: int) -> str | None:
    """Why a model with FP8 weights cannot be multiplied in FP8 on this device; None: it can, in every layer that has
    FP8 weights.

    One answer for the whole model and all its ranks, since KV depends on it (docs/kv-identity.md).
    """
    quantization = config.quantization
    if quantization is None or quantization.method != "scaled" or quantization.input_scheme is None:
        return "the checkpoint does not quantize inputs to FP8"
    if quantization.block is not None:
        return "its scales are of blocks"
    if dtype != torch.bfloat16:
        return f"the model is computed in {dtype}, and torch multiplies FP8 to bfloat16"
    if device.type != "cuda":
        return f"the device is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_CAPABILITY:
        return f"the device has compute capability {capability[0]}.{capability[1]}, and FP8 needs 8.9"
    heads, kv_heads = config.num_heads // num_ranks, max(1, config.num_kv_heads // num_ranks)
    sizes = [config.hidden_size, config.intermediate_size // num_ranks]
    sizes += [heads * config.head_size, kv_heads * config.head_size]
    if any(size % _FP8_MULTIPLE for size in sizes):
        return f"a rank's layers have sizes {sizes}, and FP8 needs multiples of {_FP8_MULTIPLE}"
    return None
