"""What --dtype and --kv-cache-dtype take."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdkv.config import EngineConfig
from pdkv.engine.worker import dtype as dtype_module
from pdkv.engine.worker.dtype import resolve_dtype, resolve_kv_dtype
from pdkv.errors import ConfigError
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
    config = EngineConfig(model=path, dtype=asked)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, logger="pdkv.engine.worker.dtype"):
        assert resolve_dtype(config, load_model_config(path), device) == taken
    changed = asked == "auto" and taken != saved
    assert ("this processor (avx2) would emulate" in caplog.text) is changed


def test_kv_has_the_dtype_of_computation_or_is_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    auto, fp8 = EngineConfig(), EngineConfig(kv_cache_dtype="fp8")
    assert resolve_kv_dtype(auto, "bfloat16", CUDA) == "bfloat16"
    assert resolve_kv_dtype(fp8, "bfloat16", CPU) == "float8_e4m3fn"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert resolve_kv_dtype(fp8, "bfloat16", CUDA) == "float8_e4m3fn"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"fp8 needs compute capability 8\.9 or above, Old Card has 8\.6"):
        resolve_kv_dtype(fp8, "bfloat16", CUDA)
