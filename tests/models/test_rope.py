"""Rotary embedding against its formula and against transformers' scaling."""

import math
from pathlib import Path

import pytest
import torch
import transformers

from pdkv.models.config import load_model_config
from pdkv.models.rope import make_rope_table, rotate, scale_frequencies
from tests.conftest import HFModel


def test_pairs_are_rotated_by_position_times_frequency(tiny_model_dir: Path) -> None:
    config = load_model_config(tiny_model_dir)
    table = make_rope_table(config, 100, torch.float32, torch.device("cpu"))
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


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 10000.0,
        },
    ],
    ids=["linear", "llama3"],
)  # fmt: skip
def test_scaled_frequencies_equal_transformers(hf_model: HFModel, rope: dict[str, object]) -> None:
    path = hf_model("llama", rope_parameters=rope)
    config = load_model_config(path)
    hf_config = transformers.AutoConfig.from_pretrained(path)
    expected, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf_config, "cpu")
    base = 1.0 / config.rope_theta ** (torch.arange(0, config.head_size, 2).float() / config.head_size)
    torch.testing.assert_close(scale_frequencies(base, config.rope_scaling), expected)
    assert not torch.allclose(base, expected)
