"""Llama, which other families are compared with."""

from pdkv.models.family import Family


class Llama(Family):
    """LlamaForCausalLM."""

    model_type = "llama"
    defaults = {"eos_token_id": 2}
    attention_bias = attention_output_bias = mlp_bias = None
