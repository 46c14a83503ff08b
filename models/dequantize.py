"""Quantized checkpoints as the dense weights that they stand for."""

from collections.abc import Callable, Mapping

import torch

from pdkv.errors import ModelError
from pdkv.models.checkpoint import Checkpoint
from pdkv.models.quantization import Method, Quantization

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of the numbers in a word of 8, the place of each: AutoAWQ packs 0, 2, 4, 6, 1, 3, 5, 7 from the low bits on."""


class DequantizedCheckpoint:
    """Gives each weight as float32 if it is quantized, and as it is stored if it is not."""

    def __init__(self, checkpoint: Checkpoint, quantization: Quantization) -> None:
        """`checkpoint` stays the caller's."""
        self._checkpoint = checkpoint
        self._quantization = quantization
        self._read = _READERS[quantization.method]

    def get(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] = ()) -> torch.Tensor:
        """As `Checkpoint.get`; a part of a quantized weight is cut from the whole."""
        layer = name.removesuffix(".weight")
        marks = _MARKS[self._quantization.method]
        if name == layer or not any(layer + mark in self._checkpoint for mark in marks):
            return self._checkpoint.get(name, shape, part)
        return self._read(_Layer(self._checkpoint, layer), self._quantization, shape)[part]


class _Layer:
    """The tensors of one layer."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint = checkpoint
        self._name = name

    def has(self, suffix: str) -> bool:
        return self._name + suffix in self._checkpoint

    def get(self, suffix: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._checkpoint.get(self._name + suffix, shape)

    def stored(self, suffix: str) -> torch.Tensor:
        return self._checkpoint.stored(self._name + suffix)

    def words(self, suffix: str, shape: tuple[int, int] | None = None) -> torch.Tensor:
        """Numbers packed into int32 (n, m); `shape` None: whatever it is."""
        words = self.stored(suffix) if shape is None else self.get(suffix, shape)
        if words.dtype != torch.int32 or words.ndim != 2:
            raise self.error(f"{suffix[1:]} must be int32 (n, m), got {words.dtype} of {tuple(words.shape)}")
        return words

    def error(self, text: str) -> ModelError:
        return ModelError(f"{self._checkpoint.path}: {self._name}: {text}")


_SCALE, _SCALE_INV = ".weight_scale", ".weight_scale_inv"


def _read_scaled(layer: _Layer, quantization: Quantization, shape: tuple[int, ...]) -> torch.Tensor:
    weight = layer.get(".weight", shape).float()
    scale = layer.stored(_SCALE_INV if layer.has(_SCALE_INV) else _SCALE).float()
    if quantization.block is not None and scale.ndim == 2 and scale.numel() > 1:
        scale = _blown_up(layer, scale, quantization.block, shape)
    elif scale.numel() == shape[0]:
        scale = scale.reshape(-1, 1)
    elif scale.numel() != 1:
        raise layer.error(f"a scale of shape {tuple(scale.shape)} fits no weight of shape {shape}")
    return weight * scale


def _blown_up(layer: _Layer, scale: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    """A scale for each number, from one for each block; the last ones may be cut."""
    wanted = tuple(-(-size // each) for size, each in zip(shape, block, strict=True))
    if tuple(scale.shape) != wanted:
        raise layer.error(f"scales of shape {tuple(scale.shape)}, blocks of {block} imply {wanted}")
    return scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def _read_packed(layer: _Layer, quantization: Quantization, shape: tuple[int, ...]) -> torch.Tensor:
    """Symmetric: stored with half of the range added."""
    rows, columns = shape
    bits = quantization.bits
    words = layer.words(".weight_packed", (rows, -(-columns * bits // 32)))
    numbers = _unpacked(words, bits)[:, :columns] - (1 << (bits - 1))
    scales = layer.stored(_SCALE).float()
    if scales.ndim != 2 or len(scales) != rows:
        raise layer.error(f"scales of shape {tuple(scales.shape)}, {rows} rows are implied")
    groups = _groups(layer, ".weight_g_idx", columns, scales.shape[1])
    return numbers * scales[:, groups]


def _read_gptq(layer: _Layer, quantization: Quantization, shape: tuple[int, ...]) -> torch.Tensor:
    rows, columns = shape
    bits = quantization.bits
    words = layer.words(".qweight", (columns * bits // 32, rows))
    numbers = _unpacked(words.T.contiguous(), bits)  # (out, in)
    zeros = _unpacked(layer.words(".qzeros"), bits) + quantization.zero_offset  # (groups, out)
    return _grouped(layer, numbers, zeros, shape)


def _read_awq(layer: _Layer, quantization: Quantization, shape: tuple[int, ...]) -> torch.Tensor:
    rows, columns = shape
    words = layer.words(".qweight", (columns, rows * quantization.bits // 32))
    numbers, zeros = (_in_awq_order(_unpacked(each, quantization.bits)) for each in (words, layer.words(".qzeros")))
    return _grouped(layer, numbers.T, zeros, shape)


def _grouped(layer: _Layer, numbers: torch.Tensor, zeros: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers (out, in), less the zero point (groups, out) and times the scale of the group of their input."""
    rows, columns = shape
    scales = layer.stored(".scales").float()
    if scales.shape != zeros.shape or scales.shape[1:] != (rows,):
        raise layer.error(f"scales and zero points of shapes {tuple(scales.shape)} and {tuple(zeros.shape)}")
    groups = _groups(layer, ".g_idx", columns, len(scales))
    return (numbers - zeros.T[:, groups]) * scales.T[:, groups]


def _groups(layer: _Layer, suffix: str, columns: int, num_groups: int) -> torch.Tensor:
    """The group of each input: equal parts, unless the checkpoint says otherwise."""
    if not layer.has(suffix):
        if not num_groups or columns % num_groups:
            raise layer.error(f"{num_groups} groups of scales do not divide {columns} inputs")
        return torch.arange(columns) // (columns // num_groups)
    groups = layer.get(suffix, (columns,)).long()
    if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
        raise layer.error(f"{suffix[1:]} names a group that is none of {num_groups}")
    return groups


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """(n, m) int32 as (n, m * 32 / bits) numbers without a sign, the low bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)


def _in_awq_order(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(len(numbers), -1, len(_AWQ_ORDER))[:, :, list(_AWQ_ORDER)].flatten(1)


_READERS: Mapping[Method, Callable[[_Layer, Quantization, tuple[int, ...]], torch.Tensor]] = {
    "scaled": _read_scaled,
    "packed": _read_packed,
    "gptq": _read_gptq,
    "awq": _read_awq,
}
_MARKS: Mapping[Method, tuple[str, ...]] = {
    "scaled": (_SCALE, _SCALE_INV),
    "packed": (".weight_packed",),
    "gptq": (".qweight",),
    "awq": (".qweight",),
}
"""Tensors by one of which a quantized layer is known."""
