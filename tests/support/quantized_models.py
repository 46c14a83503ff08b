"""Quantized checkpoints of small models, and the dense ones that they stand for."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pdkv.models.eight_bits import quantize_int8
from pdkv.models.parallel import TensorParallel
from pdkv.models.shard import Shard

GROUP = 32
Tensors = dict[str, torch.Tensor]
Layer = Callable[[torch.Generator, int, int], tuple[Tensors, torch.Tensor]]
"""A quantized layer of so many outputs and inputs: its tensors by what follows the layer's name, and its weight."""


class OneOf(TensorParallel):
    """A rank whose companions never compute."""

    def __init__(self, rank: int, size: int) -> None:
        self.shard = Shard(rank, size)


def numbers(generator: torch.Generator, shape: tuple[int, ...], high: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=generator)


def scales(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=generator) * 0.02 + 0.005


def packed(values: list[int], bits: int) -> int:
    """One int32 word, the first value in its low bits."""
    word = sum(value << (bits * i) for i, value in enumerate(values))
    return word - (1 << 32) if word >= 1 << 31 else word


def words_of(rows: list[list[int]], bits: int) -> torch.Tensor:
    count = 32 // bits
    cut = [[packed(row[i : i + count], bits) for i in range(0, len(row), count)] for row in rows]
    return torch.tensor(cut, dtype=torch.int32)


def fp8(
    generator: torch.Generator, out: int, columns: int, scale: torch.Tensor, name: str, block: int = 0
) -> tuple[Tensors, Any]:
    """`block`: rows and columns of a block, the last of which may be cut; 0: the scales divide both evenly."""
    weight = torch.randn(out, columns, generator=generator).to(torch.float8_e4m3fn)
    rows, places = (torch.arange(n) for n in (out, columns))
    table = scale.reshape(1, 1) if scale.numel() == 1 else scale
    high, wide = block or -(-out // len(table)), block or -(-columns // table.shape[1])
    at = table[rows[:, None] // high, places[None] // wide]
    return {".weight": weight, name: scale}, weight.float() * at


def fp8_tensor(generator: torch.Generator, out: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    return fp8(generator, out, columns, torch.tensor(0.01), ".weight_scale")


def fp8_channel(generator: torch.Generator, out: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    return fp8(generator, out, columns, scales(generator, out, 1), ".weight_scale")


def fp8_block(generator: torch.Generator, out: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    scale = scales(generator, -(-out // 32), -(-columns // 32))
    return fp8(generator, out, columns, scale, ".weight_scale_inv", 32)


def packed_int4(generator: torch.Generator, out: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    values, scale = numbers(generator, (out, columns), 16), scales(generator, out, columns // GROUP)
    dense = (values - 8) * scale[:, torch.arange(columns) // GROUP]
    shape = torch.tensor([out, columns])
    return {
        ".weight_packed": words_of(values.tolist(), 4), ".weight_scale": scale, ".weight_shape": shape,
    }, dense  # fmt: skip


def gptq_int4(generator: torch.Generator, out: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    groups = columns // GROUP
    values, zeros = numbers(generator, (columns, out), 16), numbers(generator, (groups, out), 15)
    scale = scales(generator, groups, out)
    shared = torch.Generator().manual_seed(columns)  # by layers with a common input
    order = torch.randperm(columns, generator=shared) // GROUP  # as activations were important
    dense = ((values - zeros[order] - 1) * scale[order]).T.contiguous()
    return {
        ".qweight": words_of(values.T.tolist(), 4).T.contiguous(), ".qzeros": words_of(zeros.tolist(), 4),
        ".scales": scale, ".g_idx": order.int(),
    }, dense  # fmt: skip


def awq_int4(generator: torch.Generator, out: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    groups = columns // GROUP
    values, zeros = numbers(generator, (columns, out), 16), numbers(generator, (groups, out), 16)
    scale = scales(generator, groups, out)
    order = torch.arange(columns) // GROUP
    dense = ((values - zeros[order]) * scale[order]).T.contiguous()

    def in_order(rows: torch.Tensor) -> list[list[int]]:
        """AutoAWQ's: of each eight the even ones first."""
        return [[row[i + k] for i in range(0, out, 8) for k in (0, 2, 4, 6, 1, 3, 5, 7)] for row in rows.tolist()]

    return {
        ".qweight": words_of(in_order(values), 4), ".qzeros": words_of(in_order(zeros), 4), ".scales": scale,
    }, dense  # fmt: skip


def compressed(kind: str, bits: int, form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": kind, "num_bits": bits, "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]
    }  # fmt: skip


FORMATS: dict[str, tuple[Layer, dict[str, Any]]] = {
    "compressed-fp8-tensor": (fp8_tensor, compressed("float", 8, "float-quantized", strategy="tensor")),
    "compressed-fp8-channel": (fp8_channel, compressed("float", 8, "float-quantized", strategy="channel")),
    "compressed-int4": (packed_int4, compressed("int", 4, "pack-quantized", strategy="group", group_size=GROUP)),
    "fp8-block": (fp8_block, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "fp8": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "gptq": (gptq_int4, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "awq": (awq_int4, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
}


O_PROJ = "model.layers.0.self_attn.o_proj"


def damage(path: Path, suffix: str, tensor: torch.Tensor | None) -> None:
    """Replace a tensor of one layer, or take it away."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(f"{O_PROJ}.{suffix}", None)
    if tensor is not None:
        tensors[f"{O_PROJ}.{suffix}"] = tensor
    save_file(tensors, file, metadata={"format": "pt"})


def write_pair(origin: Path, path: Path, name: str) -> tuple[Path, Path]:
    """(quantized, dense) directories of the same model, made of the dense one at `origin`."""
    layer, config = FORMATS[name]
    generator = torch.Generator().manual_seed(7)
    dense = load_file(origin / "model.safetensors")
    quantized = dict(dense)
    for key, weight in dense.items():
        if weight.ndim == 2 and ".layers.0." in key:  # the others are dense, as those that a config ignores
            tensors, dense[key] = layer(generator, *weight.shape)
            del quantized[key]
            quantized |= {key.removesuffix(".weight") + suffix: tensor for suffix, tensor in tensors.items()}
    return write(origin, path / "q", quantized, config), write(origin, path / "d", dense)


def write(origin: Path, path: Path, tensors: Tensors, quantization: dict[str, Any] | None = None) -> Path:
    shutil.copytree(origin, path)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((path / "config.json").read_text())
    if quantization is not None:
        fields["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(fields))
    return path


def dequantized(origin: Path, path: Path) -> Path:
    """The dense model that `--quantization int8` computes."""
    tensors = load_file(origin / "model.safetensors")
    tied = json.loads((origin / "config.json").read_text())["tie_word_embeddings"]
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and (tied or "embed_tokens" not in name):
            tensors[name] = quantize_int8(tensor).dense()
    return write(origin, path, tensors)
