"""GLM-4 and GLM-4.5: half of each head is rotated; norms after each part, or experts with shared ones."""

from typing import Any

from pdkv.models.expert_config import Experts, check_experts, num_experts
from pdkv.models.family import Family, Norms
from pdkv.models.json_fields import Fields


class Glm4(Family):
    """Glm4ForCausalLM: neighbouring numbers of a head are rotated together."""

    model_type = "glm4"
    defaults = {
        "num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7,
        "attention_bias": True, "eos_token_id": [151329, 151336, 151338],
    }  # fmt: skip
    attention_bias = None
    partial_rotation = interleaved = fused_gate_up = True
    norms = Norms(attention_post="post_self_attn_layernorm", mlp_post="post_mlp_layernorm")


class Glm4Moe(Family):
    """Glm4MoeForCausalLM (GLM-4.5 and 4.6)."""

    model_type = "glm4_moe"
    defaults = {
        "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
    }  # fmt: skip
    reads = (
        "n_routed_experts num_local_experts n_shared_experts num_experts_per_tok moe_intermediate_size n_group "
        "topk_group first_k_dense_replace norm_topk_prob routed_scaling_factor use_qk_norm num_nextn_predict_layers "
        "num_mtp_layers"
    )
    attention_bias = None
    partial_rotation = True
    mlp = "pdkv.models.experts:load_experts"

    @classmethod
    def read(cls, fields: Fields) -> dict[str, Any]:
        size, num_layers = fields.count("moe_intermediate_size"), fields.count("num_hidden_layers")
        experts = Experts(
            layers=tuple(range(fields.whole("first_k_dense_replace", 1, num_layers), num_layers)),
            num=num_experts(fields, "n_routed_experts", 128),
            chosen=fields.count("num_experts_per_tok"),
            size=size,
            shared_size=size * fields.count("n_shared_experts", 1),
            scoring="sigmoid",
            has_bias=True,
            normalised=fields.flag("norm_topk_prob", True),
            scale=fields.positive("routed_scaling_factor", 1.0),
            groups=fields.count("n_group", 1),
            chosen_groups=fields.count("topk_group", 1),
            group_best=2,
        )
        extra = fields.whole("num_nextn_predict_layers", fields.whole("num_mtp_layers", 1, num_layers), num_layers)
        return {
            "experts": check_experts(fields, experts) if experts.layers else None,
            "qk_norm": fields.flag("use_qk_norm"),
            "extra_layers": extra,
        }
