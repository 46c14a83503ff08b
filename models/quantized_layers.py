"""Makes the linear layers of a quantized checkpoint that keep their quantized weights, and decides which do."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from pdkv.kernels.int4_weight import SYMMETRIC_ZERO, pack_int4
from pdkv.models.dequantize import DequantizedCheckpoint
from pdkv.models.linear import Linear
from pdkv.models.quantization import Quantization
from pdkv.models.quantized_columns import pack_columns
from pdkv.models.quantized_linear import Fp8Linear, Int4Linear
from pdkv.models.quantized_tensors import GroupedWeight, LayerTensors, read_input_scale, read_scales, read_weight

logger = logging.getLogger(__name__)

_MAX_NUMBER = 15
"""The largest number of 4 bits."""


class Piece(NamedTuple):
    """The outputs of one layer of the checkpoint; pieces with the same input become one layer of the model."""

    name: str
    rows: int  # all of the layer's
    mine: slice  # of them, this rank's


class NotKept(Exception):
    """A layer's weight cannot be kept as it is, for this reason."""


class QuantizedLayers:
    """Makes layers that keep quantized weights."""

    def __init__(self, source: DequantizedCheckpoint, quantization: Quantization, dtype: torch.dtype) -> None:
        """`dtype`: the model's computation dtype."""
        self._source = source
        self._quantization = quantization
        self._dtype = dtype
        self._told: set[str] = set()

    def linear(self, pieces: Sequence[Piece], columns: int, mine: slice, bias: torch.Tensor | None) -> Linear | None:
        """One layer of `pieces`, with this rank's columns `mine` of all `columns`.

        Returns:
            None if the layer must be dense: the checkpoint has dense weights for it, or weights that no kernel here
            reads, which is logged once for each reason.

        Raises:
            ModelError: a tensor is missing or does not fit.
        """
        found = [self._source.quantized(piece.name) for piece in pieces]
        layers = [layer for layer in found if layer is not None]
        if not layers:
            return None
        try:
            if len(layers) < len(pieces):
                raise NotKept("only a part of it is quantized")
            if self._quantization.fp8_inputs:
                return self._fp8(layers, pieces, columns, mine, bias)
            return self._int4(layers, pieces, columns, mine, bias)
        except NotKept as reason:
            if str(reason) not in self._told:
                self._told.add(str(reason))
                logger.info("%s, and others like it, get dense weights: %s", pieces[0].name, reason)
            return None

    def _fp8(
        self,
        layers: Sequence[LayerTensors],
        pieces: Sequence[Piece],
        columns: int,
        mine: slice,
        bias: torch.Tensor | None,
    ) -> Linear:
        weights, scales, inputs = [], [], []
        for layer, piece in zip(layers, pieces, strict=True):
            weight = layer.get(".weight", (piece.rows, columns), (piece.mine, mine))
            if weight.dtype != torch.float8_e4m3fn:
                raise layer.error(f"weight must be torch.float8_e4m3fn, got {weight.dtype}")
            weights.append(weight.view(torch.uint8))  # as which numbers can be put together on any device
            scales.append(read_scales(layer, piece.rows).expand(piece.rows, 1)[piece.mine])
            if self._quantization.input_scheme == "static":
                inputs.append(read_input_scale(layer))
        weight = torch.cat(weights).view(torch.float8_e4m3fn)
        largest = torch.stack(inputs).amax() if inputs else None  # pieces have one input
        return Fp8Linear(weight, torch.cat(scales), bias, largest)

    def _int4(
        self,
        layers: Sequence[LayerTensors],
        pieces: Sequence[Piece],
        columns: int,
        mine: slice,
        bias: torch.Tensor | None,
    ) -> Linear:
        if self._quantization.method == "scaled" or self._quantization.bits != 4:
            raise NotKept("there are kernels for 4-bit weights, and for FP8 where inputs are quantized")
        if self._dtype not in (torch.bfloat16, torch.float16):
            raise NotKept(f"4-bit weights are multiplied in bfloat16 and float16, and the model is of {self._dtype}")
        parts = [
            _part_of(self._grouped(layer, (piece.rows, columns)), piece.mine, mine)
            for layer, piece in zip(layers, pieces, strict=True)
        ]
        first = parts[0]
        if any(not first.is_like(other) for other in parts[1:]):
            raise NotKept("the layers that are computed together have other groups")
        zeros = [part.zeros for part in parts if part.zeros is not None]
        weight = pack_int4(
            torch.cat([part.numbers for part in parts]),
            torch.cat([part.scales for part in parts], dim=1),
            torch.cat(zeros, dim=1) if zeros else None,
            first.group_size,
        )
        return Int4Linear(weight, bias, first.order)

    def _grouped(self, layer: LayerTensors, shape: tuple[int, int]) -> GroupedWeight:
        weight = read_weight(layer, self._quantization, shape)
        assert isinstance(weight, GroupedWeight), self._quantization.method
        return weight


class _Part(NamedTuple):
    """A rank's part of one layer, its columns as PackedColumns has them."""

    numbers: torch.Tensor  # (rows, columns)
    scales: torch.Tensor  # (groups, rows)
    zeros: torch.Tensor | None
    group_size: int
    order: torch.Tensor | None  # (columns,), as of Int4Linear

    def is_like(self, other: "_Part") -> bool:
        """Whether rows of both pieces can be concatenated."""
        kinds = [(part.group_size, len(part.scales), part.scales.dtype, part.zeros is None) for part in (self, other)]
        if kinds[0] != kinds[1] or self.order is None or other.order is None:
            return kinds[0] == kinds[1] and self.order is other.order
        return torch.equal(self.order, other.order)


def _part_of(weight: GroupedWeight, rows: slice, columns: slice) -> _Part:
    """Cut a rank's part out of a layer. Raises NotKept: its groups are none that the kernel reads."""
    packed = pack_columns(weight.groups[columns])
    if packed is None:
        raise NotKept("its groups have too few inputs for the kernel")
    numbers = weight.numbers[rows, columns]
    numbers = numbers if packed.order is None else numbers[:, packed.order]
    zeros = None if weight.zeros is None else weight.zeros[:, rows]
    if packed.is_padding is not None:  # which adds nothing
        if zeros is not None and bool((zeros > _MAX_NUMBER).any()):
            raise NotKept(f"its groups need padding, and zero points of {_MAX_NUMBER + 1} and above cannot be padded")
        numbers[:, packed.is_padding] = SYMMETRIC_ZERO if zeros is None else zeros[packed.padded_groups()].T
    zeros = None if zeros is None else zeros[packed.groups]
    return _Part(numbers, weight.scales[packed.groups, rows], zeros, packed.group_size, packed.order)
