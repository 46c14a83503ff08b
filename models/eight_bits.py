"""Linear layers whose weights have 8 bits in host memory: a checkpoint's own, or dense ones that are quantized."""

import logging
from collections.abc import Sequence

import torch

from pdkv.errors import ModelError
from pdkv.kernels.linear import GROUP_MULTIPLE, EightBits
from pdkv.models.dequantize import DequantizedCheckpoint
from pdkv.models.linear import CompiledLinear, Linear, LinearKind, make_linear
from pdkv.models.quantization import Quantization
from pdkv.models.quantized_layers import NotKept, Piece
from pdkv.models.quantized_tensors import LayerTensors, read_block_scales, read_scales

logger = logging.getLogger(__name__)

_MAX_INT8 = 127
_ROWS_BYTES = 1 << 24
"""Bytes of float32 rows that are quantized at once."""


def keeps_8_bits(quantization: Quantization, kind: LinearKind) -> bool:
    """Whether layers of this kind read weights of 8 bits: other KV than with the dense weights that they stand for."""
    return kind == "compiled" and quantization.method in ("int8", "scaled")


def quantize_int8(weight: torch.Tensor, columns: slice = slice(None), name: str = "a weight") -> EightBits:
    """Columns of a dense weight (outputs, inputs) in 8 bits.

    Each output has one scale: its largest absolute weight over all inputs, divided by 127. The error of a weight is at
    most 1/254 of that largest one, on any number of ranks.

    Raises:
        ModelError: it has NaN or infinity; the message names `name`.
    """
    scales = weight.new_empty((len(weight), 1), dtype=torch.float32)
    numbers = torch.empty(weight[:, columns].shape, dtype=torch.int8)
    count = max(1, _ROWS_BYTES // (4 * weight.shape[1]))
    for start in range(0, len(weight), count):
        rows = slice(start, start + count)
        some = weight[rows].float()
        scale = some.abs().amax(1, keepdim=True) / _MAX_INT8
        if not bool(scale.isfinite().all()):
            raise ModelError(f"{name}: cannot be quantized to int8, since it has NaN or infinity")
        scales[rows] = scale = scale.masked_fill(scale == 0, 1.0)
        numbers[rows] = (some[:, columns] / scale).round_().clamp_(-_MAX_INT8, _MAX_INT8)
    return EightBits(numbers, scales, numbers.shape[1])


class EightBitLayers:
    """Makes layers with weights of 8 bits, and knows what they take."""

    def __init__(
        self, source: DequantizedCheckpoint, quantization: Quantization, dtype: torch.dtype, kind: LinearKind
    ) -> None:
        """`dtype` of inputs and outputs; kinds that read no 8 bits get the dense weights that the numbers stand for."""
        self._source = source
        self._quantization = quantization
        self._dtype = dtype
        self._kind = kind
        self._told: set[str] = set()
        self._num_bytes = self._num_dense_bytes = 0

    @property
    def quantizes(self) -> bool:
        """Whether dense weights are quantized."""
        return self._quantization.method == "int8"

    def linear(self, pieces: Sequence[Piece], columns: int, mine: slice, bias: torch.Tensor | None) -> Linear | None:
        """As `QuantizedLayers.linear`. Raises ModelError."""
        try:
            parts = [self._part(piece, columns, mine) for piece in pieces]
            if len({(part.group_size, part.numbers.dtype) for part in parts}) > 1:
                raise NotKept("the layers that are computed together have other groups or formats")
        except NotKept as reason:
            if str(reason) not in self._told:
                self._told.add(str(reason))
                logger.info("%s, and others like it, get dense weights: %s", pieces[0].name, reason)
            return None
        numbers = torch.cat([part.numbers.view(torch.int8) for part in parts]).view(parts[0].numbers.dtype)
        return self._make(EightBits(numbers, torch.cat([part.scales for part in parts]), parts[0].group_size), bias)

    def head(self, table: torch.Tensor) -> tuple[torch.Tensor, Linear]:
        """A table (words, hidden) as a head, and the dense one that it stands for if held. Raises ModelError."""
        weight = quantize_int8(table, name="the head")
        if self._kind == "compiled":
            return table, self._make(weight, None)
        table = weight.dense().to(self._dtype)
        return table, make_linear(table, None, self._kind)

    def tell(self) -> None:
        """Log what the weights take."""
        if self._num_bytes:
            logger.info(
                "weights of 8 bits take %d MiB, where %s would take %d",
                self._num_bytes >> 20,
                str(self._dtype).removeprefix("torch."),
                self._num_dense_bytes >> 20,
            )

    def _make(self, weight: EightBits, bias: torch.Tensor | None) -> Linear:
        if self._kind != "compiled":
            return make_linear(weight.dense().to(self._dtype), bias, self._kind)
        made = CompiledLinear(weight, bias, self._dtype)
        self._num_bytes += made.weight.num_bytes
        self._num_dense_bytes += weight.numbers.numel() * self._dtype.itemsize
        return made

    def _part(self, piece: Piece, columns: int, mine: slice) -> EightBits:
        """This rank's. Raises NotKept and ModelError."""
        if self.quantizes:
            rows = (piece.mine, slice(None)) if piece.mine != slice(0, piece.rows) else ()
            weight = self._source.get(f"{piece.name}.weight", (piece.rows, columns), rows)
            if not weight.dtype.is_floating_point or weight.dtype.itemsize == 1:
                raise ModelError(f"{piece.name}: is stored as {weight.dtype}, and int8 is made of dense weights")
            return quantize_int8(weight, mine, piece.name)
        layer = self._source.quantized(piece.name)
        if layer is None:
            raise NotKept("the checkpoint has dense ones")
        return self._stored(layer, piece, columns, mine)

    def _stored(self, layer: LayerTensors, piece: Piece, columns: int, mine: slice) -> EightBits:
        shape = (piece.rows, columns)
        numbers = layer.get(".weight", shape, (piece.mine, mine))
        if numbers.dtype not in (torch.int8, torch.float8_e4m3fn):
            raise NotKept(f"no kernel reads {numbers.dtype}")
        if numbers.dtype != torch.int8 and bool((numbers.view(torch.int8) & 0x7F == 0x7F).any()):
            raise NotKept("they have NaN")
        block = self._quantization.block
        scales = None if block is None else read_block_scales(layer, block, shape)
        if scales is None or block is None:
            return EightBits(numbers, read_scales(layer, piece.rows).expand(piece.rows, 1)[piece.mine], len(numbers[0]))
        scales = scales.repeat_interleave(min(block[0], piece.rows), 0)[piece.mine]
        scales = scales[:, mine.start // block[1] : -(-mine.stop // block[1])]
        if scales.shape[1] == 1:
            return EightBits(numbers, scales, len(numbers[0]))
        if mine.start % block[1] or block[1] % GROUP_MULTIPLE:
            raise NotKept(f"its groups of {block[1]} inputs are cut, or are no multiples of {GROUP_MULTIPLE}")
        return EightBits(numbers, scales, block[1])
