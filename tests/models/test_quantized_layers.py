"""Layers that keep a checkpoint's quantized weights compute what its dense weights compute, and take fewer bytes."""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantized_models import O_PROJ, OneOf, Tensors, damage, write_pair
from rank_threads import on_ranks
from safetensors.torch import load_file, save_file

from pdkv.config import EngineConfig
from pdkv.engine.worker.dtype import resolve_fp8
from pdkv.errors import ModelError
from pdkv.kernels.int4_weight import Int4Weight
from pdkv.kernels.linear_int4 import unpack_int4
from pdkv.models import loader
from pdkv.models.config import ModelConfig, load_model_config
from pdkv.models.decoder import Decoder, GatedMlp, GroupedQueryAttention
from pdkv.models.heads import Heads
from pdkv.models.identity import model_identity
from pdkv.models.linear import Linear, PlainLinear
from pdkv.models.loader import load_decoder
from pdkv.models.parallel import ALONE, TensorParallel
from pdkv.models.parallel_layers import RowParallelLinear
from pdkv.models.quantized_linear import Fp8Linear, Int4Linear, why_not_fp8
from tests.conftest import HFModel

torch.set_num_threads(1)

CPU = torch.device("cpu")
INT4 = ("compressed-int4", "gptq", "awq")
FP8 = ("compressed-fp8-tensor", "compressed-fp8-channel", "fp8")


@pytest.fixture(autouse=True)
def dense_layers_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "linear_kind", lambda *_: "plain")


def load(path: Path, config: ModelConfig | None = None, **options: Any) -> Decoder:
    options = {"dtype": torch.bfloat16, "keep_quantized": True} | options
    return load_decoder(path, config or load_model_config(path), device=CPU, max_model_len=64, **options)


def layers_of(decoder: Decoder) -> list[Linear]:
    """The linear layers of layer 0, whose weights are quantized."""
    first = decoder._layers[0]
    attention, mlp = first._attention, first._mlp
    assert isinstance(attention, GroupedQueryAttention)
    assert isinstance(mlp, GatedMlp)
    found = [attention._qkv, attention.output, mlp._gate_up, mlp._down]
    return [each._part if isinstance(each, RowParallelLinear) else each for each in found]


def dense_of(layer: Linear) -> torch.Tensor:
    """The weight in bfloat16, by the layer's inputs as they come."""
    if isinstance(layer, PlainLinear):
        return layer.weight
    assert isinstance(layer, Int4Linear)
    weight = unpack_int4(layer._weight, torch.bfloat16)
    if layer._order is None:
        return weight
    inputs = 1 + int(layer._order.max())  # padding adds nothing
    return torch.zeros(len(weight), inputs, dtype=weight.dtype).index_add_(1, layer._order, weight)


def rank_of(rank: int, ranks: int) -> TensorParallel:
    return OneOf(rank, ranks) if ranks > 1 else ALONE


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", INT4)
def test_packed_weights_are_the_dense_ones_to_the_bit(
    name: str, ranks: int, tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """160 inputs are 5 groups of 32, and two ranks cut the third; GPTQ's inputs are ordered by activation besides."""
    quantized, dense = write_pair(tiny_model_dir, tmp_path, name)
    for rank in range(ranks):
        caplog.clear()
        with caplog.at_level(logging.INFO, "pdkv"):
            found = layers_of(load(quantized, parallel=rank_of(rank, ranks)))
        expected = layers_of(load(dense, parallel=rank_of(rank, ranks)))
        for one, other in zip(found, expected, strict=True):
            assert isinstance(one, Int4Linear)
            assert torch.equal(dense_of(one), dense_of(other))
        assert "get dense weights" not in caplog.text


@pytest.mark.parametrize("name", INT4)
def test_4_bit_layers_compute_what_dense_ones_compute(name: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    """`x` may have its columns in another order than the weight: the sums differ by rounding then."""
    quantized, dense = write_pair(tiny_model_dir, tmp_path, name)
    x, residual = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    one, other = layers_of(load(quantized))[1], layers_of(load(dense))[1]
    bound = {"rtol": 2.0**-7, "atol": 2.0**-10}
    torch.testing.assert_close(one(x), other(x), **bound)
    torch.testing.assert_close(one.add(x, residual), other.add(x, residual), rtol=2.0**-6, atol=2.0**-7)


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("name", FP8)
def test_fp8_layers_are_within_what_rounding_inputs_costs(
    name: str, is_static: bool, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """FP8 e4m3 has 3 bits behind the first: half a step is 1/16 of a number at most, or 2**-10 of a scale."""
    quantized, dense = write_pair(tiny_model_dir, tmp_path, name)
    config = load_model_config(quantized).with_fp8_inputs()
    if is_static:
        config = make_static(quantized, config, 0.02)
    x, residual = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    layer, plain = layers_of(load(quantized, config))[1], layers_of(load(dense, dtype=torch.float32))[1]
    assert isinstance(layer, Fp8Linear)
    assert isinstance(plain, PlainLinear)
    weight = plain.weight.double()
    scales = torch.full((9, 1), 0.02) if is_static else x.float().abs().amax(1, keepdim=True) / 448
    of_inputs = (x.double().abs() / 16 + scales.double() * 2.0**-10) @ weight.abs().T
    expected = x.double() @ weight.T
    errors = (layer(x).double() - expected).abs()
    assert bool((errors <= of_inputs + expected.abs() * 2.0**-8).all())
    assert float((errors / of_inputs).max()) > 0.01, "inputs are quantized"
    kept = residual.clone()
    assert torch.equal(layer.add(x, residual), layer(x) + residual)
    assert torch.equal(kept, residual)


def make_static(path: Path, config: ModelConfig, scale: float) -> ModelConfig:
    """The checkpoint with a scale for the inputs of each quantized layer: k_proj's is smaller than q_proj's."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    layers = sorted(name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale"))
    tensors |= {f"{name}.input_scale": torch.tensor([scale / (1 + name.endswith("k_proj"))]) for name in layers}
    save_file(tensors, file, metadata={"format": "pt"})
    assert config.quantization is not None
    return replace(config, quantization=config.quantization._replace(input_scheme="static"))


def test_static_scales_of_a_common_input_are_their_largest(tiny_model_dir: Path, tmp_path: Path) -> None:
    path, _ = write_pair(tiny_model_dir, tmp_path, "fp8")
    layer = layers_of(load(path, make_static(path, load_model_config(path).with_fp8_inputs(), 0.02)))[0]
    assert isinstance(layer, Fp8Linear)
    assert float(layer._input_scale) == pytest.approx(0.02)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["compressed-fp8-tensor", "compressed-fp8-channel"])
def test_ranks_hold_their_parts_of_fp8_weights(name: str, ranks: int, tiny_model_dir: Path, tmp_path: Path) -> None:
    quantized, dense = write_pair(tiny_model_dir, tmp_path, name)
    config = load_model_config(quantized).with_fp8_inputs()
    for rank in range(ranks):
        found = layers_of(load(quantized, config, parallel=rank_of(rank, ranks)))
        expected = layers_of(load(dense, dtype=torch.float32, parallel=rank_of(rank, ranks)))
        for one, other in zip(found, expected, strict=True):
            assert isinstance(one, Fp8Linear)
            assert isinstance(other, PlainLinear)
            torch.testing.assert_close(one._weight.float() * one._scales.T, other.weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [*INT4, "compressed-fp8-tensor", "compressed-fp8-channel"])
@torch.inference_mode()
def test_two_ranks_compute_what_one_does(name: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Over Gloo, through what NCCL ranks use. FP8 with static scales: parts quantize their inputs as the whole does."""
    path, _ = write_pair(tiny_model_dir, tmp_path, name)
    config = load_model_config(path)
    config = make_static(path, config.with_fp8_inputs(), 0.02) if "fp8" in name else config
    token_ids = torch.randint(0, 384, (40,), generator=torch.Generator().manual_seed(5))

    def run(parallel: TensorParallel) -> torch.Tensor:
        decoder = load(path, config, parallel=parallel)
        assert all(isinstance(layer, Int4Linear | Fp8Linear) for layer in layers_of(decoder))
        with torch.inference_mode():
            return logits_of(decoder, token_ids)

    expected = run(ALONE)
    results = on_ranks(2, run, over_gloo=True)
    for logits in results:
        error = (logits - expected).square().mean().sqrt() / expected.std()
        assert float(error) < 0.015, "half as much again as rounding to bfloat16 costs"
        assert torch.equal(logits, results[0])


def tensors_of(layer: Linear) -> Iterator[torch.Tensor]:
    for value in vars(layer).values():
        values = value if isinstance(value, Int4Weight) else (value,)
        yield from (each for each in values if isinstance(each, torch.Tensor))


@pytest.mark.parametrize(("name", "bits"), [("awq", 4 + 40 / 32), ("compressed-int4", 4 + 32 / 32), ("fp8", 8)])
def test_quantized_layers_take_fewer_bytes(name: str, bits: float, hf_model: HFModel, tmp_path: Path) -> None:
    """A group of 32 has a scale of 32 bits, AWQ's a zero point of 8, too; a row of FP8 a scale."""
    quantized, dense = write_pair(hf_model("llama", hidden_size=256, intermediate_size=512), tmp_path, name)
    config = load_model_config(quantized)
    config = config.with_fp8_inputs() if name == "fp8" else config
    kept, plain = ([*map(tensors_of, layers_of(load(*of)))] for of in ((quantized, config), (dense,)))
    for one, other in zip(kept, plain, strict=True):
        (weight,) = other
        taken = sum(tensor.nbytes for tensor in one)
        of_rows = 4 * len(weight) if name == "fp8" else 0
        assert taken == weight.numel() * bits / 8 + of_rows
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in one)


def put(path: Path, tensors: Tensors) -> Path:
    file = path / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return path


def test_what_no_kernel_reads_gets_dense_weights_and_says_so(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = write_pair(tiny_model_dir, tmp_path, "gptq")
    with caplog.at_level(logging.INFO, "pdkv"):
        assert all(isinstance(layer, PlainLinear) for layer in layers_of(load(path, dtype=torch.float32)))
    assert "o_proj" not in caplog.text, "once for each reason"
    assert "self_attn.q_proj, and others like it, get dense weights: 4-bit weights are multiplied in" in caplog.text
    some_in_each = torch.arange(64) // 33
    config = load_model_config(path)
    assert config.quantization is not None
    config = replace(config, quantization=config.quantization._replace(group_size=None))
    for of_o_proj, words in (
        (
            {"g_idx": torch.arange(64) // 4, "scales": torch.ones(16, 64), "qzeros": torch.ones(16, 8)},
            "have too few inputs",
        ),
        (
            {"g_idx": some_in_each, "scales": torch.ones(2, 64), "qzeros": -torch.ones(2, 8)},
            "zero points of 16 and above cannot be padded",
        ),
        ({"g_idx": some_in_each, "qzeros": torch.ones(2, 8)}, "nothing"),
    ):
        caplog.clear()
        put(path, {f"{O_PROJ}.{name}": x if name == "scales" else x.int() for name, x in of_o_proj.items()})
        with caplog.at_level(logging.INFO, "pdkv"):
            layer = layers_of(load(path, config))[1]
        assert isinstance(layer, Int4Linear) == (words == "nothing")
        assert (words in caplog.text) == (words != "nothing")


def test_unequal_groups_are_padded_with_what_adds_nothing(tiny_model_dir: Path, tmp_path: Path) -> None:
    path, _ = write_pair(tiny_model_dir, tmp_path, "gptq")
    put(path, {f"{O_PROJ}.g_idx": (torch.randperm(64) // 50).int()})
    packed, dense = (layers_of(load(path, keep_quantized=kept))[1] for kept in (True, False))
    assert isinstance(packed, Int4Linear)
    assert packed._weight.inputs == 64 + 32
    assert torch.equal(dense_of(packed), dense_of(dense))
    x = torch.randn(3, 64).bfloat16()
    torch.testing.assert_close(packed(x), dense(x), rtol=2.0**-7, atol=2.0**-10)


def test_an_fp8_layer_without_its_input_scale_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    path, _ = write_pair(tiny_model_dir, tmp_path, "fp8")
    config = make_static(path, load_model_config(path).with_fp8_inputs(), 0.02)
    for tensor, words in (
        (None, "input_scale' is missing"),
        (torch.tensor([-1.0]), r"input_scale must be one positive number, got \[-1.0\]"),
        (torch.ones(2), "input_scale must be one positive number"),
    ):
        damage(path, "input_scale", tensor)
        with pytest.raises(ModelError, match=rf"{O_PROJ}.*{words}"):
            load(path, config)
    damage(path, "weight", torch.ones(64, 64, dtype=torch.int8))
    damage(path, "input_scale", torch.ones(1))
    with pytest.raises(ModelError, match=rf"{O_PROJ}: weight must be torch.float8_e4m3fn, got torch.int8"):
        load(path, config)


@pytest.mark.parametrize(
    ("changes", "capability", "words"),
    [
        ({}, (9, 0), None),
        ({}, (8, 0), "compute capability 8.0, and FP8 needs 8.9"),
        ({"device": "cpu"}, (9, 0), "the device is cpu"),
        ({"dtype": torch.float16}, (9, 0), "float16"),
        ({"ranks": 2}, (9, 0), None),
        ({"ranks": 4}, (9, 0), r"\[64, 40, 16, 16\]"),
        ({"block": (32, 32)}, (9, 0), "blocks"),
        ({"input_scheme": None}, (9, 0), "does not quantize inputs"),
    ],
)
def test_where_fp8_is_multiplied(
    changes: dict[str, Any],
    capability: tuple[int, int],
    words: str | None,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    path, _ = write_pair(tiny_model_dir, tmp_path, "fp8")
    config = load_model_config(path)
    assert config.quantization is not None
    of_method = {name: value for name, value in changes.items() if name in ("block", "input_scheme")}
    config = replace(config, quantization=config.quantization._replace(**of_method))
    device = torch.device(changes.get("device", "cuda:0"))
    reason = why_not_fp8(config, changes.get("dtype", torch.bfloat16), device, changes.get("ranks", 1))
    assert reason is None if words is None else re.search(words, str(reason))


def test_kv_of_fp8_inputs_is_other_kv(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4-bit weights compute what dense ones do; FP8 inputs do not, and an engine says so in its model's identity."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    path, _ = write_pair(tiny_model_dir, tmp_path / "fp8", "fp8")
    engine, config = EngineConfig(model=path, dtype="bfloat16"), load_model_config(path)
    on_gpu, on_cpu = (resolve_fp8(engine, config, torch.device(device)) for device in ("cuda:0", "cpu"))
    assert on_cpu == config
    assert model_identity(path, on_gpu) != model_identity(path, on_cpu)
    path, _ = write_pair(tiny_model_dir, tmp_path / "awq", "awq")
    config = load_model_config(path)
    assert resolve_fp8(EngineConfig(model=path), config, torch.device("cuda:0")) == config


def logits_of(decoder: Decoder, token_ids: torch.Tensor) -> torch.Tensor:
    """Of every token of one sequence (n,)."""
    heads, kv_heads = decoder.num_heads, decoder.num_kv_heads

    def attend(layer: int, qkv: torch.Tensor, passes: Heads | None) -> torch.Tensor:
        assert passes is not None
        passes.apply(qkv)
        q, k, v = qkv.transpose(0, 1).split((heads, kv_heads, kv_heads))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)

    hidden = decoder.forward(token_ids, torch.arange(len(token_ids)), attend, None)
    return decoder.logits(hidden)


@pytest.mark.parametrize(("name", "margin"), [("awq", 0.02), ("gptq", 0.02), ("compressed-fp8-channel", 0.1)])
@torch.inference_mode()
def test_whole_models_choose_the_same_tokens(name: str, margin: float, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Wherever the best of the dense model's tokens is ahead by `margin`."""
    quantized, dense = write_pair(tiny_model_dir, tmp_path, name)
    config = load_model_config(quantized)
    config = config.with_fp8_inputs() if "fp8" in name else config
    token_ids = torch.randint(0, 384, (60,), generator=torch.Generator().manual_seed(3))
    found, expected = logits_of(load(quantized, config), token_ids), logits_of(load(dense), token_ids)
    best = expected.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > margin
    assert int(is_clear.sum()) > 20
    assert torch.equal(found.argmax(1)[is_clear], expected.argmax(1)[is_clear])
