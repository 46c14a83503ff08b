"""Phi-3, Phi-3.5 and Phi-4 mini."""

from pdkv.models.families.mistral import Mistral


class Phi3(Mistral):
    """Phi3ForCausalLM."""

    model_type = "phi3"
    defaults = {"rms_norm_eps": 1e-5, "eos_token_id": 32000}
    partial_rotation = True
    fused_weights = True
