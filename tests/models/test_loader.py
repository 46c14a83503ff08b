"""Loading weights: dtypes, devices, and errors that name the tensor."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import OneOf
from safetensors.torch import load_file, save_file

from pdkv.errors import ConfigError, ModelError
from pdkv.models import loader
from pdkv.models.checkpoint import Checkpoint
from pdkv.models.config import load_model_config
from pdkv.models.decoder import Decoder
from pdkv.models.heads import Heads
from pdkv.models.linear import LinearKind, linear_kind
from pdkv.models.loader import load_decoder
from pdkv.models.parallel import ALONE, TensorParallel
from tests.conftest import HFModel

torch.set_num_threads(1)


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


def logits_of(model: Decoder) -> torch.Tensor:
    """(8, vocab) of a prompt that goes through every layer, by plain causal attention."""
    heads, kv_heads = model.num_heads, model.num_kv_heads

    def attend(layer: int, qkv: torch.Tensor, passes: Heads | None) -> torch.Tensor:
        assert passes is not None
        passes.apply(qkv)
        q, k, v = qkv.transpose(0, 1).split((heads, kv_heads, kv_heads))
        k, v = (part.repeat_interleave(heads // kv_heads, dim=0) for part in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(0, 1).flatten(1)

    tokens = torch.tensor([5, 300, 17, 2, 81, 5, 44, 199])
    with torch.inference_mode():
        return model.logits(model.forward(tokens, torch.arange(len(tokens)), attend, None))


def test_sharded_weights_are_the_same_weights(hf_model: HFModel) -> None:
    sharded = hf_model("llama", max_shard_size="100KB")
    assert (sharded / "model.safetensors.index.json").exists()
    assert torch.equal(logits_of(load(sharded)), logits_of(load(hf_model("llama"))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_converted(hf_model: HFModel, dtype: torch.dtype) -> None:
    """To what transformers makes of them, in every layer."""
    model = load(hf_model("llama"), dtype)
    assert model.dtype == dtype
    logits = logits_of(model)
    assert torch.equal(logits, logits_of(load(hf_model("llama", str(dtype).removeprefix("torch.")), dtype)))
    torch.testing.assert_close(logits, logits_of(load(hf_model("llama"))), rtol=0.05, atol=0.1)


def test_sizes_are_derived_from_the_shard(tiny_model_dir: Path) -> None:
    model = load(tiny_model_dir, parallel=OneOf(1, 2))
    assert (model.num_heads, model.num_kv_heads) == (2, 1)
    replicated = load(tiny_model_dir, parallel=OneOf(3, 4))
    assert (replicated.num_heads, replicated.num_kv_heads) == (1, 1)
    with pytest.raises(ConfigError, match="3 ranks"):
        load(tiny_model_dir, parallel=OneOf(0, 3))


@pytest.mark.parametrize("kind", sorted({"packed", "plain", linear_kind(torch.float32, torch.device("cpu"))}))
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("size", [1, 2])
def test_writing_to_the_file_afterwards_changes_no_loaded_weight(
    hf_model: HFModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kind: LinearKind, size: int
) -> None:
    """safetensors hands out views of the mapped file, which a copy onto it would change under a running engine."""
    monkeypatch.setattr(loader, "linear_kind", lambda *_: kind)
    path = Path(shutil.copytree(hf_model(family), tmp_path / "model"))
    decoder = load(path, parallel=OneOf(0, size))
    before = [tensor.clone() for tensor in tensors_of(decoder)]
    assert len(before) > 10
    file = path / "model.safetensors"
    with file.open("r+b") as out:
        out.write(bytes(file.stat().st_size))
    for tensor, copy in zip(tensors_of(decoder), before, strict=True):
        assert torch.equal(tensor, copy)


def tensors_of(root: object) -> list[torch.Tensor]:
    """Every tensor that an object of the model holds, at any depth, once; packed ones as plain ones."""
    found: dict[int, torch.Tensor] = {}

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[id(value)] = value.to_dense() if value.is_mkldnn else value
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)
        elif type(value).__module__.startswith(("pdkv.models", "pdkv.kernels")):
            names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())]
            for name in names:
                visit(getattr(value, name))

    visit(root)
    return list(found.values())


def test_a_file_that_is_replaced_during_the_load_is_an_error_that_names_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = Checkpoint.get
    file = model_dir / "model.safetensors"

    def replace_and_get(self: Checkpoint, *arguments: Any) -> torch.Tensor:
        if not (model_dir / "old").exists():
            file.rename(model_dir / "old")
            shutil.copy(model_dir / "old", file)
        return get(self, *arguments)

    monkeypatch.setattr(Checkpoint, "get", replace_and_get)
    with pytest.raises(ModelError, match=r"model\.safetensors: was replaced"):
        load(model_dir)


def transformers_logits(path: Path) -> torch.Tensor:
    import transformers

    tokens = torch.tensor([[5, 300, 17, 2, 81, 5, 44, 199]])
    with torch.inference_mode():
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        logits: torch.Tensor = model(tokens).logits[0]
    return logits


def edit_config(path: Path, **changes: Any) -> None:
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, **changes}))


def test_a_head_of_its_own_beside_tied_embeddings_is_used(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F53: as in transformers, with a warning."""
    edit_config(model_dir, tie_word_embeddings=True)
    with caplog.at_level("WARNING"):
        logits = logits_of(load(model_dir))
    torch.testing.assert_close(logits, transformers_logits(model_dir))
    assert "lm_head.weight differs" in caplog.text


def test_a_copy_of_the_embedding_stays_tied(hf_model: HFModel, tmp_path: Path, caplog: Any) -> None:
    path = Path(shutil.copytree(hf_model("llama", tie_word_embeddings=True), tmp_path / "model"))
    tied = load(path)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(path, lm_head__weight=embedding.clone())
    with caplog.at_level("WARNING"):
        copied = load(path)
    assert torch.equal(logits_of(copied), logits_of(tied))
    assert sum(t.numel() for t in tensors_of(copied)) == sum(t.numel() for t in tensors_of(tied))
    assert not caplog.records


def test_a_model_that_was_saved_without_its_head_is_read(hf_model: HFModel, tmp_path: Path) -> None:
    """As checkpoints for embeddings are, by `AutoModel`: no name begins with "model."."""
    path = Path(shutil.copytree(hf_model("llama", tie_word_embeddings=True), tmp_path / "model"))
    whole = logits_of(load(path))
    tensors = load_file(path / "model.safetensors")
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, path / "model.safetensors")
    assert torch.equal(logits_of(load(path)), whole)


def test_a_rank_takes_its_part_of_a_head_of_its_own(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's part is equal to the embedding's, the other's is not."""
    monkeypatch.setattr(loader, "linear_kind", lambda *_: "plain")
    edit_config(model_dir, tie_word_embeddings=True)
    embedding = load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"]
    head = torch.cat([embedding[:192], embedding[192:] * 2])
    rewrite(model_dir, lm_head__weight=head)
    for rank in (0, 1):
        rows = head[192 * rank :][:192]
        assert any(
            tensor.shape == rows.shape and torch.equal(tensor, rows)
            for tensor in tensors_of(load(model_dir, parallel=OneOf(rank, 2)))
        )


ROWS = torch.ones(64)


@pytest.mark.parametrize(
    ("tensors", "config", "named"),
    [
        (
            {"model.layers.0.self_attn.q_proj.bias": ROWS},
            {},
            r"does not use 1 tensors, 'model\.layers\.0.*q_proj\.bias'",
        ),
        ({"model.layers.2.mlp.down_proj.bias": ROWS}, {}, r"down_proj\.bias"),
        ({"model.layers.1.self_attn.k_norm.weight": torch.ones(16)}, {}, r"k_norm\.weight"),
        ({"lm_head.bias": torch.ones(384)}, {}, r"lm_head\.bias"),
        ({}, {"num_hidden_layers": 2}, r"does not use 9 tensors, 'model\.layers\.2\."),
        ({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}, {}, r"up_proj\.weight_scale"),
        ({"model.layers.0.mlp.up_proj.input_scale": torch.ones(1)}, {}, r"up_proj\.input_scale"),
    ],
)
def test_a_tensor_that_the_model_has_no_place_for_is_named(
    model_dir: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], named: str
) -> None:
    """F53: left out, it would be another model that speaks as fluently."""
    rewrite(model_dir, **{name.replace(".", "__"): tensor for name, tensor in tensors.items()})
    edit_config(model_dir, **config)
    with pytest.raises(ModelError, match=named):
        load(model_dir)


def test_tensors_that_change_nothing_may_be_left_out(model_dir: Path) -> None:
    attention = "model__layers__0__self_attn__"
    before = logits_of(load(model_dir))
    rewrite(
        model_dir,
        **{
            attention + "rotary_emb__inv_freq": torch.ones(8),
            attention + "k_scale": torch.ones(1),
            attention + "v_proj__v_scale": torch.ones(1),
            attention + "o_proj__bias": torch.zeros(64),
        },
    )
    assert torch.equal(logits_of(load(model_dir)), before)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int32])
def test_numbers_that_no_quantization_explains_are_refused(model_dir: Path, dtype: torch.dtype) -> None:
    weight = load_file(model_dir / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    rewrite(model_dir, model__layers__1__mlp__up_proj__weight=weight.to(dtype))
    with pytest.raises(ModelError, match=rf"up_proj\.weight' is stored as {dtype}"):
        load(model_dir)


def test_without_an_index_the_file_of_transformers_is_read_alone(model_dir: Path) -> None:
    """Beside it may lie the same weights in Mistral's own form, or older ones."""
    before = logits_of(load(model_dir))
    tensors = load_file(model_dir / "model.safetensors")
    save_file({name: -tensor for name, tensor in tensors.items()}, model_dir / "model_old.safetensors")
    save_file({"norm.weight": ROWS}, model_dir / "consolidated.safetensors")
    assert torch.equal(logits_of(load(model_dir)), before)
    torch.testing.assert_close(before, transformers_logits(model_dir))
