"""Fields of config.json: published models load, what would change the mathematics is refused by name and value."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdkv.errors import ModelError
from pdkv.models.config import ModelConfig, load_model_config

_SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 512,
}  # fmt: skip
ARCHITECTURES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "phi3": "Phi3",
    "ministral": "Ministral",
}

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip
_MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
_PHI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
    "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 32064,
}  # fmt: skip
_COMMON: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": [1, 107],
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pad_token_id": 0,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _LLAMA,
    "Llama-2-7b": {**_LLAMA, "_name_or_path": "meta-llama/Llama-2-7b-hf", "rope_scaling": None, "pad_token_id": 0},
    "DeepSeek-R1-Distill-Llama-8B": {**_LLAMA, "_attn_implementation_autoset": True, "unsloth_version": "2025.12.5"},
    "Falcon3-7B": {**_LLAMA, "activation": "swiglu", "head_dim": 256, "rope_scaling": None, "rope_theta": 1000042},
    "SmolLM2-135M": {**_LLAMA, "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None,
                     "transformers.js_config": {"dtype": "q4"}, "hidden_size": 576, "num_attention_heads": 9,
                     "num_key_value_heads": 3, "pad_token_id": 2},
    "TinyLlama-1.1B": {**_LLAMA, "rope_scaling": None, "attention_bias": False, "max_position_embeddings": 2048},
    "Mistral-7B-v0.1": _MISTRAL,
    "Mistral-7B-v0.3": {**_MISTRAL, "attention_dropout": 0.0, "sliding_window": None, "rope_theta": 1e6},
    "Mistral-Nemo": {**_MISTRAL, "head_dim": 128, "hidden_size": 5120, "sliding_window": None},
    "Qwen2.5-7B": _QWEN,
    "Qwen2.5-0.5B": {**_QWEN, "use_mrope": False, "tie_word_embeddings": True, "hidden_size": 896,
                     "num_attention_heads": 14, "num_key_value_heads": 2},
    "DeepSeek-R1-Distill-Qwen-7B": {**_QWEN, "use_mrope": False, "sliding_window": 4096, "rope_theta": 10000.0},
    "Phi-3-mini-4k": {
        **_PHI, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config",
                             "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
        "_name_or_path": "Phi-3-mini-4k-instruct", "rope_scaling": None, "sliding_window": 2047},
    "Phi-3.5-mini": {
        **_PHI, "max_position_embeddings": 131072, "sliding_window": 262144,
        "rope_scaling": {"long_factor": [1.1] * 48, "short_factor": [1.0] * 48, "type": "longrope"}},
    "Phi-4-mini": {
        **_PHI, "max_position_embeddings": 131072, "sliding_window": 262144, "full_attn_mod": 1,
        "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "partial_rotary_factor": 0.75,
        "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True,
        "rope_scaling": {"long_factor": [1.1] * 48, "short_factor": [1.0] * 48, "type": "longrope"}},
    "Qwen2.5-7B-yarn": {**_QWEN, "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768,
                                                  "type": "yarn"}},
    "Qwen3-8B": {**_QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
                 "head_dim": 128, "rope_scaling": None, "sliding_window": None, "max_position_embeddings": 40960},
    "gemma-2-9b": {
        **_COMMON, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "sliding_window_size": 4096, "cache_implementation": "hybrid"},
    "gemma-3-1b": {
        **_COMMON, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "cache_implementation": "hybrid"},
    "OLMo-2-7B": {**_COMMON, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "granite-3.3-8b": {
        **_COMMON, "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0, "logits_scaling": 16.0, "residual_multiplier": 0.22, "mlp_bias": False},
    "SmolLM3-3B": {
        **_COMMON, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "max_window_layers": 28,
        "layer_types": ["full_attention"] * 32, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 8,
        "pretraining_tp": 2, "sliding_window": None, "use_sliding_window": False},
    "GLM-4-9B": {**_COMMON, "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "partial_rotary_factor": 0.5},
    "GLM-4.5-Air": {
        **_COMMON, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True,
        "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "routed_scaling_factor": 1.0, "use_qk_norm": False},
    "Qwen3-30B-A3B": {
        **_COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
        "head_dim": 128, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False},
    "Mixtral-8x7B": {
        **_COMMON, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2,
        "num_local_experts": 8, "output_router_logits": False, "router_aux_loss_coef": 0.02, "sliding_window": None},
}  # fmt: skip
"""What the model pages on the Hub say, as far as it matters here."""


def load(path: Path, values: dict[str, Any]) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(values))
    return load_model_config(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_load(tmp_path: Path, name: str) -> None:
    config = load(tmp_path, PUBLISHED[name])
    assert config.num_heads == PUBLISHED[name]["num_attention_heads"]


@pytest.mark.parametrize("every_field", [False, True], ids=["saved", "every_field"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_all_that_transformers_writes_of_a_family_loads(tmp_path: Path, family: str, every_field: bool) -> None:
    import transformers

    config = getattr(transformers, f"{ARCHITECTURES[family]}Config")(**_SIZES)
    config.architectures = [f"{ARCHITECTURES[family]}ForCausalLM"]
    config.save_pretrained(tmp_path)
    if every_field:
        (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    loaded = load_model_config(tmp_path)
    assert set(loaded.windows) == {4096 if family in ("mistral", "ministral") else None}


CHANGES_THE_MATHEMATICS: list[dict[str, Any]] = [
    {"final_logit_softcapping": 30.0},
    {"attn_logit_softcapping": 50.0},
    {"logit_scale": 0.0625},
    {"logits_scaling": 8.0},
    {"query_pre_attn_scalar": 144},
    {"attention_multiplier": 1.0},  # not 1 / sqrt(head size)
    {"residual_multiplier": 0.22},
    {"embedding_multiplier": 12.0},
    {"scale_depth": 1.4},
    {"layer_types": ["full_attention", "sliding_attention"]},
    {"layer_types": ["full_attention", "linear_attention"]},
    {"sliding_window": 128},
    {"no_rope_layers": [1, 0]},
    {"no_rope_layer_interval": 4},
    {"clip_qkv": 8.0},
    {"compression_config": {"format": "int4"}},
    {"auto_map": {"AutoModelForCausalLM": "modeling.Other"}},
    {"use_qk_norm": True},
    {"alibi": True},
    {"rotary_pct": 0.25},
    {"num_local_experts": 8},
    {"rope_interleaved": True},
    {"use_mrope": True},
    {"position_embedding_type": "alibi"},
    {"attention_sink_size": 4},
    {"vision_config": {"hidden_size": 3}},
    {"something_new": "on"},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 4.0}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.2}},
]


@pytest.mark.parametrize("change", CHANGES_THE_MATHEMATICS, ids=lambda change: "-".join(map(str, *change.items())))
def test_what_is_not_computed_is_refused_by_name_and_value(tmp_path: Path, change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    inner = [
        key for key in ("mrope_section", "attention_factor", "factor") if name == "rope_parameters" and key in value
    ]
    named = inner[0] if inner else name
    with pytest.raises(ModelError, match=named) as refused:
        load(tmp_path, {**_SIZES, "architectures": ["LlamaForCausalLM"], **change})
    assert repr(value[named] if inner else value)[:40] in str(refused.value)


NEUTRAL: list[dict[str, Any]] = [
    {"final_logit_softcapping": None, "attn_logit_softcapping": 0.0},
    {"logit_scale": 1.0, "logits_scaling": 1, "residual_multiplier": 1.0, "embedding_multiplier": 1.0},
    {"query_pre_attn_scalar": 16, "attention_multiplier": 0.25},
    {"layer_types": ["full_attention", "full_attention"]},
    {"sliding_window": None, "use_sliding_window": False},
    {"no_rope_layers": [], "clip_qkv": None, "compression_config": None, "auto_map": {}},
    {"use_qk_norm": False, "alibi": False, "rotary_pct": 1.0, "num_local_experts": 0, "something_new": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 1.0, "mrope_section": None}},
]


@pytest.mark.parametrize("change", NEUTRAL, ids=lambda change: "-".join(change))
def test_values_that_switch_a_feature_off_are_accepted(tmp_path: Path, change: dict[str, Any]) -> None:
    load(tmp_path, {**_SIZES, "architectures": ["LlamaForCausalLM"], **change})


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("MistralForCausalLM", {"attention_bias": True}),
        ("MistralForCausalLM", {"mlp_bias": True}),
        ("Qwen2ForCausalLM", {"attention_bias": False}),
        ("Qwen3ForCausalLM", {"mlp_bias": True}),
    ],
)
def test_biases_that_a_family_cannot_have_are_refused(
    tmp_path: Path, architecture: str, change: dict[str, Any]
) -> None:
    ((name, value),) = change.items()
    with pytest.raises(ModelError, match=f"{name} {value}"):
        load(tmp_path, {**_SIZES, "architectures": [architecture], **change})
