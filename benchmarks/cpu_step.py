"""A decode step of one engine on a CPU, its passes fused or left to torch's operations; its linear layers alone beside.

    python -m benchmarks.run cpu_step
    python -m benchmarks.run cpu_step --threads 1 --cpu-time      on a machine that others use, too

Both have the same compiled linear layers (docs/cpu-linears.md). Nothing where those are not there.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.models import find_model
from benchmarks.repeated_step import RepeatedStep
from benchmarks.report import Claim, Context
from pdkv.connector_kit.bench.turns import times_in_turns
from pdkv.kernels.compiled import isa
from pdkv.models.config import load_model_config
from pdkv.models.decoder import Decoder, DecoderLayer
from pdkv.models.heads import CompiledRotation, TorchRotation
from pdkv.models.linear import Linear, linear_kind
from pdkv.models.loader import load_decoder
from pdkv.models.passes import RMSNorm, RowPass

SEQUENCES = (1, 8, 32)
CONTEXT = 128
DTYPES = (torch.float32, torch.bfloat16)
CPU = torch.device("cpu")


class Apart:
    """A linear layer behind torch's pass, which writes what it makes."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        return self._linear(x if before is None else before(x))

    def add(self, x: torch.Tensor, residual: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        return self._linear.add(x if before is None else before(x), residual)


def unfused(model: Decoder) -> Decoder:
    """The same weights, with torch's operations for all passes."""

    def plain(norm: RMSNorm | None) -> RMSNorm | None:
        return None if norm is None else RMSNorm(norm.weight, norm.fused.epsilon)

    def norm_of(norm: RMSNorm) -> RMSNorm:
        return RMSNorm(norm.weight, norm.fused.epsilon)

    rotation = model._rotation
    assert isinstance(rotation, CompiledRotation)
    layers = [
        DecoderLayer(
            input_norm=norm_of(layer.input_norm), qkv=Apart(layer.qkv), q_norm=plain(layer.q_norm),
            k_norm=plain(layer.k_norm), output=Apart(layer.output), mlp_norm=norm_of(layer.mlp_norm),
            gate_up=Apart(layer.gate_up), down=Apart(layer.down),
        )
        for layer in model._layers
    ]  # fmt: skip
    return Decoder(
        model.config, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads, embedding=model._embedding,
        layers=layers, norm=norm_of(model._norm), lm_head=model._lm_head,
        rotation=TorchRotation(rotation.table, model.num_heads, model.num_kv_heads),
    )  # fmt: skip


def linears_of(model: Decoder, dtype: torch.dtype, sequences: int) -> Callable[[], None]:
    """All linear layers of a step, with nothing between them."""
    config = model.config
    hidden, neurons = (torch.randn(sequences, n).to(dtype) for n in (config.hidden_size, config.intermediate_size))
    attended = torch.randn(sequences, model.num_heads * config.head_size).to(dtype)

    def run() -> None:
        for layer in model._layers:
            layer.qkv(hidden)
            layer.output.add(attended, hidden)
            layer.gate_up(hidden)
            layer.down.add(neurons, hidden)
        model._lm_head(hidden)

    return run


def run(context: Context) -> list[Claim]:
    """One claim for each model, dtype and number of sequences. None without the compiled kernels."""
    with torch.inference_mode():
        return [
            claim
            for size in (("tiny",) if context.quick else ("tiny", "mid"))
            for dtype in DTYPES
            if linear_kind(dtype, CPU) == "compiled"
            for claim in _claims(find_model(context.models, size), dtype, context)
        ]


def _claims(path: Path, dtype: torch.dtype, context: Context) -> list[Claim]:
    config = load_model_config(path)
    fused = load_decoder(path, config, dtype=dtype, device=CPU, max_model_len=CONTEXT)
    apart, claims = unfused(fused), []
    for sequences in SEQUENCES:
        work = {
            "fused": RepeatedStep(fused, dtype, sequences, CONTEXT),
            "unfused": RepeatedStep(apart, dtype, sequences, CONTEXT),
            "linears alone": linears_of(fused, dtype, sequences),
        }
        times = times_in_turns(work, 2 if context.quick else 30, context.clock)
        name = f"{path.name}, {str(dtype).removeprefix('torch.')}, {sequences} sequences, {isa()}"
        figures = {f"{each} ms": times[each].median for each in work}
        ratio = times["fused"].median / times["unfused"].median
        claims.append(
            Claim(f"{name}, {torch.get_num_threads()} threads: a step fused / unfused", ratio, 1.0, "lower", figures)
        )
    return claims
