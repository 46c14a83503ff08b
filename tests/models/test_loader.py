"""Loading weights: dtypes, devices, and errors that name the tensor."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdkv.errors import ConfigError, ModelError
from pdkv.model_config import load_model_config
from pdkv.models.decoder import Decoder
from pdkv.models.loader import load_decoder
from pdkv.models.parallel import ALONE, TensorParallel
from pdkv.models.shard import Shard
from tests.conftest import HFModel

torch.set_num_threads(1)


class OneOf(TensorParallel):
    """A rank whose companions never compute."""

    def __init__(self, rank: int, size: int) -> None:
        self.shard = Shard(rank, size)


def load(path: Path, dtype: torch.dtype = torch.float32, parallel: TensorParallel = ALONE) -> Decoder:
    config = load_model_config(path)
    return load_decoder(path, config, dtype=dtype, device=torch.device("cpu"), max_model_len=64, parallel=parallel)


@pytest.fixture
def model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    path = tmp_path / "model"
    shutil.copytree(tiny_model_dir, path)
    return path


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    file = path / "model.safetensors"
    tensors = {**load_file(file), **{name.replace("__", "."): value for name, value in changes.items()}}
    save_file({name: value for name, value in tensors.items() if value is not None}, file, metadata={"format": "pt"})


def test_a_missing_tensor_is_named(model_dir: Path) -> None:
    rewrite(model_dir, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*missing"):
        load(model_dir)


def test_a_tensor_of_another_shape_is_named(model_dir: Path) -> None:
    rewrite(model_dir, model__norm__weight=torch.ones(65))
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*\(65,\).*\(64,\)"):
        load(model_dir)


def test_missing_and_broken_files_are_named(model_dir: Path) -> None:
    (model_dir / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(model_dir)
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        load(model_dir)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="model-00001-of-00002"):
        load(model_dir)
    (model_dir / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="weight_map"):
        load(model_dir)


def test_sharded_weights_are_the_same_weights(hf_model: HFModel) -> None:
    sharded = hf_model("llama", max_shard_size="100KB")
    assert (sharded / "model.safetensors.index.json").exists()
    hidden = torch.randn(3, 64)
    assert torch.equal(load(sharded).logits(hidden), load(hf_model("llama")).logits(hidden))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_converted(tiny_model_dir: Path, dtype: torch.dtype) -> None:
    model = load(tiny_model_dir, dtype)
    assert model.dtype == dtype
    hidden = torch.randn(5, 64)
    expected = load(tiny_model_dir).logits(hidden)
    torch.testing.assert_close(model.logits(hidden.to(dtype)).float(), expected, rtol=0.05, atol=0.05)


def test_sizes_are_derived_from_the_shard(tiny_model_dir: Path) -> None:
    model = load(tiny_model_dir, parallel=OneOf(1, 2))
    assert (model.num_heads, model.num_kv_heads) == (2, 1)
    replicated = load(tiny_model_dir, parallel=OneOf(3, 4))
    assert (replicated.num_heads, replicated.num_kv_heads) == (1, 1)
    with pytest.raises(ConfigError, match="3 ranks"):
        load(tiny_model_dir, parallel=OneOf(0, 3))
