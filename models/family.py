"""What an architecture is: the base class of families, which are found by the names in a config.json. No torch."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from pdkv.base.registry import Registry
from pdkv.models.json_fields import Fields
from pdkv.models.rope_config import Rope
from pdkv.models.window_config import no_windows


class Norms(NamedTuple):
    """Names of a layer's norms in its checkpoint; None: there is none."""

    attention: str | None = "input_layernorm"  # before attention
    attention_post: str | None = None  # of what attention adds
    mlp: str | None = "post_attention_layernorm"  # before the MLP
    mlp_post: str | None = None


class Family:
    """Reads the config.json of an architecture and says how its layers differ from Llama's; never instantiated.

    A subclass sets what differs. `docs/writing-a-model.md` shows one.
    """

    model_type: ClassVar[str]
    other_types: ClassVar[tuple[str, ...]] = ()  # other values of model_type that mean the same
    defaults: ClassVar[Mapping[str, Any]] = {}  # of fields that are absent, where they are not those of all families
    reads: ClassVar[str] = ""  # fields that this family reads beside those of all, parted by spaces
    activation: ClassVar[str] = "silu"
    activation_field: ClassVar[str] = "hidden_act"
    attention_bias: ClassVar[bool | None] = False  # of queries, keys and values; None: the field `attention_bias`
    attention_output_bias: ClassVar[bool | None] = False  # None: the same field
    mlp_bias: ClassVar[bool | None] = False  # None: the field `mlp_bias`
    partial_rotation: ClassVar[bool] = False  # transformers reads partial_rotary_factor, too
    qk_norm: ClassVar[bool] = False  # a norm of each head of queries and keys
    wide_qk_norm: ClassVar[bool] = False  # one norm of all heads of queries together, and one of keys
    interleaved: ClassVar[bool] = False  # neighbouring numbers of a head are rotated together
    fused_weights: ClassVar[bool] = False  # one tensor for q, k and v, and one for the MLP's gate and up
    fused_gate_up: ClassVar[bool] = False  # the latter alone
    norms: ClassVar[Norms] = Norms()
    attention: ClassVar[str] = ""  # "module:function", see `Loader.layer`; "": grouped-query attention
    mlp: ClassVar[str] = ""  # the same for the MLP; "": a gated one
    mlp_name: ClassVar[str] = "mlp"  # of its tensors
    expert_names: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")

    @classmethod
    def prepare(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields with the family's defaults, and in the form that all families have."""
        return {**cls.defaults, **values}

    @classmethod
    def windows(cls, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        """`ModelConfig.windows`. Raises ModelError."""
        return no_windows(fields, num_layers)

    @classmethod
    def layer_ropes(cls, fields: Fields, rope: Rope, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
        """`ModelConfig.layer_ropes`; `rope` is the one of the whole model. Raises ModelError."""
        return ()

    @classmethod
    def read(cls, fields: Fields) -> dict[str, Any]:
        """Fields of ModelConfig that this family sets, by name. Raises ModelError."""
        return {}


_FAMILIES = "pdkv.models.families."
FAMILIES: "Registry[Family]" = Registry(
    "architecture",
    "pdkv.models",
    {
        "LlamaForCausalLM": _FAMILIES + "llama:Llama",
        "MistralForCausalLM": _FAMILIES + "mistral:Mistral",
        "MinistralForCausalLM": _FAMILIES + "mistral:Ministral",
        "Qwen2ForCausalLM": _FAMILIES + "qwen:Qwen2",
        "Qwen3ForCausalLM": _FAMILIES + "qwen:Qwen3",
        "Qwen3MoeForCausalLM": _FAMILIES + "qwen:Qwen3Moe",
        "MixtralForCausalLM": _FAMILIES + "mistral:Mixtral",
        "DeepseekV2ForCausalLM": _FAMILIES + "deepseek:DeepseekV2",
        "DeepseekV3ForCausalLM": _FAMILIES + "deepseek:DeepseekV3",
        "Phi3ForCausalLM": _FAMILIES + "phi:Phi3",
        "Gemma2ForCausalLM": _FAMILIES + "gemma:Gemma2",
        "Gemma3ForCausalLM": _FAMILIES + "gemma:Gemma3",
        "Olmo2ForCausalLM": _FAMILIES + "olmo:Olmo2",
        "GraniteForCausalLM": _FAMILIES + "granite:Granite",
        "SmolLM3ForCausalLM": _FAMILIES + "smollm:SmolLM3",
        "Glm4ForCausalLM": _FAMILIES + "glm:Glm4",
        "Glm4MoeForCausalLM": _FAMILIES + "glm:Glm4Moe",
    },
    "pdkv.models.family:Family",
)
"""Families by architecture; others come by entry point."""


def find_family(names: list[str]) -> tuple[str, type[Family]] | None:
    """The first architecture of `names` that is known, and its family.

    Raises:
        ConfigError: a third party's cannot be imported, or is no Family.
    """
    known = FAMILIES.shipped if any(name in FAMILIES.shipped for name in names) else FAMILIES.targets()
    found = next((name for name in names if name in known), None)  # never "module:Class": a file says these names
    return None if found is None else (found, FAMILIES.load(found))
