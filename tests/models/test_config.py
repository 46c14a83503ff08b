"""Model directories: what is read, what is refused by name, what the identity covers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from deployments import write_tokenizer

from pdkv.errors import ConfigError, ModelError
from pdkv.models.config import RopeScaling, load_model_config, resolve_max_model_len
from pdkv.text import Tokenizer
from tests.conftest import FAMILIES, HFModel

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "eos_token_id": [7, 8], "bos_token_id": 3, "torch_dtype": "bfloat16",
}  # fmt: skip

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 128,
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


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_read(hf_model: HFModel, family: str) -> None:
    config = load_model_config(hf_model(family))
    assert (config.num_layers, config.num_kv_heads, config.vocab_size, config.dtype) == (3, 2, 384, "float32")
    assert config.attention_bias == (family == "qwen2")
    assert config.qk_norm == (family == "qwen3")
    assert config.windows == (None,) * 3


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9, 100, -1]}))
    assert load_model_config(tmp_path).eos_token_ids == (7, 8, 9)  # the vocabulary has 100


ADDED = {"258": {"content": "<|im_end|>", "special": True}}


@pytest.mark.parametrize(
    ("config", "older"),
    [
        ({"eos_token": "<|im_end|>"}, None),
        ({"eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True}}, None),
        ({"eos_token": "!"}, None),  # which is no added token
        ({}, {"eos_token": "<|im_end|>"}),
        ({"eos_token": "</s>"}, {"eos_token": {"content": "<|im_end|>"}}),
        ({"eos_token": "</s>", "added_tokens_decoder": ADDED}, {"eos_token": "<|im_end|>"}),
        ({"eos_token": None}, None),
    ],
)
def test_the_tokenizers_end_token_counts_too_by_the_file_that_transformers_takes(
    tmp_path: Path, config: dict[str, Any], older: dict[str, Any] | None
) -> None:
    """F51: finetunes of base models often name the token that ends their turns there alone."""
    import transformers

    write(tmp_path, vocab_size=300)
    write_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens(["<|im_end|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if older is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path).eos_token_id
    expected = (7, 8) if theirs is None else (7, 8, theirs)
    assert load_model_config(tmp_path).eos_token_ids == expected
    assert Tokenizer.from_dir(tmp_path).special_tokens.get("eos_token") == (
        None if theirs is None else backend.id_to_token(theirs)
    )


def test_an_end_token_of_a_unigram_tokenizer_is_found_by_its_place(tmp_path: Path) -> None:
    write(tmp_path)
    model = tokenizers.models.Unigram([("<unk>", 0.0), ("a", -1.0), ("<end>", -2.0)], unk_id=0)
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    assert load_model_config(tmp_path).eos_token_ids == (7, 8, 2)


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", '{"model": 5}'), ("tokenizer_config.json", '{"eos_token": 5}')]
)
def test_a_broken_tokenizer_is_named(tmp_path: Path, name: str, content: str) -> None:
    write(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer.json: broken|eos_token is 5"):
        load_model_config(tmp_path)


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
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "mrope"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "yarn"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "alpha": 8.0}}, "alpha"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "factor .* got 0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 4}}, "beta_slow .* got 4"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": "no"}}, "truncate"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": -1.0}}, "mscale .* got -1"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "low_freq_factor .* got 4.0 and 4.0",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": -1.0}},
            "attention_factor.* got -1",
        ),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000}}, "alpha"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "long_factor' .* list of 8 numbers, got 1"),
        ({"rope_scaling": {**LONGROPE, "short_factor": None}}, "short_factor"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [0.0] * 8}}, "short_factor' .* above 0, got 0.0"),
        ({"rope_scaling": {**LONGROPE, "long_factor": ["x"] * 8}}, "long_factor' .* got 'x'"),
        ({"rope_scaling": {**LONGROPE, "short_mscale": 1.2}}, "short_mscale"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.2}, "even number of a head's 16 values to rotate, got 0.2"),
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


def test_max_model_len(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path))
    assert resolve_max_model_len(config, None) == 512
    assert resolve_max_model_len(config, 100) == 100
    with pytest.raises(ConfigError, match="513"):
        resolve_max_model_len(config, 513)
    windowed = load_model_config(write(tmp_path, architectures=["MistralForCausalLM"], sliding_window=128))
    assert resolve_max_model_len(windowed, None) == 512


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


@pytest.mark.parametrize(
    ("rope", "longest", "default"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 1024, 1024),
        ({"rope_type": "yarn", "factor": 4.0}, 2048, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512, 512),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 512, 512),
        (LONGROPE, 512, 128),
    ],
)
def test_lengths_of_scaled_models_are_those_of_vllm(
    tmp_path: Path, rope: dict[str, Any], longest: int, default: int
) -> None:
    config = load_model_config(write(tmp_path, rope_scaling=rope))
    assert resolve_max_model_len(config, None) == default
    assert resolve_max_model_len(config, longest) == longest
    with pytest.raises(ConfigError, match=f"{longest + 1} exceeds the model's {longest}"):
        resolve_max_model_len(config, longest + 1)


def test_only_lengths_that_give_other_frequencies_make_another_model(tmp_path: Path) -> None:
    dynamic = write(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    at = {length: load_model_config(dynamic, length) for length in (None, 100, 512, 513, 1024)}
    assert at[100] == at[512] != at[513] != at[1024] == at[None]
    longrope = write(tmp_path, rope_scaling=LONGROPE)
    at = {length: load_model_config(longrope, length) for length in (None, 100, 128, 129, 512)}
    assert at[None] == at[100] == at[128] != at[129] == at[512]
    yarn = write(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert load_model_config(yarn, 100) == load_model_config(yarn)


def test_the_models_own_original_length_goes_before_that_of_its_rope_parameters(tmp_path: Path) -> None:
    """As in transformers and vLLM."""
    config = load_model_config(write(tmp_path, rope_scaling=LONGROPE, original_max_position_embeddings=64))
    assert config.default_max_model_len == 64


def test_phi3_was_trained_with_4096_positions_where_its_file_says_nothing(tmp_path: Path) -> None:
    """As in transformers, whose Phi3Config has the field in any case."""
    import transformers

    phi = {"architectures": ["Phi3ForCausalLM"], "rope_scaling": LONGROPE, "pad_token_id": 0}
    path = write(tmp_path, **phi, model_type="phi3", max_position_embeddings=8192)
    assert load_model_config(path).default_max_model_len == 4096
    rope = transformers.AutoConfig.from_pretrained(path).rope_parameters
    assert rope["original_max_position_embeddings"] == 4096
    config = load_model_config(write(tmp_path, **phi))  # fewer than 4096 positions
    assert config.rope_scaling is not None
    assert (config.rope_scaling.factor, config.rope_scaling.attention_factor) == (1.0, 1.0)


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_phi3_names_longrope_as_its_first_checkpoints_did(tmp_path: Path, name: str) -> None:
    changes = {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 128}
    config = load_model_config(write(tmp_path, rope_scaling={**LONGROPE, "rope_type": name}, **changes))
    assert config == load_model_config(write(tmp_path, rope_scaling=LONGROPE, **changes))


@pytest.mark.parametrize("factor", [0.5, 0.0, 1e7])
def test_a_factor_that_stretches_nothing_is_refused(tmp_path: Path, factor: float) -> None:
    with pytest.raises(
        ModelError, match=f"factor of the RoPE parameters must be at least 1 .* got {re.escape(str(factor))}"
    ):
        load_model_config(write(tmp_path, rope_scaling={"type": "linear", "factor": factor}))


WINDOWS: list[tuple[str, dict[str, Any], list[int | None]]] = [
    ("Llama", {}, [None, None]),
    ("Mistral", {}, [4096, 4096]),
    ("Mistral", {"sliding_window": None}, [None, None]),
    ("Mistral", {"sliding_window": 128}, [128, 128]),
    ("Ministral", {"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"]}, [None, 128]),
    ("Phi3", {}, [None, None]),
    ("Phi3", {"sliding_window": 2047}, [2047, 2047]),
    *(
        row
        for name in ("Qwen2", "Qwen3")
        for row in (
            (name, {"sliding_window": 128, "max_window_layers": 0}, [None, None]),
            (name, {"use_sliding_window": True, "sliding_window": 128}, [None, None]),  # from layer 28 on
            (name, {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1}, [None, 128]),
            (name, {"use_sliding_window": True, "max_window_layers": 0}, [4096, 4096]),
            (name, {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}, [4096, None]),
        )
    ),
]


@pytest.mark.parametrize(("family", "changes", "windows"), WINDOWS, ids=lambda value: str(value)[:60])
def test_windows_of_layers(tmp_path: Path, family: str, changes: dict[str, Any], windows: list[int | None]) -> None:
    config = load_model_config(write(tmp_path, architectures=[f"{family}ForCausalLM"], **changes))
    assert list(config.windows) == windows


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["sliding_attention"]}, r"layer_types.*each of the 2 layers, got \['sliding_attention'\]"),
        ({"layer_types": ["sliding_attention", "chunked_attention"]}, "layer_types.*chunked_attention"),
        ({"layer_types": "sliding_attention"}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}, "layer_types.*use_sliding_window"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": "all"}, "sliding_window"),
        ({"max_window_layers": -1}, "max_window_layers.*got -1"),
        ({"max_window_layers": 1.5}, "max_window_layers.*got 1.5"),
    ],
)
def test_windows_that_make_no_sense_are_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    values = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 64, **changes}
    with pytest.raises(ModelError, match=named):
        load_model_config(write(tmp_path, **values))
