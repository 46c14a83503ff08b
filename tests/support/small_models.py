"""Small random Hugging Face models: fast, and different in every token from a model that is wrong somewhere."""

from pathlib import Path
from typing import Any

_SMALL = {
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.06,  # at the default 0.02 a random model repeats its last token and proves little
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "num_nextn_predict_layers": 0,
}
_FAMILY_VALUES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "gemma2": {"head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 32,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 6.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.1,
    },
    "smollm3": {"no_rope_layer_interval": 2, "pad_token_id": 1},
    "glm4": {"head_dim": 16, "pad_token_id": 1},
    "glm4_moe": {
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_group": 4,
        "topk_group": 2,
        "use_qk_norm": True,
        "routed_scaling_factor": 1.5,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "mistral": {"sliding_window": None},
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "deepseek_v3": {**_LATENT, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "phi3": {"pad_token_id": 1, "original_max_position_embeddings": 1024},  # as its defaults fit no small model
}
FEATURES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"q_lora_rank": None},
    "mistral": {"sliding_window": 100},
    "qwen2": {"use_sliding_window": True, "sliding_window": 61, "max_window_layers": 2},
    "qwen3": {
        "use_sliding_window": True,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {"partial_rotary_factor": 0.75, "sliding_window": 200},
}
"""What a family can do beside what all do: for tests of whole models."""

NEWER = ("qwen3_moe", "mixtral", "glm4_moe", "gemma2", "gemma3_text", "olmo2", "granite", "smollm3", "glm4")
"""Families that compute something that Llama does not: by transformers' names of their configurations."""


def make_hf_model(path: Path, family: str, dtype: str, **overrides: Any) -> Path:
    """Write a random model; biases and norms are random too, so that leaving one out changes the tokens."""
    import torch
    import transformers

    max_shard_size = overrides.pop("max_shard_size", "1GB")
    values: dict[str, Any] = {**_SMALL, **_FAMILY_VALUES.get(family, {}), **overrides}
    config = transformers.AutoConfig.for_model(family, **values)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
            elif "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.1)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    return path


def make_hf_config(path: Path, **fields: Any) -> Path:
    """A directory with a config.json and no weights."""
    import transformers

    config = transformers.LlamaConfig(**fields)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path)
    return path
