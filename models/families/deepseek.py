"""DeepSeek V2 and V3, of which Kimi K2 is one: latent KV and experts."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pdkv.errors import ModelError
from pdkv.models.expert_config import Experts, check_experts, num_experts
from pdkv.models.family import Family
from pdkv.models.json_fields import Fields
from pdkv.models.latent_config import LATENT_FIELDS, read_latent, read_scale

_MAX_EXTRA = 1000


class DeepseekV2(Family):
    """DeepseekV2ForCausalLM."""

    model_type = "deepseek_v2"
    defaults: ClassVar[Mapping[str, Any]] = {
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_shared_experts": 2, "moe_intermediate_size": 1407, "topk_method": "greedy",
        "eos_token_id": 2,
    }  # fmt: skip
    reads = (
        f"{LATENT_FIELDS} num_nextn_predict_layers num_mtp_layers first_k_dense_replace moe_layer_freq "
        "n_routed_experts num_local_experts n_shared_experts num_experts_per_tok moe_intermediate_size n_group "
        "topk_group topk_method scoring_func norm_topk_prob routed_scaling_factor ep_size seq_aux aux_loss_alpha "
        "output_router_logits"
    )
    attention = "pdkv.models.latent:load_latent_attention"
    mlp = "pdkv.models.experts:load_experts"
    scoring: ClassVar[Literal["softmax", "sigmoid"]] = "softmax"
    num_experts: ClassVar[int] = 64
    choices: ClassVar[tuple[str, ...]] = ("greedy", "group_limited_greedy")  # of `topk_method`

    @classmethod
    def prepare(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        prepared = super().prepare(values)
        return {**prepared, "head_dim": prepared["qk_rope_head_dim"]}  # as in transformers, whatever is there

    @classmethod
    def read(cls, fields: Fields) -> dict[str, Any]:
        latent = read_latent(fields)
        extra = fields.number("num_nextn_predict_layers", fields.number("num_mtp_layers", 1))
        if not 0 <= extra <= _MAX_EXTRA or extra % 1:
            raise ModelError(
                f"{fields.path}: field 'num_nextn_predict_layers' must be a whole number up to {_MAX_EXTRA}, "
                f"got {extra}"
            )
        sizes = {"latent": latent, "num_kv_heads": 1, "head_size": latent.row, "extra_layers": int(extra)}
        return {**sizes, "attention_scale": read_scale(fields, latent), "experts": cls.read_experts(fields)}

    @classmethod
    def read_experts(cls, fields: Fields) -> Experts | None:
        """The experts of all layers but the first ones. Raises ModelError."""
        first, num_layers = fields.number("first_k_dense_replace", 0.0), fields.count("num_hidden_layers")
        if fields.values.get("n_routed_experts", 0) is None or first >= num_layers:
            return None
        for name, known in (("scoring_func", (cls.scoring,)), ("topk_method", cls.choices), ("moe_layer_freq", (1,))):
            if (value := fields.values.get(name, known[0])) not in known:
                only = " or ".join(map(repr, known))
                raise ModelError(f"{fields.path}: {name} {value!r:.80} is not supported, only {only}")
        size, grouped = fields.count("moe_intermediate_size"), fields.values["topk_method"] != "greedy"
        experts = Experts(
            layers=tuple(range(max(int(first), 0), num_layers)),
            num=num_experts(fields, "n_routed_experts", cls.num_experts),
            chosen=fields.count("num_experts_per_tok"),
            size=size,
            shared_size=size * fields.count("n_shared_experts") if fields.values["n_shared_experts"] else 0,
            scoring=cls.scoring,
            has_bias=cls.scoring == "sigmoid",
            normalised=fields.flag("norm_topk_prob"),
            scale=fields.positive("routed_scaling_factor", 1.0),
            groups=fields.count("n_group", 1) if grouped else 1,
            chosen_groups=fields.count("topk_group", 1) if grouped else 1,
            group_best=2 if cls.scoring == "sigmoid" else 1,
        )
        if experts.normalised and cls.scoring == "softmax":
            raise ModelError(f"{fields.path}: norm_topk_prob true is not supported: transformers leaves it out")
        return check_experts(fields, experts)


class DeepseekV3(DeepseekV2):
    """DeepseekV3ForCausalLM."""

    model_type = "deepseek_v3"
    other_types = ("kimi_k2",)
    defaults = {
        **DeepseekV2.defaults, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "topk_method": "noaux_tc", "eos_token_id": 1, "bos_token_id": 0,
    }  # fmt: skip
    scoring = "sigmoid"
    num_experts = 256
    choices = ("noaux_tc",)
