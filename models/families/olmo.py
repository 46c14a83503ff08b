"""OLMo 2: norms of what each part adds, none before, and one norm of all heads together."""

from pdkv.models.family import Family, Norms


class Olmo2(Family):
    """Olmo2ForCausalLM."""

    model_type = "olmo2"
    defaults = {"rms_norm_eps": 1e-5, "eos_token_id": 50279}
    attention_bias = attention_output_bias = None
    wide_qk_norm = True
    norms = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
