"""Drawing a token for each of 16 rows of 128k logits: the compiled kernel beside the torch operations, on two threads;
and what penalties add to a step of requests that have long texts.

python -m benchmarks.run sampler
"""

from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch

from benchmarks.models import find_model
from benchmarks.repeated_step import GREEDY, RepeatedStep
from benchmarks.report import Claim, Context
from pdkv.connector_kit.bench.turns import times_in_turns
from pdkv.engine.worker.sampling.draw import DrawParams, draw
from pdkv.kernels import host
from pdkv.models.config import load_model_config
from pdkv.models.loader import load_decoder

NUM_ROWS, VOCAB_SIZE, NUM_THREADS = 16, 128_256, 2
ALLOWED_MS = 10.0
LIMITS = {"temperature": 0.5, "top-k 50": 0.4, "top-p 0.9": 0.2, "min-p 0.05": 0.5, "top-k 50, top-p 0.9": 0.4}
FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
}


def run(context: Context) -> list[Claim]:
    """One claim per filter, and top-p's milliseconds beside what is allowed. None where nothing was compiled."""
    if not host.can_draw():
        return []
    rows = 2 if context.quick else NUM_ROWS
    logits = (torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    threads = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    try:
        claims = [claim for name in FILTERS for claim in _compare(name, logits, 2 if context.quick else 25)]
        return [*claims, _penalized(context)]
    finally:
        torch.set_num_threads(threads)


def _compare(name: str, logits: torch.Tensor, rounds: int) -> list[Claim]:
    params = _params(len(logits), **FILTERS[name])
    if not torch.equal(draw(logits, params), _draw_by_torch(logits, params)):
        raise AssertionError(f"{name}: the kernel draws other tokens than torch")
    times = times_in_turns(
        {"compiled": lambda: draw(logits, params), "torch": lambda: _draw_by_torch(logits, params)}, rounds
    )
    compiled, by_torch = times["compiled"], times["torch"]
    figures = compiled.figures("compiled") | by_torch.figures("torch")
    claims = [Claim(f"{name}: compiled / torch", compiled.median / by_torch.median, LIMITS[name], "lower", figures)]
    if name.startswith("top-p"):  # at 16 rows
        claims.append(
            Claim(f"{name} / 10 ms", compiled.median / ALLOWED_MS, 1.0, "lower", compiled.figures("compiled"))
        )
    return claims


def _penalized(context: Context) -> Claim:
    sequences, length, rounds = (2, 256, 2) if context.quick else (64, 8192, 15)
    path, dtype = find_model(context.models, "tiny"), torch.bfloat16
    model = load_decoder(path, load_model_config(path), dtype=dtype, device=torch.device("cpu"), max_model_len=length)
    penalties = {"repetition_penalty": 1.05, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    params = {"off": GREEDY, "on": msgspec.structs.replace(GREEDY, **penalties)}
    steps = {name: RepeatedStep(model, dtype, sequences, length, params=own) for name, own in params.items()}
    times = times_in_turns(steps, rounds)
    on, off = times["on"], times["off"]
    name = f"penalties on / off, a step of tiny, {sequences} x {length} tokens"
    return Claim(name, on.median / off.median, 1.03, "lower", on.figures("on") | off.figures("off"))


def _draw_by_torch(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    with mock.patch.object(host, "can_draw", return_value=False):
        return draw(logits, params)


def _params(count: int, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> DrawParams:
    seeds, zeros = np.arange(count, dtype=np.uint64), np.zeros(count, np.uint64)
    filters = np.full(count, 1.0), np.full(count, top_k), np.full(count, top_p), np.full(count, min_p)
    return DrawParams(*filters, seeds, zeros, zeros)
