"""Gemma 2 and 3, text: norms before and after each part, soft caps, scaled embeddings, windows in most layers."""

from collections.abc import Mapping
from typing import Any

from pdkv.models.family import Family, Norms
from pdkv.models.json_fields import Fields
from pdkv.models.rope_config import Rope, read_rope
from pdkv.models.window_config import Windows, windows_of_types

_CAPS = "attn_logit_softcapping", "final_logit_softcapping"


class Gemma2(Family):
    """Gemma2ForCausalLM."""

    model_type = "gemma2"
    defaults = {
        "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True, "eos_token_id": 1, "bos_token_id": 2,
    }  # fmt: skip
    reads = (
        "sliding_window layer_types sliding_window_pattern _sliding_window_pattern sliding_window_size "
        "hidden_activation query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping rope_local_base_freq"
    )
    activation, activation_field = "gelu_pytorch_tanh", "hidden_activation"
    attention_bias = attention_output_bias = None
    norms = Norms(
        attention_post="post_attention_layernorm",
        mlp="pre_feedforward_layernorm",
        mlp_post="post_feedforward_layernorm",
    )

    @classmethod
    def windows(cls, fields: Fields, num_layers: int) -> Windows:
        pattern = fields.count("sliding_window_pattern")
        kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
        types = fields.values.get("layer_types") or kinds
        return windows_of_types(Fields(fields.path, {**fields.values, "layer_types": types}), num_layers)

    @classmethod
    def read(cls, fields: Fields) -> dict[str, Any]:
        caps = [fields.positive(name) if fields.values.get(name) is not None else 0.0 for name in _CAPS]
        return {
            "activation": "gelu_tanh",
            "norm_offset": 1.0,
            "attention_scale": fields.positive("query_pre_attn_scalar") ** -0.5,
            "attention_softcap": caps[0],
            "logits_softcap": caps[1],
            "embedding_scale": fields.count("hidden_size") ** 0.5,
        }


class Gemma3(Gemma2):
    """Gemma3ForCausalLM: norms of heads, and other frequencies where there are windows."""

    model_type = "gemma3_text"
    defaults = {
        **Gemma2.defaults, "sliding_window_pattern": 6, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
    }  # fmt: skip
    qk_norm = True

    @classmethod
    def prepare(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        ropes = values.get("rope_parameters")
        if isinstance(ropes, dict) and "full_attention" in ropes:
            values = {**values, "rope_parameters": ropes["full_attention"], "local": ropes.get("sliding_attention")}
        return super().prepare(values)

    @classmethod
    def layer_ropes(cls, fields: Fields, rope: Rope, windows: Windows) -> tuple[Rope | None, ...]:
        local = {"rope_scaling": None, "rope_parameters": fields.values.get("local") or {}}
        local["rope_theta"] = fields.number("rope_local_base_freq")
        near = read_rope(Fields(fields.path, {**fields.values, **local}), rope.rotary_size)
        return tuple(rope if window is None else near for window in windows)

    @classmethod
    def read(cls, fields: Fields) -> dict[str, Any]:
        return {**super().read(fields), "positions_are_stretched": True}
