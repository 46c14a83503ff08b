"""Model directories: what is read, what is refused by name, what the identity covers."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pdkv.errors import ConfigError, ModelError
from pdkv.models.config import RopeScaling, load_model_config, resolve_max_model_len
from tests.conftest import HFModel

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "eos_token_id": [7, 8], "bos_token_id": 3, "torch_dtype": "bfloat16",
}  # fmt: skip


def write(path: Path, **changes: Any) -> Path:
    values = {name: value for name, value in {**LLAMA, **changes}.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(values))
    return path


def test_fields_of_an_old_style_config(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 256}  # fmt: skip
    config = load_model_config(write(tmp_path, rope_theta=5e5, rope_scaling=scaling))
    assert (config.head_size, config.dtype, config.bos_token_id) == (16, "bfloat16", 3)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 256)
    assert not config.attention_bias
    assert not config.qk_norm


def test_fields_of_a_transformers_5_config(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1234.0}
    config = load_model_config(write(tmp_path, rope_parameters=rope, torch_dtype=..., dtype="float16"))
    assert (config.rope_theta, config.rope_scaling, config.dtype) == (1234.0, RopeScaling("linear", 2.0), "float16")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_transformers_writes_is_read(hf_model: HFModel, family: str) -> None:
    config = load_model_config(hf_model(family))
    assert (config.num_layers, config.num_kv_heads, config.vocab_size, config.dtype) == (3, 2, 384, "float32")
    assert config.attention_bias == (family == "qwen2")
    assert config.qk_norm == (family == "qwen3")
    assert config.sliding_window is None


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert load_model_config(tmp_path).eos_token_ids == (7, 8, 9)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"torch_dtype": "float8"}, "float8"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 15}, "15"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        load_model_config(write(tmp_path, **changes))


def test_a_missing_directory_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ModelError, match="JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="object"):
        load_model_config(tmp_path)


def test_max_model_len(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_model_config(write(tmp_path))
    assert resolve_max_model_len(config, None) == 512
    assert resolve_max_model_len(config, 100) == 100
    with pytest.raises(ConfigError, match="513"):
        resolve_max_model_len(config, 513)
    windowed = load_model_config(write(tmp_path, architectures=["MistralForCausalLM"], sliding_window=128))
    with caplog.at_level(logging.WARNING):
        assert resolve_max_model_len(windowed, None) == 128
    assert "sliding window of 128" in caplog.text
    assert resolve_max_model_len(windowed, 64) == 64


def test_linear_scaling_stretches_the_models_length(tmp_path: Path) -> None:
    """As vLLM counts: the positions that it was trained with times the factor; llama3's are in the field already."""
    linear = load_model_config(write(tmp_path, rope_scaling={"type": "linear", "factor": 2.5}))
    assert resolve_max_model_len(linear, None) == 1280
    assert resolve_max_model_len(linear, 1280) == 1280
    with pytest.raises(ConfigError, match="1281 exceeds the model's 1280"):
        resolve_max_model_len(linear, 1281)
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    assert resolve_max_model_len(load_model_config(write(tmp_path, rope_scaling=scaling)), None) == 512


@pytest.mark.parametrize("factor", [0.5, 0.0, float("inf"), float("nan")])
def test_a_factor_that_stretches_nothing_is_refused(tmp_path: Path, factor: float) -> None:
    with pytest.raises(ModelError, match=f"factor of the RoPE parameters must be at least 1, got {factor}"):
        load_model_config(write(tmp_path, rope_scaling={"type": "linear", "factor": factor}))


def test_qwen_uses_its_window_only_when_told(tmp_path: Path) -> None:
    changes = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128}
    assert load_model_config(write(tmp_path, **changes)).sliding_window is None
    assert load_model_config(write(tmp_path, **changes, use_sliding_window=True)).sliding_window == 128
