"""Mistral and Ministral: Llama with sliding windows."""

from typing import Any

from pdkv.models.expert_config import Experts, check_experts, num_experts
from pdkv.models.family import Family
from pdkv.models.json_fields import Fields
from pdkv.models.window_config import WINDOW_FIELDS, uniform_windows, windows_of_types


class Mistral(Family):
    """MistralForCausalLM."""

    model_type = "mistral"
    defaults = {"num_key_value_heads": 8, "eos_token_id": 2, "sliding_window": 4096}
    reads = WINDOW_FIELDS

    @classmethod
    def windows(cls, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        return uniform_windows(fields, num_layers)


class Ministral(Mistral):
    """MinistralForCausalLM."""

    model_type = "ministral"

    @classmethod
    def windows(cls, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
        return windows_of_types(fields, num_layers)


class Mixtral(Mistral):
    """MixtralForCausalLM."""

    model_type = "mixtral"
    defaults = {"num_key_value_heads": 8, "eos_token_id": 2, "num_experts_per_tok": 2}
    reads = WINDOW_FIELDS + " num_local_experts num_experts_per_tok"
    mlp = "pdkv.models.experts:load_experts"
    mlp_name = "block_sparse_moe"
    expert_names = ("w1", "w3", "w2")

    @classmethod
    def read(cls, fields: Fields) -> dict[str, Any]:
        experts = Experts(
            layers=tuple(range(fields.count("num_hidden_layers"))),
            num=num_experts(fields, "num_local_experts", 8),
            chosen=fields.count("num_experts_per_tok"),
            size=fields.count("intermediate_size"),
        )
        return {"experts": check_experts(fields, experts)}
