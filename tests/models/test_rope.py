"""Rotary embedding against its formula and against transformers' scaling."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pdkv.models.config import load_model_config
from pdkv.models.rope import inverse_frequencies, make_rope_table, rotate
from tests.conftest import HFModel


def test_pairs_are_rotated_by_position_times_frequency(tiny_model_dir: Path) -> None:
    config = load_model_config(tiny_model_dir)
    table = make_rope_table(config.rope, 100, torch.float32, torch.device("cpu"))
    x = torch.randn(3, 2, config.head_size)
    positions = torch.tensor([0, 5, 99])
    rotated = x.clone()
    rotate(rotated, table.at(positions))
    half = config.head_size // 2
    for row, position in enumerate(positions.tolist()):
        for i in range(half):
            angle = position * config.rope_theta ** (-2 * i / config.head_size)
            a, b = x[row, :, i], x[row, :, i + half]
            expected = torch.stack(
                (a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle))
            )
            torch.testing.assert_close(rotated[row][:, [i, i + half]].T, expected, rtol=1e-4, atol=1e-5)


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.5 + i for i in range(8)],
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 256}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 10000.0,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": YARN,
    "yarn-no-original": {**YARN, "original_max_position_embeddings": 1024},
    "yarn-no-factor": {**YARN, "factor": None},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.25},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn-one-mscale": {**YARN, "mscale": 0.7},
    "yarn-betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn-not-truncated": {**YARN, "truncate": False},
    "yarn-few-turns": {**YARN, "original_max_position_embeddings": 4},
    "longrope": LONGROPE,
    "longrope-factor": {**LONGROPE, "factor": 3.0},
    "longrope-attention-factor": {**LONGROPE, "attention_factor": 1.25},
}  # fmt: skip


@pytest.mark.parametrize("max_model_len", [64, 1024, 1025, 1500])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_equal_transformers(hf_model: HFModel, name: str, max_model_len: int) -> None:
    """Those of transformers for sequences of the engine's length, which most kinds of scaling do not depend on."""
    import transformers

    path = hf_model("llama", rope_parameters=SCALINGS[name], num_hidden_layers=1)
    config = load_model_config(path, max_model_len)
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]]
    expected, magnitude = compute(transformers.AutoConfig.from_pretrained(path), "cpu", seq_len=max_model_len)
    torch.testing.assert_close(inverse_frequencies(config.rope), expected)
    assert config.rope_scaling is not None
    assert config.rope_scaling.attention_factor == pytest.approx(magnitude)
    base = 1.0 / config.rope_theta ** (torch.arange(0, config.head_size, 2).float() / config.head_size)
    assert torch.allclose(base, expected) == (name == "dynamic" and max_model_len <= 1024)
    table = make_rope_table(config.rope, 3, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(table.cos[0, 0], torch.full((16,), magnitude))
    torch.testing.assert_close(table.sin[2, 0, 8:], (2 * expected).sin() * magnitude)


def test_the_old_place_of_rope_parameters_gives_the_same_frequencies(hf_model: HFModel, tmp_path: Path) -> None:
    for name, rope in SCALINGS.items():
        path = hf_model("llama", rope_parameters=rope, num_hidden_layers=1)
        values = json.loads((path / "config.json").read_text())
        old = dict(values.pop("rope_parameters"))
        values |= {"rope_theta": old.pop("rope_theta"), "rope_scaling": {**old, "type": old.pop("rope_type")}}
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert load_model_config(tmp_path) == load_model_config(path), name


def test_the_rest_of_a_head_is_not_rotated(hf_model: HFModel) -> None:
    whole = load_model_config(hf_model("llama"))
    config = load_model_config(hf_model("phi3", partial_rotary_factor=0.5))
    assert (config.head_size, config.rotary_size) == (16, 8)
    table = make_rope_table(config.rope, 100, torch.float32, torch.device("cpu"))
    x, positions = torch.randn(3, 2, 16), torch.tensor([1, 5, 99])
    rotated = x.clone()
    rotate(rotated, table.at(positions))
    assert torch.equal(rotated[..., 8:], x[..., 8:])
    alone = x[..., :8].clone()
    small = dataclasses.replace(whole, head_size=8, rotary_size=8)
    rotate(alone, make_rope_table(small.rope, 100, torch.float32, torch.device("cpu")).at(positions))
    torch.testing.assert_close(rotated[..., :8], alone)
    assert not torch.allclose(alone, x[..., :8])
