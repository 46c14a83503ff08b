"""Granite 3: Llama with four factors."""

from typing import Any

from pdkv.models.families.llama import Llama
from pdkv.models.json_fields import Fields


class Granite(Llama):
    """GraniteForCausalLM."""

    model_type = "granite"
    defaults = {"eos_token_id": 2, "bos_token_id": 1}
    reads = "attention_multiplier embedding_multiplier logits_scaling residual_multiplier"

    @classmethod
    def read(cls, fields: Fields) -> dict[str, Any]:
        return {
            "attention_scale": fields.positive("attention_multiplier", 1.0),
            "embedding_scale": fields.positive("embedding_multiplier", 1.0),
            "logits_divisor": fields.positive("logits_scaling", 1.0),
            "residual_scale": fields.positive("residual_multiplier", 1.0),
        }
