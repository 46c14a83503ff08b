"""A decode step of one engine on a CPU, its passes fused or left to torch's operations; its linear layers alone beside.

    python -m benchmarks.run cpu_step
    python -m benchmarks.cpu_step MODELS --threads 1 --cpu-time      on a machine that others use, too

Both have the same compiled linear layers (docs/cpu-linears.md). Nothing where those are not there.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.models import find_model
from benchmarks.repeated_step import RepeatedStep
from benchmarks.report import Claim, Context, show
from benchmarks.turns import in_turns
from pdkv.kernels.linear import LEVELS, level
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


class Clock(NamedTuple):
    """How steps are timed."""

    threads: int
    rounds: int
    now: Callable[[], float]


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
    clock = Clock(torch.get_num_threads(), 2 if context.quick else 30, time.perf_counter)
    return measure(context.models, ("tiny",) if context.quick else ("tiny", "mid"), clock)


def measure(models: Path, sizes: tuple[str, ...], clock: Clock) -> list[Claim]:
    """With what these models' steps take."""
    before = torch.get_num_threads()
    torch.set_num_threads(clock.threads)
    try:
        with torch.inference_mode():
            return [
                claim
                for size in sizes
                for dtype in DTYPES
                if linear_kind(dtype, CPU) == "compiled"
                for claim in _claims(find_model(models, size), dtype, clock)
            ]
    finally:
        torch.set_num_threads(before)


def _claims(path: Path, dtype: torch.dtype, clock: Clock) -> list[Claim]:
    config = load_model_config(path)
    fused = load_decoder(path, config, dtype=dtype, device=CPU, max_model_len=CONTEXT)
    apart, claims = unfused(fused), []
    for sequences in SEQUENCES:
        work = {
            "fused": RepeatedStep(fused, dtype, sequences, CONTEXT),
            "unfused": RepeatedStep(apart, dtype, sequences, CONTEXT),
            "linears alone": linears_of(fused, dtype, sequences),
        }
        times = in_turns(work, clock.rounds, clock.now)
        name = f"{path.name}, {str(dtype).removeprefix('torch.')}, {sequences} sequences, {LEVELS[level()]}"
        figures = {f"{each} ms": times[each].median for each in work}
        ratio = times["fused"].median / times["unfused"].median
        claims.append(Claim(f"{name}, {clock.threads} threads: a step fused / unfused", ratio, 1.0, "lower", figures))
    return claims


def main() -> None:
    """Print the claims, of as many threads as asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="folder of random models, made when they are missing")
    parser.add_argument("--sizes", nargs="+", default=["tiny", "mid"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--cpu-time", action="store_true", help="of this thread: with --threads 1 only")
    options = parser.parse_args()
    if options.cpu_time and options.threads != 1:
        parser.error("--cpu-time is this thread's: it needs --threads 1")
    clock = Clock(options.threads, options.rounds, time.thread_time if options.cpu_time else time.perf_counter)
    print(show("cpu_step", measure(options.models, tuple(options.sizes), clock)))


if __name__ == "__main__":
    main()
