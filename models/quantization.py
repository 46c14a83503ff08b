"""How a checkpoint's weights are quantized, by its `quantization_config`. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pdkv.base.limits import clip
from pdkv.errors import ModelError

Method = Literal["scaled", "packed", "gptq", "awq", "int8"]

InputScheme = Literal["static", "dynamic"]
"""Scales of FP8 inputs: X.input_scale of the checkpoint, or one of each token."""


class Quantization(NamedTuple):
    """The format of quantized weights. Which layers are quantized follows from the names of their tensors.

    Methods, by the tensors of a layer `X` with a weight (out, in):
        scaled: X.weight in 8 bits (FP8 e4m3 or int8), X.weight_scale or X.weight_scale_inv that broadcasts, or has one
            number for each block of (rows, columns).
        packed: X.weight_packed (out, in * bits / 32) int32, X.weight_scale (out, groups): compressed-tensors.
        gptq: X.qweight (in * bits / 32, out) int32, X.qzeros (groups, out * bits / 32), X.scales (groups, out), and
            X.g_idx (in,) where the groups are no equal parts.
        int8: a dense X.weight, which is quantized when it is loaded (`--quantization int8`).
        awq: X.qweight (in, out * bits / 32) int32 and the others as of gptq, words in an order of their own.
    """

    method: Method
    bits: int = 8
    block: tuple[int, int] | None = None  # of "scaled"
    group_size: int | None = None  # inputs that share scales, of the others; 0: all of them; None: not told
    zero_offset: int = 0  # of "gptq": what a stored zero point lacks
    input_scheme: InputScheme | None = None  # of FP8, as the checkpoint has it; None: inputs are not quantized
    fp8_inputs: bool = False  # inputs are quantized as the scheme says: KV is other KV than with dense weights
    in_8_bits: bool = False  # a CPU multiplies the numbers themselves: KV is other KV, too


def read_quantization(path: Path, config: object, method: str | None = None) -> Quantization:
    """Read the field `quantization_config` of the config.json at `path`, or a similar object; `method` applies if it
    names none.

    Raises:
        ModelError: an unsupported method or variant; names the field and its value.
    """
    if not isinstance(config, Mapping):
        raise ModelError(f"{path}: quantization_config must be an object, got {clip(repr(config))}")
    method = config.get("quant_method", method)
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise _unsupported(path, "quant_method", method, ", ".join(sorted(_READERS)))
    return reader(path, config)


def _unsupported(path: Path, field: str, value: object, known: str) -> ModelError:
    return ModelError(f"{path}: quantization_config.{field} {clip(repr(value))} is not supported; known: {known}")


def _read_fp8(path: Path, config: Mapping[str, Any]) -> Quantization:
    block = _block(path, "weight_block_size", config.get("weight_block_size"))
    scheme = _one_of(path, config, "activation_scheme", ("static", "dynamic"), "dynamic")
    return Quantization("scaled", block=block, input_scheme=scheme)


def _read_modelopt(path: Path, config: Mapping[str, Any]) -> Quantization:
    _one_of(path, config, "quant_algo", ("FP8",))
    return Quantization("scaled", input_scheme="static")


def _read_gptq(path: Path, config: Mapping[str, Any]) -> Quantization:
    bits = _one_of(path, config, "bits", (2, 4, 8))
    version = _one_of(path, config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    return Quantization("gptq", bits=bits, group_size=_group_size(path, config), zero_offset=version == "gptq")


def _read_awq(path: Path, config: Mapping[str, Any]) -> Quantization:
    _one_of(path, config, "version", ("gemm", "GEMM"), "gemm")
    return Quantization("awq", bits=_one_of(path, config, "bits", (4,)), group_size=_group_size(path, config))


def _read_compressed(path: Path, config: Mapping[str, Any]) -> Quantization:
    """The formats of compressed-tensors; all of its groups have to be alike."""
    groups = config.get("config_groups")
    named = groups.items() if isinstance(groups, Mapping) else ()
    found = [_read_group(path, f"config_groups.{name}", group) for name, group in named]
    if not found or any(group != found[0] for group in found):
        raise _unsupported(path, "config_groups", groups, "groups that are all alike")
    (kind, bits, symmetric, block, group_size, scheme) = found[0]
    is_packed = config.get("format") == "pack-quantized"
    if is_packed and kind == "int" and bits in (4, 8) and symmetric:
        return Quantization("packed", bits=4 if bits == 4 else 8, group_size=group_size)
    if not is_packed and bits == 8 and symmetric and kind in ("float", "int"):
        _one_of(path, config, "format", ("float-quantized", "int-quantized", "naive-quantized"))
        return Quantization("scaled", block=block, input_scheme=scheme)
    known = "symmetric weights: 4 or 8 bits in the format pack-quantized, else 8"
    raise _unsupported(path, "config_groups", groups, known)


class _Group(NamedTuple):
    """How compressed-tensors quantizes some layers."""

    kind: object
    bits: object
    symmetric: bool
    block: tuple[int, int] | None
    group_size: int | None
    input_scheme: InputScheme | None


def _read_group(path: Path, field: str, group: object) -> _Group:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        raise _unsupported(path, field, group, "an object with weights")
    block = _block(path, f"{field}.weights.block_structure", weights.get("block_structure"))
    kind, inputs = weights.get("type", "int"), group.get("input_activations")
    scheme: InputScheme | None = None
    if kind == "float" and isinstance(inputs, Mapping) and (inputs.get("type"), inputs.get("num_bits")) == ("float", 8):
        scheme = "dynamic" if inputs.get("dynamic") else "static"
    is_symmetric, group_size = weights.get("symmetric", True) is True, _group_size(path, weights, f"{field}.weights.")
    return _Group(kind, weights.get("num_bits"), is_symmetric, block, group_size, scheme)


def _group_size(path: Path, config: Mapping[str, Any], prefix: str = "") -> int | None:
    """As of Quantization; -1 says what 0 does there."""
    value = config.get("group_size")
    if value is None:
        return None
    if type(value) is not int or (value < 1 and value != -1):
        raise _unsupported(path, f"{prefix}group_size", value, "a positive number, or -1 for all inputs")
    return max(value, 0)


def _block(path: Path, field: str, value: object) -> tuple[int, int] | None:
    """(rows, columns) that a scale is for; None: it is for more."""
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value):
        return value[0], value[1]
    raise _unsupported(path, field, value, "two positive numbers, of rows and columns")


def _one_of(path: Path, config: Mapping[str, Any], field: str, known: tuple[Any, ...], default: Any = None) -> Any:
    value = config.get(field, default)
    if value not in known:
        raise _unsupported(path, field, value, ", ".join(map(str, known)))
    return known[known.index(value)]  # 4 for 4.0


_READERS = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fp8,
    "modelopt": _read_modelopt,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed,
}
