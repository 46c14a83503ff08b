"""Scales of FP8 KV as checkpoints have them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pdkv.errors import ModelError
from pdkv.models.kv_scales import read_kv_scales

ATTENTION = "model.layers.{}.self_attn."


def test_scales_are_found_by_any_name_and_are_one_where_there_are_none(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "a.safetensors")
    assert read_kv_scales(tmp_path, 3) == ()
    tensors = {
        ATTENTION.format(0) + "k_scale": torch.tensor(0.25),
        ATTENTION.format(0) + "v_scale": torch.tensor([1.5], dtype=torch.bfloat16),
        ATTENTION.format(1) + "kv_scale": torch.tensor(0.5),
        ATTENTION.format(2) + "k_proj.k_scale": torch.tensor([0.1]),
    }
    save_file(tensors, tmp_path / "b.safetensors")
    assert read_kv_scales(tmp_path, 3) == ((0.25, 1.5), (0.5, 0.5), (torch.tensor(0.1).item(), 1.0))


@pytest.mark.parametrize("value", [[0.0], [-1.0], [float("nan")], [float("inf")], [1.0, 2.0]], ids=str)
def test_what_is_no_scale_is_refused_by_name_and_value(value: list[float], tmp_path: Path) -> None:
    save_file({ATTENTION.format(1) + "v_scale": torch.tensor(value)}, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.v_scale' must be one positive number, .*got \["):
        read_kv_scales(tmp_path, 2)
