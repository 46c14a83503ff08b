"""What --dtype auto takes."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdkv.config import EngineConfig
from pdkv.engine import dtype as dtype_module
from pdkv.engine.dtype import resolve_dtype
from pdkv.models.config import load_model_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("asked", "saved", "device", "emulates", "taken"),
    [
        ("auto", "bfloat16", CPU, True, "float32"),
        ("auto", "bfloat16", CPU, False, "bfloat16"),
        ("auto", "bfloat16", CUDA, True, "bfloat16"),
        ("auto", "float32", CPU, True, "float32"),
        ("auto", "float16", CPU, True, "float16"),
        ("bfloat16", "bfloat16", CPU, True, "bfloat16"),
        ("float16", "bfloat16", CPU, True, "float16"),
    ],
)
def test_only_an_emulated_bfloat16_that_nobody_asked_for_becomes_float32(
    asked: str, saved: str, device: torch.device, emulates: bool, taken: str,
    hf_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(dtype_module, "emulates_bfloat16", lambda: emulates)
    monkeypatch.setattr(dtype_module, "instruction_set", lambda: "avx2")
    path = hf_model("llama", dtype=saved)
    config = EngineConfig(model=str(path), dtype=asked)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, logger="pdkv.engine.dtype"):
        assert resolve_dtype(config, load_model_config(path), device) == taken
    changed = asked == "auto" and taken != saved
    assert ("this processor (avx2) would emulate" in caplog.text) is changed
