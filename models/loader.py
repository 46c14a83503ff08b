"""Build a Decoder from a model directory: Hugging Face names, fused and sharded weights, dtype conversion."""

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Literal, Protocol

import torch

from pdkv.errors import ModelError
from pdkv.host.malloc import give_back_freed
from pdkv.kernels.linear import PackedWeight, copied
from pdkv.models.checkpoint import Checkpoint
from pdkv.models.config import ModelConfig
from pdkv.models.decoder import Decoder, DecoderLayer, GatedMlp, GroupedQueryAttention
from pdkv.models.dequantize import DequantizedCheckpoint
from pdkv.models.eight_bits import EightBitLayers, keeps_8_bits
from pdkv.models.family import FAMILIES
from pdkv.models.heads import make_rotation
from pdkv.models.linear import CompiledLinear, Linear, LinearKind, linear_kind, make_linear, make_norm
from pdkv.models.parallel import ALONE, TensorParallel
from pdkv.models.parallel_layers import (
    Embedding,
    GatheredLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    WideNorms,
)
from pdkv.models.passes import RMSNorm, gelu_mul, silu_mul
from pdkv.models.quantized_layers import Piece, QuantizedLayers
from pdkv.models.rope import make_rope_table
from pdkv.models.shared_weights import shared_weights
from pdkv.models.weight_files import WeightFiles

logger = logging.getLogger(__name__)

_DENSE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load_decoder(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    parallel: TensorParallel = ALONE,
    weights: WeightFiles | None = None,
    linears: Literal["auto", "torch"] = "auto",
    keep_quantized: bool | None = None,
) -> Decoder:
    """Load one rank's weights into memory apart from their files, so that later changes to a file do not affect them.

    Args:
        max_model_len: upper limit of positions.
        weights: the files of `path`, already open; None: they are opened here.
        linears: as in `linear_kind`.
        keep_quantized: quantized weights stay as the checkpoint has them where a kernel reads them; None: those of 4
            bits on CUDA, those of 8 bits on a CPU.

    Raises:
        ModelError: a weight file or tensor is missing, broken, of an unexpected shape or dtype, left unread, or changed
            while it was read.
        ConfigError: the model cannot be divided among so many ranks.
    """
    with contextlib.ExitStack() as opened:
        files = weights or opened.enter_context(WeightFiles(path))
        checkpoint = opened.enter_context(Checkpoint(files))
        source: TensorSource = checkpoint
        kept: QuantizedLayers | EightBitLayers | None = None
        kind = linear_kind(dtype, device, linears)
        if kind == "compiled":
            opened.enter_context(shared_weights(files, repr((dtype, keep_quantized, parallel.shard)), config))
        if config.quantization is not None:
            source = dequantized = DequantizedCheckpoint(checkpoint, config.quantization, device)
            on_cuda = device.type == "cuda"
            method = config.quantization.method
            if method == "int8" or (keeps_8_bits(config.quantization, kind) and keep_quantized is not False):
                kept = EightBitLayers(dequantized, config.quantization, dtype, kind)
            elif config.quantization.fp8_inputs or (on_cuda if keep_quantized is None else keep_quantized):
                kept = QuantizedLayers(dequantized, config.quantization, dtype)
        decoder = Loader(source, config, dtype, device, kind, parallel, kept).decoder(max_model_len)
        if parallel.shard.rank == 0:  # whose layers have all biases
            extra = range(config.num_layers, config.num_layers + config.extra_layers)
            skipped = tuple(f"model.layers.{layer}." for layer in extra)
            checkpoint.check_all_read(quantized=config.quantization is not None, skipped=skipped)
        files.check_unchanged()
    if isinstance(kept, EightBitLayers):
        kept.tell()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what weights were on their way into their layout: others may share the device
    return decoder


class TensorSource(Protocol):
    """A source of weights by their Hugging Face names."""

    def get(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] = ()) -> torch.Tensor:
        """A tensor of that shape, or a part of it. Raises ModelError."""

    def __contains__(self, name: str) -> bool: ...


@dataclass
class Loader:
    """One load: reads tensors and turns them into layers.

    Packing or concatenating a tensor copies it; every other tensor that is kept is read with `keep`.
    """

    source: TensorSource
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    kind: LinearKind
    parallel: TensorParallel = ALONE
    kept: QuantizedLayers | EightBitLayers | None = None  # makes layers of quantized weights

    def __post_init__(self) -> None:
        shard, config = self.parallel.shard, self.config
        self.heads = shard.part(config.num_heads, "attention heads")
        self.kv_heads = shard.heads(config.num_kv_heads)
        self.family = FAMILIES.load(config.architecture)
        self.ropes = list(dict.fromkeys(config.ropes))  # of which each layer has one
        self.words = shard.padded_part(config.vocab_size)

    def decoder(self, max_model_len: int) -> Decoder:
        """One rank's decoder. Raises as `load_decoder`."""
        config = self.config
        is_packed = self.kind == "compiled" and self.kept is None and config.tie_word_embeddings
        narrow = is_packed and "lm_head.weight" not in self.source  # the head's layout is all that is kept
        embedding = self._vocabulary("model.embed_tokens.weight", keep=self.kind != "compiled", narrow=narrow)
        table = self._output_table(embedding)
        is_tied = table is embedding
        if isinstance(self.kept, EightBitLayers) and self.kept.quantizes:
            table, head = self.kept.head(table)
        else:
            head = self._linear([table], None)
        if is_tied:  # there is one table
            words = self._embedding(head.weight if isinstance(head, CompiledLinear) else table)
        else:
            words = self._embedding(self.own(embedding) if self.kind == "compiled" else embedding)
        del embedding, table
        num_heads, num_kv_heads = self.heads.stop - self.heads.start, self.kv_heads.stop - self.kv_heads.start
        queries, keys = (num_heads, num_kv_heads) if config.latent is None else (num_heads + 1, 0)
        tables = [make_rope_table(rope, max_model_len, self.dtype, self.device) for rope in self.ropes]
        return Decoder(
            config,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            embedding=words,
            layers=[self._next_layer(i) for i in range(config.num_layers)],
            norm=self.norm("model.norm"),
            lm_head=self._head(head),
            rotations=[make_rotation(table, queries, keys, self.kind) for table in tables],
        )

    def _output_table(self, embedding: torch.Tensor) -> torch.Tensor:
        """The head's weight. As in transformers, one of its own counts before config.json, which may say "tied"."""
        name, tied = "lm_head.weight", self.config.tie_word_embeddings
        if tied and name not in self.source:
            return embedding
        narrow = self.kind == "compiled" and not tied  # what is not compared with the embedding
        head = self._vocabulary(name, keep=self.kind == "plain", narrow=narrow)
        if tied and torch.equal(head, embedding):
            return embedding
        if tied:
            logger.warning("config.json ties the embeddings, and %s differs from them: it is used", name)
        return head

    def _vocabulary(self, name: str, *, keep: bool, narrow: bool) -> torch.Tensor:
        """This rank's rows of a table by token id; of equal size on all ranks, padded with zeros."""
        config, words = self.config, self.words
        shape = (config.vocab_size, config.hidden_size)
        if self.parallel.shard.size == 1:
            return self.tensor(name, shape, keep=keep, narrow=narrow)
        rows = self.tensor(name, shape, (words, slice(None)), keep=keep, narrow=narrow)
        num_rows = -(-config.vocab_size // self.parallel.shard.size)
        return torch.nn.functional.pad(rows, (0, 0, 0, num_rows - len(rows)))

    def _embedding(self, weight: torch.Tensor | PackedWeight) -> Embedding:
        if self.parallel.shard.size == 1:
            return Embedding(weight)
        return VocabularyParallelEmbedding(weight, self.words, self.parallel)

    def _head(self, part: Linear) -> Linear:
        if self.parallel.shard.size == 1:
            return part
        return GatheredLinear(part, self.config.vocab_size, self.parallel)

    def _next_layer(self, layer: int) -> DecoderLayer:
        """Without what the layer's making left in the heap: between weights that stay, that adds up to half of them."""
        made = self.layer(layer)
        if self.device.type == "cpu":
            give_back_freed()
        return made

    def layer(self, layer: int) -> DecoderLayer:
        """A layer as the family has it: its `attention` and `mlp` name functions (loader, layer, prefix) -> the part,
        whose tensors' names begin with the prefix.
        """
        prefix, family, norms = f"model.layers.{layer}.", self.family, self.family.norms
        attention = resolve_name(family.attention) if family.attention else Loader.attention
        mlp = resolve_name(family.mlp) if family.mlp else Loader.gated_mlp
        before, post, mlp_before, mlp_post = (None if name is None else self.norm(prefix + name) for name in norms)
        scaled = None if self.config.residual_scale == 1.0 else _Scaled(self.config.residual_scale)
        return DecoderLayer(
            attention(self, layer, prefix + "self_attn."),
            mlp(self, layer, f"{prefix}{family.mlp_name}."),
            attention_norm=before,
            attention_post=post or scaled,
            mlp_norm=mlp_before,
            mlp_post=mlp_post or scaled,
        )

    def attention(self, layer: int, prefix: str) -> GroupedQueryAttention:
        """Grouped-query attention over this rank's heads."""
        config = self.config
        q, kv = self._rows(self.heads), self._rows(self.kv_heads)
        q_rows, kv_rows = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        parts = [(prefix + "q_proj", q_rows, q), (prefix + "k_proj", kv_rows, kv), (prefix + "v_proj", kv_rows, kv)]
        halves = _halves(config.head_size, config.rotary_size) if self.family.interleaved else None
        return GroupedQueryAttention(
            self.fused(prefix + "qkv_proj", parts, bias=config.attention_bias, halves=halves),
            self.by_columns(prefix + "o_proj", q_rows, q, bias=config.attention_output_bias),
            config.head_size,
            q_norm=self._head_norm(prefix + "q_norm") if config.qk_norm else None,
            k_norm=self._head_norm(prefix + "k_norm") if config.qk_norm else None,
            rotation=self.ropes.index(config.ropes[layer]),
            wide_norms=self._wide_norms(prefix) if self.family.wide_qk_norm else None,
        )

    def gated_mlp(self, layer: int, prefix: str) -> GatedMlp:
        """A gated MLP with this rank's neurons."""
        config = self.config
        size, mine = config.intermediate_size, self.parallel.shard.part(config.intermediate_size, "MLP neurons")
        gate_up = [(prefix + name, size, mine) for name in ("gate_proj", "up_proj")]
        is_fused = config.fused_weights or self.family.fused_gate_up
        return GatedMlp(
            self.fused(prefix + "gate_up_proj", gate_up, bias=config.mlp_bias, is_fused=is_fused),
            self.by_columns(prefix + "down_proj", size, mine, bias=config.mlp_bias),
            gelu_mul if config.activation == "gelu_tanh" else silu_mul,
        )

    def gate_up_down(self, prefix: str, size: int) -> tuple[Linear, Linear]:
        """An expert's two products with this rank's part of `size` neurons; the ranks' results are not added up."""
        mine = self.parallel.shard.part(size, "neurons of an expert")
        gate, up, down = self.family.expert_names
        both = self.fused("", [(prefix + gate, size, mine), (prefix + up, size, mine)], bias=False, is_fused=False)
        return both, self.by_columns(prefix + down, size, mine, bias=False, adds_up=False)

    def norm(self, name: str) -> RMSNorm:
        """A norm of rows of the hidden size."""
        weight = self._norm_weight(name, self.config.hidden_size)
        return make_norm(weight, self.config.rms_norm_eps, self.kind)

    def _head_norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._norm_weight(name, self.config.head_size), self.config.rms_norm_eps)

    def _norm_weight(self, name: str, size: int) -> torch.Tensor:
        weight = self.tensor(name + ".weight", (size,), keep=True)
        return weight.float() + self.config.norm_offset if self.config.norm_offset else weight

    def _wide_norms(self, prefix: str) -> WideNorms:
        config, sizes = (
            self.config,
            [heads * self.config.head_size for heads in (self.config.num_heads, self.config.num_kv_heads)],
        )
        q, k = (self._norm_weight(f"{prefix}{name}_norm", size) for name, size in zip("qk", sizes, strict=True))
        mine = q[self._rows(self.heads)], k[self._rows(self.kv_heads)]
        return WideNorms(*mine, (sizes[0], sizes[1]), config.rms_norm_eps, self.parallel)

    def _rows(self, heads: slice) -> slice:
        return slice(heads.start * self.config.head_size, heads.stop * self.config.head_size)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        part: tuple[slice, ...] = (),
        *,
        keep: bool = False,
        narrow: bool = False,
    ) -> torch.Tensor:
        """With `keep` memory of its own; without, it may lie in the file, and is to be copied before the load ends.

        Straight to the device, where its dtype is changed: the host holds no more than what it reads. With `narrow`,
        bfloat16 stays what it is.
        """
        stored = self.source.get(name, shape, part)
        if stored.dtype not in _DENSE:
            raise ModelError(f"tensor {name!r} is stored as {stored.dtype}, which its quantization does not explain")
        moved = stored.to(self.device)
        dtype = stored.dtype if narrow and stored.dtype == torch.bfloat16 else self.dtype
        return moved.to(dtype, copy=keep and moved is stored)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy, among the weights that engines share."""
        return copied(tensor) if self.kind == "compiled" else tensor.clone(memory_format=torch.contiguous_format)

    def fused(
        self,
        fused_name: str,
        parts: list[tuple[str, int, slice]],
        *,
        bias: bool,
        is_fused: bool | None = None,
        halves: torch.Tensor | None = None,
        inputs: int | None = None,
    ) -> Linear:
        """Projections with a common input as one; each part is (name, all its rows, this rank's rows).

        Args:
            fused_name: the one tensor that holds all parts, in this order, in checkpoints that have them fused.
            is_fused: whether this is such a checkpoint; None: as the configuration says for all layers.
            halves: the order of a head's rows, in all parts but the last.
            inputs: how many there are; None: the hidden size.
        """
        hidden = inputs or self.config.hidden_size
        is_fused = self.config.fused_weights if is_fused is None else is_fused
        biases = [self.tensor(f"{name}.bias", (rows,))[mine] for name, rows, mine in parts] if bias else None
        own_bias = torch.cat(_in_halves(biases, halves)) if biases else None
        pieces = _pieces_of(fused_name, parts) if is_fused else [Piece(*part) for part in parts]
        kept = self.kept.linear(pieces, hidden, slice(0, hidden), own_bias) if self.kept and halves is None else None
        if kept is not None:
            return kept
        if is_fused:
            assert not bias, "no family with fused weights has biases"
            return self._linear(self._rows_of(fused_name + ".weight", parts), None)
        one = len(parts) == 1
        weights = [self._weight(f"{n}.weight", (rows, hidden), self._part(mine), one=one) for n, rows, mine in parts]
        return self._linear(_in_halves(weights, halves), own_bias)

    def _linear(self, weights: list[torch.Tensor], bias: torch.Tensor | None) -> Linear:
        return make_linear(weights, bias, self.kind, self.dtype)

    def _weight(
        self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] = (), *, one: bool = True
    ) -> torch.Tensor:
        """Some outputs of a linear layer's weight, or with `one` all, which a plain layer keeps and others copy."""
        return self.tensor(name, shape, part, keep=one and self.kind == "plain", narrow=self.kind == "compiled")

    def _rows_of(self, name: str, parts: list[tuple[str, int, slice]]) -> list[torch.Tensor]:
        """This rank's rows of each part of a fused tensor, in which the parts follow one another."""
        shape = (sum(rows for _, rows, _ in parts), self.config.hidden_size)
        if self.parallel.shard.size == 1:
            return [self._weight(name, shape)]
        pieces, begin = [], 0
        for _, rows, mine in parts:
            pieces.append(self._weight(name, shape, (slice(begin + mine.start, begin + mine.stop),)))
            begin += rows
        return pieces

    def by_columns(self, name: str, columns: int, mine: slice, *, bias: bool, adds_up: bool = True) -> Linear:
        """A projection back to the hidden size, divided by its input; ranks add their parts up if it `adds_up`."""
        hidden = self.config.hidden_size
        has_bias = bias and self.parallel.shard.rank == 0
        own_bias = self.tensor(f"{name}.bias", (hidden,), keep=True) if has_bias else None
        linear = None
        if self.kept is not None:
            linear = self.kept.linear([Piece(name, hidden, slice(0, hidden))], columns, mine, own_bias)
        if linear is None:
            part = self._part(slice(None), mine)
            linear = self._linear([self._weight(f"{name}.weight", (hidden, columns), part)], own_bias)
        return RowParallelLinear(linear, self.parallel) if adds_up and self.parallel.shard.size > 1 else linear

    def _part(self, *index: slice) -> tuple[slice, ...]:
        """What to read of a tensor: all of it where there is one rank."""
        return () if self.parallel.shard.size == 1 else index


class _Scaled:
    """What a part of a layer adds, times a factor."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(self._factor)


def _halves(head_size: int, rotary_size: int) -> torch.Tensor:
    """The order of a head's numbers in which those that are rotated together lie half of the rotated part apart.

    Products of queries and keys are the same in any order that both have.
    """
    order = torch.arange(head_size)
    order[:rotary_size] = torch.cat([order[:rotary_size:2], order[1:rotary_size:2]])
    return order


def _in_halves(parts: list[torch.Tensor], order: torch.Tensor | None) -> list[torch.Tensor]:
    """The parts, the rows of each head of all but the last in this order."""
    if order is None:
        return parts
    ordered = [part.view(-1, len(order), *part.shape[1:])[:, order].flatten(0, 1) for part in parts[:-1]]
    return [*ordered, parts[-1]]


def _pieces_of(fused_name: str, parts: list[tuple[str, int, slice]]) -> list[Piece]:
    """The parts as rows of the one layer that holds them all; one piece where all rows are wanted."""
    rows = sum(each for _, each, _ in parts)
    if all(mine == slice(0, each) for _, each, mine in parts):
        return [Piece(fused_name, rows, slice(0, rows))]
    pieces, begin = [], 0
    for _, each, mine in parts:
        pieces.append(Piece(fused_name, rows, slice(begin + mine.start, begin + mine.stop)))
        begin += each
    return pieces
