"""Fixtures that several folders share: small random Hugging Face models."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Several test processes share few cores: one computing thread each, and no spinning while others work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

HFModel = Callable[..., Path]
"""(family, dtype="float32", **config_overrides) -> model directory without a tokenizer."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

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


def make_hf_model(path: Path, family: str, dtype: str, **overrides: Any) -> Path:
    """Write a random model; biases and norms are random too, so that leaving one out changes the tokens."""
    import torch
    import transformers

    config_class = getattr(
        transformers, {"llama": "Llama", "mistral": "Mistral"}.get(family, family.capitalize()) + "Config"
    )
    max_shard_size = overrides.pop("max_shard_size", "1GB")
    values: dict[str, Any] = {**_SMALL, **({"sliding_window": None} if family == "mistral" else {}), **overrides}
    config = config_class(**values)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
            elif "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    return path


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> HFModel:
    """Makes a model directory; the same arguments give the same directory within a session."""
    made: dict[tuple[Any, ...], Path] = {}

    def get(family: str, dtype: str = "float32", **overrides: Any) -> Path:
        key = (family, dtype, repr(sorted(overrides.items())))
        if key not in made:
            made[key] = make_hf_model(tmp_path_factory.mktemp(family), family, dtype, **overrides)
        return made[key]

    return get


@pytest.fixture(scope="session")
def tiny_model_dir(hf_model: HFModel) -> Path:
    """A small float32 Llama."""
    return hf_model("llama")
