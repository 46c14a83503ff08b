"""What a Hugging Face model directory says about its model: a checked `ModelConfig`. No torch."""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from pdkv.errors import ConfigError, ModelError
from pdkv.models.config_fields import check_fields, check_rope_fields, ignored_sampling_defaults

logger = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed for longer contexts."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0  # llama3 only, as the rest
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A dense decoder-only model: RMSNorm, RoPE, grouped-query attention, SiLU-gated MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool  # of the q, k and v projections
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: Dtype
    sliding_window: int | None

    @property
    def num_positions(self) -> int:
        """Positions that the model computes: linear scaling stretches those it was trained with (as vLLM counts)."""
        if self.rope_scaling is not None and self.rope_scaling.kind == "linear":
            return int(self.max_position_embeddings * self.rope_scaling.factor)
        return self.max_position_embeddings


class _Family(NamedTuple):
    """What an architecture fixes and its config.json does not say."""

    attention_bias: bool | None  # None: the field `attention_bias`
    attention_output_bias: bool | None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    reads_window: bool = True


_FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(None, None, mlp_bias=None, reads_window=False),
    "MistralForCausalLM": _Family(False, False),
    "Qwen2ForCausalLM": _Family(True, False),
    "Qwen3ForCausalLM": _Family(None, None, qk_norm=True),
}


class _Fields:
    """Typed reads from a config.json; a missing or wrong field is a ModelError that names it."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.path}: field {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.path}: field {name!r} must be a number, got {value!r}")
        return float(value)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value) or value < 1:
            raise ModelError(f"{self.path}: field {name!r} must be a positive whole number, got {value!r}")
        return int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: field {name!r} must be true or false, got {value!r}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ModelError(f"{self.path}: field {name!r} must be a token id or a list of them, got {value!r}")
        return tuple(ids)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ModelError: the file is missing, unreadable or holds no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: a JSON object was expected")
    return values


def load_model_config(path: Path) -> ModelConfig:
    """Read config.json (and generation_config.json, for more end tokens) of a model directory.

    Raises:
        ModelError: something is missing, broken or not supported; the message names it and its value.
    """
    if not path.is_dir():
        raise ModelError(f"model directory {path} does not exist")
    file = path / "config.json"
    fields = _Fields(file, read_json(file))
    architecture, family = _architecture(fields)
    rope_theta, rope_scaling = _rope(fields)
    num_heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"{file}: {num_heads} attention heads are no multiple of {num_kv_heads} key-value heads")
    if fields.values.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(f"{file}: hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}")
    head_size = fields.count("head_dim", hidden_size // num_heads)
    if head_size % 2:
        raise ModelError(f"{file}: the head size must be even, got {head_size}")
    bias = _flag_of_family(fields, "attention_bias", family.attention_bias)
    bos = fields.token_ids("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        intermediate_size=fields.count("intermediate_size"),
        max_position_embeddings=fields.count("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=bias,
        attention_output_bias=bias if family.attention_output_bias is None else family.attention_output_bias,
        mlp_bias=_flag_of_family(fields, "mlp_bias", family.mlp_bias),
        qk_norm=family.qk_norm,
        eos_token_ids=_eos_token_ids(path, fields),
        bos_token_id=bos[0] if bos else None,
        dtype=_dtype(fields),
        sliding_window=_sliding_window(fields),
    )


def _architecture(fields: _Fields) -> tuple[str, _Family]:
    """The architecture's name and family; everything that the model code does not compute is refused."""
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError(f"{fields.path}: field 'architectures' must be a list of names, got {names!r}")
    known = next((name for name in names if name in _FAMILIES), None)
    if known is None:
        raise ModelError(f"{fields.path}: architecture {names[0]!r} is not supported; known: {', '.join(_FAMILIES)}")
    activation = fields.values.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{fields.path}: hidden_act {activation!r} is not supported, only 'silu'")
    if fields.values.get("quantization_config") is not None:
        raise ModelError(f"{fields.path}: quantized weights (quantization_config) are not supported")
    check_fields(fields.path, known, fields.values, reads_window=_FAMILIES[known].reads_window)
    return known, _FAMILIES[known]


def _flag_of_family(fields: _Fields, name: str, fixed: bool | None) -> bool:
    """A field that a family may fix: there, no other value is computed."""
    value = fields.flag(name, bool(fixed)) if fields.values.get(name) is not None else bool(fixed)
    if fixed is not None and value != fixed:
        raise ModelError(f"{fields.path}: {name} {value} is not supported for this architecture, only {fixed}")
    return value


def _rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling; transformers 5 writes both under `rope_parameters`, earlier ones side by side.

    As in transformers, a `rope_scaling` that is there replaces `rope_parameters`.
    """
    values = fields.values.get("rope_scaling") or fields.values.get("rope_parameters") or {}
    if not isinstance(values, dict):
        raise ModelError(f"{fields.path}: RoPE parameters must be an object, got {values!r}")
    rope = _Fields(fields.path, values)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(f"{fields.path}: partial_rotary_factor {partial} is not supported, only 1.0")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        if any(isinstance(value, dict) for value in values.values()):
            raise ModelError(f"{fields.path}: RoPE parameters per layer type are not supported: {values!r}")
        scaling = None
    elif kind == "linear":
        scaling = RopeScaling("linear", _factor(rope))
    elif kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            _factor(rope),
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            rope.count("original_max_position_embeddings"),
        )
    else:
        raise ModelError(f"{fields.path}: RoPE scaling {kind!r} is not supported; known: default, linear, llama3")
    check_rope_fields(fields.path, kind, values)
    return theta, scaling


def _factor(rope: _Fields) -> float:
    factor = rope.number("factor")
    if not 1.0 <= factor < math.inf:
        raise ModelError(f"{rope.path}: the factor of the RoPE parameters must be at least 1, got {factor}")
    return factor


def _eos_token_ids(path: Path, fields: _Fields) -> tuple[int, ...]:
    """The end tokens of config.json and generation_config.json, each once, in that order."""
    ids = fields.token_ids("eos_token_id")
    generation = path / "generation_config.json"
    if generation.exists():
        ids += _Fields(generation, read_json(generation)).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def log_ignored_defaults(path: Path) -> None:
    """Say which sampling defaults of generation_config.json requests do not get; once, where requests come in.

    Raises:
        ModelError: the file is there and cannot be read.
    """
    generation = path / "generation_config.json"
    ignored = ignored_sampling_defaults(read_json(generation)) if generation.exists() else {}
    if ignored:
        listed = ", ".join(f"{name}={value!r}" for name, value in ignored.items())
        logger.warning("%s: sampling defaults are not applied: %s; requests must ask for them", generation, listed)


def _dtype(fields: _Fields) -> Dtype:
    """The dtype that the weights were saved in; absent: float32, as in transformers."""
    name = fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32"
    if name not in DTYPE_BYTES:
        raise ModelError(f"{fields.path}: dtype {name!r} is not supported; known: {', '.join(DTYPE_BYTES)}")
    return cast(Dtype, name)


def _sliding_window(fields: _Fields) -> int | None:
    """The window in tokens where the model uses one: Mistral's default is 4096, Qwen's is off, Llama has none."""
    if "MistralForCausalLM" in fields.values["architectures"]:
        in_use = fields.values.get("sliding_window", 4096) is not None
        return fields.count("sliding_window", 4096) if in_use else None
    if fields.flag("use_sliding_window") and fields.values.get("sliding_window") is not None:
        return fields.count("sliding_window")
    return None


def resolve_max_model_len(model: ModelConfig, requested: int | None) -> int:
    """The longest prompt + output in tokens. A shorter sliding window caps it: windows are not computed.

    Raises:
        ConfigError: more was requested than the model has positions for.
    """
    if requested is not None and requested > model.num_positions:
        raise ConfigError(f"max_model_len {requested} exceeds the model's {model.num_positions} positions")
    length = requested or model.num_positions
    if model.sliding_window is not None and model.sliding_window < length:
        logger.warning(
            "max_model_len is capped from %d to the sliding window of %d tokens", length, model.sliding_window
        )
        return model.sliding_window
    return length
