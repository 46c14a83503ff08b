"""Qwen 2 and 3."""

from typing import Any, ClassVar

from pdkv.models.expert_config import Experts, check_experts, num_experts, sparse_layers
from pdkv.models.family import Family
from pdkv.models.json_fields import Fields
from pdkv.models.window_config import WINDOW_FIELDS, Windows, no_windows, windows_from_layer


class Qwen2(Family):
    """Qwen2ForCausalLM."""

    model_type = "qwen2"
    defaults = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
    reads = WINDOW_FIELDS
    attention_bias: ClassVar[bool | None] = True

    @classmethod
    def windows(cls, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        return windows_from_layer(fields, num_layers)


class Qwen3(Qwen2):
    """Qwen3ForCausalLM."""

    model_type = "qwen3"
    defaults = {**Qwen2.defaults, "head_dim": 128}
    attention_bias = attention_output_bias = None
    qk_norm = True


class Qwen3Moe(Qwen3):
    """Qwen3MoeForCausalLM."""

    model_type = "qwen3_moe"
    defaults = {"num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    reads = (
        "sliding_window max_window_layers num_experts num_local_experts num_experts_per_tok moe_intermediate_size "
        "norm_topk_prob decoder_sparse_step mlp_only_layers"
    )
    mlp = "pdkv.models.experts:load_experts"

    @classmethod
    def windows(cls, fields: Fields, num_layers: int) -> Windows:
        return no_windows(fields, num_layers)  # use_sliding_window is refused

    @classmethod
    def read(cls, fields: Fields) -> dict[str, Any]:
        experts = Experts(
            layers=sparse_layers(fields),
            num=num_experts(fields, "num_experts", 128),
            chosen=fields.count("num_experts_per_tok"),
            size=fields.count("moe_intermediate_size"),
            normalised=fields.flag("norm_topk_prob"),
        )
        return {"experts": check_experts(fields, experts) if experts.layers else None}
