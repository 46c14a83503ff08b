"""Weights in 8 bits on a CPU: the model is the one with the weights that the numbers stand for."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from isas import kernels_of
from oracle import Oracle
from quantized_models import OneOf, dequantized, write
from safetensors.torch import load_file, save_file
from serving_checks import serve_directory
from small_models import make_hf_model

from pdkv import LLM, SamplingParams
from pdkv.config import EngineConfig
from pdkv.engine.worker.dtype import resolve_quantization
from pdkv.errors import ConfigError, ModelError
from pdkv.kernels.compiled import levels
from pdkv.kernels.linear import PackedWeight, available
from pdkv.models import eight_bits, linear, weight_files
from pdkv.models.config import load_model_config
from pdkv.models.eight_bits import quantize_int8
from pdkv.models.identity import model_identity
from pdkv.models.loader import load_decoder
from pdkv.models.parallel import ALONE
from pdkv.models.weight_files import loaded_bytes

CPU = torch.device("cpu")
PROMPTS = [[7, 3, 9, 1, 5], list(range(2, 61)), [11]]
needs_kernels = pytest.mark.skipif(not available(), reason="no compiler when pdkv was installed")


def tokens_of(path: Path, **options: Any) -> list[list[int]]:
    served = path.with_name("tokens") / "served"
    if not served.exists():
        serve_directory(path, served.parent)
    with LLM(str(served), dtype="float32", max_model_len=128, kv_cache_memory=1 << 22, **options) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS],
            SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
            use_tqdm=False,
        )
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True), ("phi3", False)])
@pytest.mark.parametrize("linears", ["auto", "torch"])
def test_tokens_are_those_of_the_dequantized_weights(family: str, tied: bool, linears: str, tmp_path: Path) -> None:
    origin = make_hf_model(tmp_path / "origin", family, "float32", tie_word_embeddings=tied)
    oracle = Oracle(dequantized(origin, tmp_path / "dense"))
    expected = [oracle.generate(prompt, 12) for prompt in PROMPTS]
    for isa in (levels() if linears == "auto" else ()) or ("",):
        with kernels_of(isa) if isa else nullcontext():
            outputs = tokens_of(origin, quantization="int8", cpu_linears=linears)
        for found, wanted in zip(outputs, expected, strict=True):
            assert wanted is None or found == wanted, isa
    assert any(expected)


def test_the_error_is_within_what_is_stated() -> None:
    weight = torch.randn(70, 130, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 70)[:, None]
    weight[3] = 0.0
    error = (quantize_int8(weight).dense() - weight).abs().amax(1)
    assert bool((error <= weight.abs().amax(1) / 254 * (1 + 1e-5)).all())
    for part in (slice(0, 64), slice(64, 130)):  # ranks' parts have the whole weight's scales
        assert torch.equal(quantize_int8(weight, part).dense(), quantize_int8(weight).dense()[:, part])
    weight[5, 7] = torch.nan
    with pytest.raises(ModelError, match="a weight: cannot be quantized to int8"):
        quantize_int8(weight)


def test_a_quantized_model_is_another_model(tiny_model_dir: Path) -> None:
    config = load_model_config(tiny_model_dir)
    quantized = resolve_quantization(EngineConfig(model=tiny_model_dir, quantization="int8"), config, CPU)
    identities = [model_identity(tiny_model_dir, each) for each in (config, quantized)]
    assert identities[0] != identities[1].removesuffix("-int8") != identities[1]
    with pytest.raises(ConfigError, match="--quantization int8 is for dense weights, and this checkpoint's"):
        quantized.quantized_at_load("int8", tiny_model_dir)
    with pytest.raises(ConfigError, match="--quantization int8 is for engines on a CPU"):
        resolve_quantization(EngineConfig(model=tiny_model_dir, quantization="int8"), config, torch.device("cuda:0"))


def block_checkpoint(tmp_path: Path, block: int) -> tuple[Path, Path]:
    """(quantized, dense): FP8 with a scale for each block of 128 x 128, as the official ones of Qwen3, or of others."""
    origin = make_hf_model(tmp_path / "origin", "qwen3", "float32", hidden_size=256, intermediate_size=384, head_dim=64)
    tensors, generator = load_file(origin / "model.safetensors"), torch.Generator().manual_seed(2)
    dense = dict(tensors)
    for name in [name for name in tensors if "_proj" in name]:
        rows, columns = tensors.pop(name).shape
        scale = torch.rand(-(-rows // block), -(-columns // block), generator=generator) * 0.02 + 0.005
        weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
        tensors |= {name: weight, f"{name}_scale_inv": scale}
        blown_up = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
        dense[name] = weight.float() * blown_up
    fields = {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic"}
    return write(origin, tmp_path / "fp8", tensors, fields), write(origin, tmp_path / "dense", dense)


@needs_kernels
@pytest.mark.parametrize(("block", "ranks", "num_kept"), [(128, 1, 12), (64, 2, 12), (32, 1, 0)])
def test_block_scaled_fp8_stays_in_8_bits(
    block: int, ranks: int, num_kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    path, dense = block_checkpoint(tmp_path, block)
    kept = []

    class Spy(eight_bits.CompiledLinear):
        def __init__(self, weight: Any, *rest: Any) -> None:
            super().__init__(weight, *rest)
            kept.append(weight.numbers.dtype)

    monkeypatch.setattr(eight_bits, "CompiledLinear", Spy)
    load_decoder(
        path,
        load_model_config(path),
        dtype=torch.float32,
        device=CPU,
        max_model_len=64,
        parallel=OneOf(0, ranks) if ranks > 1 else ALONE,
    )
    assert kept == [torch.float8_e4m3fn] * num_kept
    assert ("get dense weights: its groups of 32 inputs" in caplog.text) == (num_kept == 0)
    assert ("weights of 8 bits take" in caplog.text) == (num_kept > 0)
    oracle = Oracle(dense)
    for found, prompt in zip(tokens_of(path), PROMPTS, strict=True):
        wanted = oracle.generate(prompt, 12)
        assert wanted is None or found == wanted


@needs_kernels
def test_tied_embeddings_are_one_table(tmp_path: Path) -> None:
    path = make_hf_model(tmp_path / "model", "qwen3", "float32", tie_word_embeddings=True)
    decoder = load_decoder(path, load_model_config(path), dtype=torch.float32, device=CPU, max_model_len=64)
    table = decoder._embedding._weight
    assert isinstance(table, PackedWeight)
    assert table is decoder._lm_head.weight
    stored = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    ids = torch.tensor([0, 5, len(stored) - 1])
    assert torch.equal(decoder._embedding(ids), stored[ids])


def test_fp8_with_nan_is_dense(tmp_path: Path) -> None:
    path, _ = block_checkpoint(tmp_path, 128)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"].view(torch.uint8)[3, 5] = 0x7F
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    load_decoder(path, load_model_config(path), dtype=torch.float32, device=CPU, max_model_len=64)


def test_weights_of_8_bits_count_once_when_memory_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded_bytes(tmp_path) == 0
    tensors = {"dense": torch.zeros(100, dtype=torch.bfloat16), "kept": torch.zeros(30, dtype=torch.float8_e4m3fn)}
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(weight_files, "flags", frozenset)
    assert [loaded_bytes(tmp_path, how) for how in (None, "int8")] == [430, 230]
    monkeypatch.setattr(weight_files, "flags", lambda: {"amx_bf16"})  # on which they become dense
    assert loaded_bytes(tmp_path) == 460


@needs_kernels
def test_kv_of_weights_that_stay_in_8_bits_is_other_kv_than_of_dense_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "flags", frozenset)  # without AMX, on which they become dense
    path, dense = block_checkpoint(tmp_path, 128)
    options = [EngineConfig(model=path, dtype="bfloat16", cpu_linears=kind) for kind in ("auto", "torch")]
    kept, plain = (resolve_quantization(each, load_model_config(path), CPU) for each in options)
    assert model_identity(path, kept) != model_identity(path, plain) == model_identity(path, load_model_config(path))
    config = load_model_config(dense)
    assert all(resolve_quantization(replace(each, model=dense), config, CPU) == config for each in options)
