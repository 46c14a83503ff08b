"""Quantized checkpoints compute what the dense weights compute that they stand for, written out number by number."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import FORMATS, O_PROJ, OneOf, compressed, damage, fp8_tensor, write, write_pair
from safetensors.torch import load_file, save_file

from pdkv.errors import ModelError
from pdkv.models import linear, loader
from pdkv.models.checkpoint import Checkpoint
from pdkv.models.config import load_model_config
from pdkv.models.linear import Linear, LinearKind
from pdkv.models.loader import load_decoder
from pdkv.models.parallel import ALONE, TensorParallel
from pdkv.models.quantization import Quantization, read_quantization
from pdkv.models.quantized_tensors import LayerTensors, read_weight
from pdkv.models.weight_files import WeightFiles

torch.set_num_threads(1)


@pytest.fixture(params=FORMATS)
def pair(request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(quantized, dense) directories of the same model."""
    return write_pair(tiny_model_dir, tmp_path, request.param)


def load(path: Path, parallel: TensorParallel = ALONE) -> list[torch.Tensor]:
    """The weights of all linear layers of one rank."""
    weights = []

    def make_linear(
        weight: Sequence[torch.Tensor], bias: torch.Tensor | None, kind: LinearKind, dtype: torch.dtype
    ) -> Linear:
        weights.append(torch.cat(list(weight)))
        return linear.make_linear(weight, bias, kind, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "make_linear", make_linear)
        load_decoder(
            path, load_model_config(path), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64,
            parallel=parallel, linears="torch",
        )  # fmt: skip
    return weights


def test_numbers_of_a_stranger_cost_no_more_than_the_weight(tmp_path: Path) -> None:
    weight, scale = torch.ones(64, 96).to(torch.float8_e4m3fn), torch.rand(1, 3)
    save_file({"model.a.weight": weight, "model.a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files, Checkpoint(files) as checkpoint:
        layer = LayerTensors(checkpoint, "model.a", torch.device("cpu"))
        found = read_weight(layer, Quantization("scaled", block=(1 << 40, 32)), (64, 96))
        assert torch.equal(found.dense(), scale.repeat_interleave(32, 1).expand(64, 96))
    assert type(read_quantization(tmp_path, {"quant_method": "gptq", "bits": 4.0}).bits) is int


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_weights_are_those_that_the_numbers_stand_for(pair: tuple[Path, Path], ranks: int) -> None:
    quantized, dense = pair
    for rank in range(ranks):
        parallel = OneOf(rank, ranks) if ranks > 1 else ALONE
        found, expected = load(quantized, parallel), load(dense, parallel)
        assert len(found) == len(expected) > 4
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bits": 4}, "quant_method None"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; known: awq, compressed"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0"),
        ({"quant_method": "awq", "bits": 4, "group_size": "128"}, "group_size '128'"),
        (compressed("int", 4, "pack-quantized", group_size=-2), "group_0.weights.group_size -2"),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "version 'marlin'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "config_groups"),
        (compressed("float", 8, "float-quantized", block_structure=["a", 0]), "weights.block_structure"),
        (compressed("int", 4, "pack-quantized", symmetric=False), "symmetric weights"),
        (compressed("float", 4, "nvfp4-pack-quantized"), "symmetric weights"),
        ("fp8", "must be an object"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(config: Any, words: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_model_dir / "model.safetensors")
    path = write(tiny_model_dir, tmp_path / "q", tensors, config)
    with pytest.raises(ModelError, match=words):
        load_model_config(path)


DAMAGED: list[tuple[str, str, torch.Tensor | None, str]] = [
    ("gptq", "scales", torch.ones(3, 5), r"scales must have shape \(groups, 64\), got \(3, 5\)"),
    ("gptq", "scales", torch.full((2, 64), float("nan")), "scales must be finite, but has NaN or infinity"),
    ("gptq", "scales", torch.ones(2, 64, dtype=torch.int32), "scales must be of floating-point numbers, got"),
    ("gptq", "qzeros", None, "qzeros' is missing"),
    ("gptq", "qzeros", torch.ones(2, 5, dtype=torch.int32), r"qzeros must be torch.int32 of \(2, 8\), got .* \(2, 5\)"),
    ("gptq", "qzeros", torch.ones(2, 8), r"qzeros must be torch.int32 of \(2, 8\), got torch.float32"),
    ("gptq", "qweight", torch.ones(2, 2, dtype=torch.int32), r"qweight must be torch.int32 of \(8, 64\)"),
    ("gptq", "g_idx", torch.full((64,), 99, dtype=torch.int32), "names a group that is none of 2"),
    ("awq", "scales", torch.ones(5, 64), r"qzeros must be torch.int32 of \(5, 8\), got .* \(2, 8\)"),
    ("awq", "qzeros", None, "qzeros' is missing"),
    ("compressed-int4", "weight_scale", torch.ones(3, 2), r"weight_scale must have shape \(64, groups\), got \(3, 2\)"),
    ("compressed-int4", "weight_scale", torch.ones(64, 5), "of 5 groups, and groups of 32 imply 2 for 64 inputs"),
    ("awq", "g_idx", torch.zeros(64), "g_idx must be torch.int32, got torch.float32"),
    ("gptq", "g_idx", torch.full((64,), -1, dtype=torch.int32), "g_idx names a group that is none of 2"),
    ("gptq", "g_idx", torch.zeros(63, dtype=torch.int32), r"g_idx' has shape \(63,\), .* \(64,\)"),
    ("compressed-fp8-channel", "weight", torch.ones(64, 64, dtype=torch.uint8), "weight must be of FP8 or torch.int8"),
    ("compressed-fp8-channel", "weight_scale", torch.ones(7, 1), r"\(7, 1\) fits no weight of 64 rows"),
    ("compressed-fp8-tensor", "weight_scale", torch.tensor(float("inf")), "weight_scale must be finite"),
    ("fp8-block", "weight_scale_inv", torch.ones(2, 3), r"\(2, 3\), blocks of \(32, 32\) imply \(2, 2\)"),
]


@pytest.mark.parametrize(("name", "suffix", "tensor", "words"), DAMAGED)
def test_tensors_that_do_not_fit_are_named(
    name: str, suffix: str, tensor: torch.Tensor | None, words: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    path, _ = write_pair(tiny_model_dir, tmp_path, name)
    damage(path, suffix, tensor)
    with pytest.raises(ModelError, match=rf"{O_PROJ}.*{words}"):
        load(path)


def write_modelopt(origin: Path, path: Path, algorithm: str = "FP8") -> tuple[Path, Path]:
    """(as ModelOpt wrote FP8 until 0.29, with its own file beside config.json; the same with vLLM's older field)."""
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(origin / "model.safetensors")
    for name in [name for name in tensors if "layers" in name and tensors[name].ndim == 2]:
        made, _ = fp8_tensor(generator, *tensors.pop(name).shape)
        layer = name.removesuffix(".weight")
        tensors |= {layer + suffix: tensor for suffix, tensor in made.items()}
        tensors[layer + ".input_scale"] = torch.tensor(0.02)
    known = write(origin, path / "known", tensors, {"quant_method": "fp8", "activation_scheme": "static"})
    modelopt = write(origin, path / "modelopt", tensors)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}}
    (modelopt / "hf_quant_config.json").write_text(json.dumps(said))
    return modelopt, known


def test_fp8_that_modelopts_file_alone_explains_is_read(tiny_model_dir: Path, tmp_path: Path) -> None:
    """F51: without a scheme these numbers are weights without their scales, and the answers garbage."""
    modelopt, known = write_modelopt(tiny_model_dir, tmp_path)
    assert load_model_config(modelopt).quantization == load_model_config(known).quantization
    for one, other in zip(load(modelopt), load(known), strict=True):
        assert torch.equal(one, other)
    (modelopt / "hf_quant_config.json").unlink()
    with pytest.raises(ModelError, match=r"is stored as torch.float8_e4m3fn"):
        load(modelopt)


@pytest.mark.parametrize("said", [{"quantization": {"quant_algo": "NVFP4"}}, {"quantization": {}}, {}])
def test_another_algorithm_of_modelopts_is_refused_by_name(tiny_model_dir: Path, tmp_path: Path, said: Any) -> None:
    modelopt, _ = write_modelopt(tiny_model_dir, tmp_path)
    (modelopt / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match=r"hf_quant_config.json: quantization_config.*(NVFP4|None)"):
        load_model_config(modelopt)


def test_a_quantized_head_beside_tied_embeddings_is_used(tiny_model_dir: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_model_dir / "model.safetensors")
    made, dense = fp8_tensor(torch.Generator().manual_seed(3), *tensors.pop("lm_head.weight").shape)
    tensors |= {"lm_head" + suffix: tensor for suffix, tensor in made.items()}
    path = write(tiny_model_dir, tmp_path / "model", tensors, {"quant_method": "fp8"})
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    assert any(weight.shape == dense.shape and torch.equal(weight, dense) for weight in load(path))


def test_what_a_quantized_checkpoint_has_beside_its_numbers_is_read_or_named(pair: tuple[Path, Path]) -> None:
    quantized, _ = pair
    damage(quantized, "bias", torch.zeros(64))  # as GPTQ's writers add them
    load(quantized)
    damage(quantized, "bias", torch.ones(64))
    with pytest.raises(ModelError, match=r"does not use 1 tensors, 'model\.layers\.0\.self_attn\.o_proj\.bias'"):
        load(quantized)
