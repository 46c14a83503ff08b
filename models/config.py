"""What a Hugging Face model directory says about its model: a checked `ModelConfig`. No torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from pdkv.base.limits import clip
from pdkv.config import is_paced, paced_part
from pdkv.errors import ConfigError, ModelError
from pdkv.models.config_fields import check_fields
from pdkv.models.directory import ModelDirectory
from pdkv.models.expert_config import Experts
from pdkv.models.family import FAMILIES, Family, find_family
from pdkv.models.json_fields import Fields
from pdkv.models.latent_config import Latent
from pdkv.models.quantization import Quantization, read_quantization
from pdkv.models.rope_config import Rope, RopeScaling, read_rope
from pdkv.models.weight_files import stored_dtype

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    rotary_size: int  # the first so many values of a head are rotated
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool  # of the q, k and v projections
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    fused_weights: bool  # the checkpoint has one tensor for q, k and v, and one for the MLP's gate and up
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: Dtype
    quantization: Quantization | None = None  # None: the checkpoint has dense weights
    windows: tuple[int | None, ...]  # by layer, how many tokens a query sees, its own included; None: all up to its own
    layer_ropes: tuple[Rope | None, ...] = ()  # by layer, where not all have the one above; None: no rotation
    experts: Experts | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norm_offset: float = 0.0  # is added to norms' weights
    attention_scale: float | None = None  # of q k; None: 1 / sqrt(head_size)
    attention_softcap: float = 0.0  # c of c * tanh(x / c); 0: none, as of logits
    logits_softcap: float = 0.0
    logits_divisor: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    positions_are_stretched: bool = False  # max_position_embeddings has RoPE's factor already
    latent: Latent | None = None  # attention is over latent rows, each one KV head; None: over keys and values
    extra_layers: int = 0  # behind the last, which guess further tokens: they are not read

    @property
    def rope(self) -> Rope:
        """The rotary position embedding of layers that have none of their own."""
        return Rope(self.rope_theta, self.rotary_size, self.rope_scaling)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The rotation of each layer; None: it has none."""
        return self.layer_ropes or (self.rope,) * self.num_layers

    @property
    def mlp_neurons(self) -> int:
        """Neurons that a token goes through in a layer, at most."""
        dense = self.experts is None or len(self.experts.layers) < self.num_layers
        return max(self.intermediate_size if dense else 0, self.experts.neurons if self.experts else 0)

    @property
    def num_positions(self) -> int:
        """Number of positions that the model can compute, as vLLM counts them: RoPE scaling multiplies the trained
        number, unless `max_position_embeddings` already includes it.
        """
        scaling = self.rope_scaling
        if scaling is None or self.positions_are_stretched or scaling.kind in ("llama3", "longrope"):
            return self.max_position_embeddings
        if scaling.kind == "yarn":  # the field may be the stretched number, as vLLM has it, or the one from before
            return max(self.max_position_embeddings, int(scaling.original_max_position_embeddings * scaling.factor))
        return int(self.max_position_embeddings * scaling.factor)

    @property
    def default_max_model_len(self) -> int:
        """The default max_model_len of an engine: with longrope, as in vLLM, the length up to which the short factors
        apply.
        """
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "longrope":
            return min(scaling.original_max_position_embeddings, self.num_positions)
        return self.num_positions

    def for_length(self, max_model_len: int | None) -> "ModelConfig":
        """The model as computed with this `--max-model-len`, on which RoPE frequencies may depend."""
        length = max_model_len or self.default_max_model_len
        ropes = tuple(rope and rope.for_length(length) for rope in self.layer_ropes)
        return replace(self, rope_scaling=self.rope.for_length(length).scaling, layer_ropes=ropes)

    def quantized_at_load(self, how: Literal["int8"] | None, path: Path) -> "ModelConfig":
        """The model as it is computed with `--quantization`.

        Raises:
            ConfigError: its weights are quantized already; names `path`.
        """
        if how is None:
            return self
        if self.quantization is not None:
            raise ConfigError(
                f"{path}: --quantization {how} is for dense weights, and this checkpoint's are quantized already: "
                "leave it out"
            )
        return replace(self, quantization=Quantization(how))

    def with_fp8_inputs(self) -> "ModelConfig":
        """The model as computed when the inputs of FP8 layers are quantized, too."""
        assert self.quantization is not None
        return replace(self, quantization=self.quantization._replace(fp8_inputs=True))

    def in_8_bits(self) -> "ModelConfig":
        """The model as computed by kernels that read weights of 8 bits."""
        assert self.quantization is not None
        return replace(self, quantization=self.quantization._replace(in_8_bits=True))


_MAX_LAYERS = 10_000


def load_model_config(
    path: Path, max_model_len: int | None = None, ignored_fields: Collection[str] = ()
) -> ModelConfig:
    """Read config.json of a model directory, and from other files end tokens, dtype and quantization.

    Args:
        max_model_len: the engine's; see `ModelConfig.for_length`.
        ignored_fields: fields of config.json that are unknown, and do not matter.

    Raises:
        ModelError: something is missing, broken or not supported; the message names it and its value.
    """
    if is_paced(path):
        paced: ModelConfig = paced_part("paced:read_profile")(path).model_config
        return paced
    directory = ModelDirectory(path)
    fields = directory.config
    file = fields.path
    architecture, family = _architecture(fields, ignored_fields)
    fields = Fields(file, family.prepare(fields.values))
    if fields.count("num_hidden_layers") > _MAX_LAYERS:
        raise ModelError(f"{file}: field 'num_hidden_layers' must be at most {_MAX_LAYERS}")
    num_layers, num_heads = fields.count("num_hidden_layers"), fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"{file}: {num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads")
    if fields.values.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(f"{file}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    head_size = fields.count("head_dim", hidden_size // num_heads)
    if head_size % 2:
        raise ModelError(f"{file}: the head size must be even, got {head_size}")
    is_phi3 = family.model_type == "phi3"
    rope = read_rope(fields, head_size, is_phi3=is_phi3, partial=family.partial_rotation)
    windows = family.windows(fields, num_layers)
    bias = _flag_of_family(fields, "attention_bias", family.attention_bias)
    bos = fields.token_ids("bos_token_id")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        intermediate_size=fields.count("intermediate_size"),
        max_position_embeddings=fields.count("max_position_embeddings"),
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rotary_size=rope.rotary_size,
        rope_scaling=rope.scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=bias,
        attention_output_bias=bias if family.attention_output_bias is None else family.attention_output_bias,
        mlp_bias=_flag_of_family(fields, "mlp_bias", family.mlp_bias),
        qk_norm=family.qk_norm,
        fused_weights=family.fused_weights,
        eos_token_ids=_eos_token_ids(directory, fields),
        bos_token_id=bos[0] if bos else None,
        dtype=_dtype(directory),
        quantization=_quantization(directory),
        windows=windows,
        layer_ropes=family.layer_ropes(fields, rope, windows),
    )
    return replace(config, **family.read(fields)).for_length(max_model_len)


def _architecture(fields: Fields, ignored: Collection[str]) -> tuple[str, type[Family]]:
    """The architecture's name and family; everything that the model code does not compute is refused."""
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{fields.path}: field 'architectures' must be a list of names, got {clip(repr(names))}")
    found = find_family(names)
    if found is None:
        known = ", ".join(FAMILIES.targets())
        raise ModelError(f"{fields.path}: architecture {clip(repr(names[0]))} is not supported; known: {known}")
    name, family = found
    activation = fields.values.get(family.activation_field, family.activation)
    if activation != family.activation:
        raise ModelError(
            f"{fields.path}: {family.activation_field} {activation!r} is not supported, only {family.activation!r}"
        )
    model_type = fields.values.get("model_type")
    if model_type not in (None, family.model_type, *family.other_types):
        raise ModelError(
            f"{fields.path}: model_type {clip(repr(model_type))} is not that of architecture {name!r}, "
            f"{family.model_type!r}: transformers goes by model_type, vLLM by the architecture"
        )
    check_fields(fields.path, name, fields.values, ignored, reads=family.reads)
    return name, family


def _flag_of_family(fields: Fields, name: str, fixed: bool | None) -> bool:
    """A field that a family may fix: there, no other value is computed."""
    value = fields.flag(name, bool(fixed)) if fields.values.get(name) is not None else bool(fixed)
    if fixed is not None and value != fixed:
        raise ModelError(f"{fields.path}: {name} {value} is not supported for this architecture, only {fixed}")
    return value


def _eos_token_ids(directory: ModelDirectory, fields: Fields) -> tuple[int, ...]:
    """The end tokens of config.json, generation_config.json and the tokenizer, each once, in that order.

    Finetunes of base models often name theirs in the tokenizer alone. Those outside the vocabulary, which are never
    drawn, are left out.
    """
    ids = fields.token_ids("eos_token_id")
    generation = "generation_config.json"
    ids += Fields(directory.path / generation, directory.optional(generation)).token_ids("eos_token_id")
    if (own := directory.eos_token_id()) is not None:
        ids += (own,)
    vocab_size = fields.count("vocab_size")
    return tuple(dict.fromkeys(token_id for token_id in ids if 0 <= token_id < vocab_size))


def _quantization(directory: ModelDirectory) -> Quantization | None:
    """By config.json, else, as in vLLM, by the file of ModelOpt's; None: the checkpoint has dense weights."""
    fields, file = directory.config, directory.path / "hf_quant_config.json"
    said = fields.values.get("quantization_config")
    if said is None and file.exists():
        return read_quantization(file, directory.optional(file.name).get("quantization"), "modelopt")
    return None if said is None else read_quantization(fields.path, said)


def _dtype(directory: ModelDirectory) -> Dtype:
    """The dtype of the file; absent: that of the weights, as in transformers, else float32."""
    fields = directory.config
    name = fields.values.get("dtype") or fields.values.get("torch_dtype") or stored_dtype(directory.path) or "float32"
    if not isinstance(name, str) or name not in DTYPE_BYTES:
        raise ModelError(f"{fields.path}: dtype {clip(repr(name))} is not supported; known: {', '.join(DTYPE_BYTES)}")
    return cast(Dtype, name)


def resolve_max_model_len(model: ModelConfig, requested: int | None) -> int:
    """The maximum number of prompt + output tokens.

    Raises:
        ConfigError: the model has too few positions for the requested length.
    """
    if requested is not None and requested > model.num_positions:
        raise ConfigError(f"max_model_len {requested} exceeds the model's {model.num_positions} positions")
    return requested or model.default_max_model_len
