"""Quantized checkpoints read as dense weights."""

import torch

from pdkv.models.checkpoint import Checkpoint
from pdkv.models.quantization import Quantization
from pdkv.models.quantized_tensors import MARKS, LayerTensors, read_weight


class DequantizedCheckpoint:
    """Returns quantized weights as float32, and others as they are stored."""

    def __init__(self, checkpoint: Checkpoint, quantization: Quantization, device: torch.device) -> None:
        """`checkpoint` remains owned by the caller; quantized weights are made dense on `device`."""
        self._checkpoint = checkpoint
        self._quantization = quantization
        self._device = device

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint or self.quantized(name.removesuffix(".weight")) is not None

    def quantized(self, layer: str) -> LayerTensors | None:
        """The tensors of a layer; None if its weight is not quantized."""
        if not any(layer + mark in self._checkpoint for mark in MARKS[self._quantization.method]):
            return None
        return LayerTensors(self._checkpoint, layer, self._device)

    def get(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] = ()) -> torch.Tensor:
        """As `Checkpoint.get`; a part of a quantized weight is cut from the whole."""
        layer = name.removesuffix(".weight")
        tensors = None if name == layer or len(shape) != 2 else self.quantized(layer)
        if tensors is None:
            return self._checkpoint.get(name, shape, part)
        return read_weight(tensors, self._quantization, (shape[0], shape[1])).dense()[part]
