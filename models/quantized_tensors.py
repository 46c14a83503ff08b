"""The tensors of a quantized checkpoint for one layer: numbers, scales and zero points, checked and converted to one
form.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from pdkv.errors import ModelError
from pdkv.models.checkpoint import Checkpoint
from pdkv.models.quantization import Method, Quantization

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of the numbers in a word of 8: AutoAWQ packs 0, 2, 4, 6, 1, 3, 5, 7 from the low bits on."""

SCALE, _SCALE_INV, _INPUT_SCALE = ".weight_scale", ".weight_scale_inv", ".input_scale"

_SCALED = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.int8)

MARKS: Mapping[Method, tuple[str, ...]] = {
    "scaled": (SCALE, _SCALE_INV),
    "packed": (".weight_packed",),
    "gptq": (".qweight",),
    "awq": (".qweight",),
    "int8": (),
}
"""Tensors by one of which a quantized layer is known."""


class LayerTensors:
    """The tensors of one layer, on a device."""

    def __init__(self, checkpoint: Checkpoint, name: str, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self.device = device

    def has(self, suffix: str) -> bool:
        """Whether the checkpoint has the layer's tensor with this suffix."""
        return self._name + suffix in self._checkpoint

    def get(self, suffix: str, shape: tuple[int, ...], part: tuple[slice, ...] = ()) -> torch.Tensor:
        """As `Checkpoint.get`. Raises ModelError."""
        return self._checkpoint.get(self._name + suffix, shape, part).to(self.device)

    def stored(self, suffix: str) -> torch.Tensor:
        """As `Checkpoint.stored`. Raises ModelError."""
        return self._checkpoint.stored(self._name + suffix).to(self.device)

    def words(self, suffix: str, shape: tuple[int, int]) -> torch.Tensor:
        """Numbers packed into int32 (n, m). Raises ModelError."""
        words = self.stored(suffix)
        if words.dtype != torch.int32 or tuple(words.shape) != shape:
            got = f"{words.dtype} of {tuple(words.shape)}"
            raise self.error(f"{suffix[1:]} must be torch.int32 of {shape}, got {got}")
        return words

    def scales(self, suffix: str) -> torch.Tensor:
        """A tensor of floating-point numbers that are all finite. Raises ModelError."""
        scales = self.stored(suffix)
        if not scales.dtype.is_floating_point:
            raise self.error(f"{suffix[1:]} must be of floating-point numbers, got {scales.dtype}")
        if not bool(scales.float().isfinite().all()):
            raise self.error(f"{suffix[1:]} must be finite, but has NaN or infinity")
        return scales

    def error(self, text: str) -> ModelError:
        """A ModelError that names the layer."""
        return ModelError(f"{self._checkpoint.path}: {self._name}: {text}")


class GroupedWeight(NamedTuple):
    """weight[row, column] = (number - zero) * scale, with scale and zero point of the row and the column's group."""

    numbers: torch.Tensor  # (rows, columns) uint8
    scales: torch.Tensor  # (groups, rows), as they are stored
    zeros: torch.Tensor | None  # (groups, rows) uint8; None: half of the range
    groups: torch.Tensor  # (columns,) int64
    bits: int

    def dense(self) -> torch.Tensor:
        """(rows, columns) float32."""
        zeros: torch.Tensor | int = 1 << (self.bits - 1)
        if self.zeros is not None:
            zeros = self.zeros.int().T[:, self.groups]
        return (self.numbers.int() - zeros) * self.scales.float().T[:, self.groups]


class ScaledWeight(NamedTuple):
    """weight[row, column] = number * scale."""

    numbers: torch.Tensor  # (rows, columns)
    scales: torch.Tensor  # (), (rows, 1), or one for each number; float32

    def dense(self) -> torch.Tensor:
        """(rows, columns) float32."""
        return self.numbers.float() * self.scales


QuantizedWeight = GroupedWeight | ScaledWeight


def read_weight(layer: LayerTensors, quantization: Quantization, shape: tuple[int, int]) -> QuantizedWeight:
    """A whole layer's weight (rows, columns).

    Raises:
        ModelError: a tensor is missing or does not fit; names it, and what was expected.
    """
    return _READERS[quantization.method](layer, quantization, shape)


def read_scales(layer: LayerTensors, rows: int) -> torch.Tensor:
    """The scales of an 8-bit weight without blocks: () or (rows, 1), float32. Raises ModelError."""
    suffix = _SCALE_INV if layer.has(_SCALE_INV) else SCALE
    scales = layer.scales(suffix).float()
    if scales.numel() == 1:
        return scales.reshape(())
    if scales.numel() != rows:
        got = tuple(scales.shape)
        raise layer.error(f"{suffix[1:]} of shape {got} fits no weight of {rows} rows: one, or one for each row")
    return scales.reshape(rows, 1)


def read_block_scales(layer: LayerTensors, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor | None:
    """The scale of each block of a weight, the last ones maybe cut: (blocks of rows, blocks of columns), float32.

    Returns:
        None if the scales are of no blocks: `read_scales` reads them.

    Raises:
        ModelError: there are too many or too few.
    """
    suffix = _SCALE_INV if layer.has(_SCALE_INV) else SCALE
    scales = layer.scales(suffix).float()
    if scales.ndim != 2 or scales.numel() == 1:
        return None
    wanted = tuple(-(-size // each) for size, each in zip(shape, block, strict=True))
    if tuple(scales.shape) != wanted:
        raise layer.error(f"{suffix[1:]} of shape {tuple(scales.shape)}, blocks of {block} imply {wanted}")
    return scales


def read_input_scale(layer: LayerTensors) -> torch.Tensor:
    """The static scale () of a layer's inputs, float32. Raises ModelError."""
    scale = layer.scales(_INPUT_SCALE).float()
    if scale.numel() != 1 or float(scale) <= 0:
        raise layer.error(f"input_scale must be one positive number, got {scale.tolist()}")
    return scale.reshape(())


def _read_scaled(layer: LayerTensors, quantization: Quantization, shape: tuple[int, int]) -> ScaledWeight:
    numbers = layer.get(".weight", shape)
    if numbers.dtype not in _SCALED:
        raise layer.error(f"weight must be of FP8 or torch.int8, got {numbers.dtype}")
    blocks = None if quantization.block is None else read_block_scales(layer, quantization.block, shape)
    if blocks is not None and quantization.block is not None:
        rows, columns = map(min, quantization.block, shape)
        blown_up = blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return ScaledWeight(numbers, blown_up[: shape[0], : shape[1]])
    return ScaledWeight(numbers, read_scales(layer, shape[0]))


def _read_packed(layer: LayerTensors, quantization: Quantization, shape: tuple[int, int]) -> GroupedWeight:
    """Symmetric: stored with half of the range added."""
    rows, columns = shape
    bits = quantization.bits
    words = layer.words(".weight_packed", (rows, -(-columns * bits // 32)))
    scales = layer.scales(SCALE)
    if scales.ndim != 2 or len(scales) != rows:
        raise layer.error(f"weight_scale must have shape ({rows}, groups), got {tuple(scales.shape)}")
    groups = _groups(layer, ".weight_g_idx", columns, scales.shape[1], quantization)
    return GroupedWeight(_unpacked(words, bits)[:, :columns], scales.T, None, groups, bits)


def _read_gptq(layer: LayerTensors, quantization: Quantization, shape: tuple[int, int]) -> GroupedWeight:
    rows, columns = shape
    bits = quantization.bits
    words = layer.words(".qweight", (columns * bits // 32, rows))
    scales = _scales_of_groups(layer, rows)
    zeros = _unpacked(layer.words(".qzeros", (len(scales), rows * bits // 32)), bits) + quantization.zero_offset
    groups = _groups(layer, ".g_idx", columns, len(scales), quantization)
    return GroupedWeight(_unpacked(words.T.contiguous(), bits), scales, zeros, groups, bits)


def _read_awq(layer: LayerTensors, quantization: Quantization, shape: tuple[int, int]) -> GroupedWeight:
    rows, columns = shape
    bits = quantization.bits
    numbers = _in_awq_order(_unpacked(layer.words(".qweight", (columns, rows * bits // 32)), bits))
    scales = _scales_of_groups(layer, rows)
    zeros = _in_awq_order(_unpacked(layer.words(".qzeros", (len(scales), rows * bits // 32)), bits))
    groups = _groups(layer, ".g_idx", columns, len(scales), quantization)
    return GroupedWeight(numbers.T, scales, zeros, groups, bits)


def _scales_of_groups(layer: LayerTensors, rows: int) -> torch.Tensor:
    """(groups, rows)."""
    scales = layer.scales(".scales")
    if scales.ndim != 2 or scales.shape[1] != rows:
        raise layer.error(f"scales must have shape (groups, {rows}), got {tuple(scales.shape)}")
    return scales


def _groups(
    layer: LayerTensors, suffix: str, columns: int, num_groups: int, quantization: Quantization
) -> torch.Tensor:
    """The group of each column: equal parts, the last one maybe shorter, unless the checkpoint has a tensor of them."""
    told, is_listed = quantization.group_size, layer.has(suffix)
    size = (columns // max(num_groups, 1) if told is None else told) or columns
    wanted = -(-columns // size)
    if num_groups != wanted and not (told is None and is_listed):
        why = "which do not divide" if told is None else f"and groups of {size} imply {wanted} for"
        raise layer.error(f"its scales are of {num_groups} groups, {why} {columns} inputs")
    if not is_listed:
        return torch.arange(columns, device=layer.device) // size
    groups = layer.get(suffix, (columns,))
    if groups.dtype not in (torch.int32, torch.int64):
        raise layer.error(f"{suffix[1:]} must be torch.int32, got {groups.dtype}")
    groups = groups.long()
    if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
        raise layer.error(f"{suffix[1:]} names a group that is none of {num_groups}")
    return groups


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """(n, m) int32 as (n, m * 32 / bits) uint8, the low bits first."""
    count = 32 // bits
    numbers = torch.empty(*words.shape, count, dtype=torch.uint8, device=words.device)
    for i in range(count):
        numbers[..., i] = (words >> (bits * i)) & ((1 << bits) - 1)
    return numbers.flatten(1)


def _in_awq_order(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(len(numbers), -1, len(_AWQ_ORDER))[:, :, list(_AWQ_ORDER)].flatten(1)


_READERS: Mapping[Method, Callable[[LayerTensors, Quantization, tuple[int, int]], QuantizedWeight]] = {
    "scaled": _read_scaled,
    "packed": _read_packed,
    "gptq": _read_gptq,
    "awq": _read_awq,
}
