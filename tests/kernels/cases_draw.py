"""The draw on a device against the compiled one for the CPU; run by test_triton.py, in a process of its own."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from no_sync import DeviceTensors
from triton.runtime import interpreter

from pdkv.engine.worker.sampling.draw import DrawParams, draw
from pdkv.kernels import draw_triton as draw_module

INFINITY = math.inf
SEEDS = [0, 1 << 63, 2**64 - 1, 0x0123456789ABCDEF]
FILTERS = {
    "none": (1.0, 0, 1.0, 0.0),
    "top-k": (0.7, 20, 1.0, 0.0),
    "one": (1.0, 1, 1.0, 0.0),
    "more than there are": (1.0, 1 << 40, 1.0, 0.0),
    "top-p": (1.3, 0, 0.8, 0.0),
    "tiny top-p": (1.0, 0, 1e-300, 0.0),
    "nearly all": (1.0, 0, math.nextafter(1.0, 0.0), 0.0),
    "min-p": (1.0, 0, 1.0, 0.05),
    "all": (2.0, 30, 0.6, 0.01),
    "cold": (1e-5, 5, 0.9, 0.0),
    "all equal by heat": (1e300, 5, 0.5, 0.0),
    "warm": (50.0, 3, 0.97, 0.5),
}


def params_of(count: int) -> DrawParams:
    """`count` rows that take turns with all filters and seeds; each has a choice and position of its own."""
    rows = [list(FILTERS.values())[i % len(FILTERS)] for i in range(count)]
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*rows, strict=True))
    index = np.arange(count, dtype=np.uint64)
    seeds = np.array([SEEDS[i % 5 % len(SEEDS)] for i in range(count)], np.uint64)
    return DrawParams(temperature, top_k.astype(np.int64), top_p, min_p, seeds, index % 3, 2**32 - 1 - index)


def rows_of(vocab_size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    normal = rng.normal(0.0, 3.0, vocab_size)
    masked = np.where(rng.random(vocab_size) < 0.5, -INFINITY, normal)
    spoiled, endless, zeros = normal.copy(), normal.copy(), np.abs(normal).round() * -1.0
    spoiled[[vocab_size // 2, -1]] = math.nan
    endless[[vocab_size // 3, -1]] = INFINITY
    return {
        "normal": normal,
        "ties": normal.round(),
        "equal": np.full(vocab_size, -3.25),
        "two zeros": np.where(zeros == 0.0, rng.choice([0.0, -0.0], vocab_size), zeros),
        "peaked": np.where(np.arange(vocab_size) == vocab_size // 2, 40.0, normal),
        "wild": normal * 10.0 ** rng.integers(-45, 37, vocab_size),
        "tiny steps": 1.0 + np.arange(vocab_size) * 2.0**-23,
        "masked": masked,
        "all masked": np.full(vocab_size, -INFINITY),
        "nan": spoiled,
        "infinite": endless,
    }


def draw_on(device: torch.device, logits: torch.Tensor, params: DrawParams, patch: pytest.MonkeyPatch) -> list[int]:
    """On the GPU, or on tensors that say they are there, with the kernels in the interpreter."""
    if device.type == "cuda":
        return draw(logits.to(device), params).tolist()
    with DeviceTensors() as there:
        patch.setattr(draw_module, "draw_triton", there.launch(draw_module.draw_triton))
        return there.take(draw(there.put(logits), params)).tolist()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy remarks on infinities
@pytest.mark.parametrize(
    ("vocab_size", "dtype", "pivots", "kept"),
    [
        (1, torch.float32, 4, 8),
        (270, torch.float32, 64, 1),
        pytest.param(270, torch.bfloat16, 64, 20, marks=pytest.mark.slow),
        (37, torch.float16, 4, 8),
    ],
    ids=str,
)
def test_a_device_draws_what_the_cpu_draws(
    vocab_size: int, dtype: torch.dtype, pivots: int, kept: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of row, every filter; rows in tiles; with room for all tokens that may be a threshold, and for few."""
    monkeypatch.setattr(draw_module, "_TILE", 256)
    monkeypatch.setattr(draw_module, "_PIVOTS", pivots)
    monkeypatch.setattr(draw_module, "_KEPT", kept)
    kinds = rows_of(vocab_size, np.random.default_rng(vocab_size))
    rows = [row for row in kinds.values() for _ in range(3 if vocab_size > 37 else 1)]
    with np.errstate(over="ignore"):
        logits = torch.from_numpy(np.stack(rows).astype(np.float32)).to(dtype)
    params = params_of(len(logits))
    assert draw_on(device, logits, params, monkeypatch) == draw(logits, params).tolist()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # tokens of weight 0 arrive never
def test_a_vocabulary_of_128k(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a wider tensor."""
    if device.type == "cpu":  # fewer programs; a kernel of that size takes minutes to compile
        monkeypatch.setattr(draw_module, "_TILE", 1 << 15)
        monkeypatch.setattr(draw_module, "_PIVOTS", 16)
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(0.0, 3.0, (2, 128_256 + 16)).astype(np.float32))[:, :128_256]
    logits[1] = logits[1].round()
    seeds = np.array([5, 2**63], np.uint64)
    filters = np.array([1.0, 0.8]), np.array([50, 0]), np.array([0.9, 0.95]), np.zeros(2)
    params = DrawParams(*filters, seeds, np.zeros(2, np.uint64), np.arange(2, dtype=np.uint64))
    assert draw_on(device, logits, params, monkeypatch) == draw(logits, params).tolist()


class Reads:
    """How often kernels in the interpreter read each of the logits that they are given, on average."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.passes = 0.0
        self._logits = torch.empty(0)
        builder = type(interpreter.interpreter_builder)
        self._load, self._draw = builder.create_masked_load, draw_module.draw_triton
        patch.setattr(builder, "create_masked_load", lambda *arguments: self._count(*arguments))
        patch.setattr(draw_module, "draw_triton", self._launch)

    def _launch(self, logits: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        self._logits = logits
        return self._draw(logits, table)

    def _count(self, builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        begin = self._logits.data_ptr()
        is_logit = (pointers.data >= begin) & (pointers.data < begin + self._logits.nbytes)
        self.passes += (mask.data & is_logit).sum() / self._logits.numel()
        return self._load(builder, pointers, mask, *rest)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "chosen", [(0.7, 20, 1.0, 0.0), (1.0, 0, 0.95, 0.0), (0.6, 20, 0.95, 0.0), (0.2, 0, 0.99, 0.0), (5.0, 0, 0.5, 0.0)]
)
def test_filters_take_three_passes_over_a_row(
    chosen: tuple[float, int, float, float], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the race one more, where a bisection alone takes 16 for each filter."""
    if device.type == "cuda":
        pytest.skip("the interpreter counts")
    monkeypatch.setattr(draw_module, "_TILE", 1 << 12)
    monkeypatch.setattr(draw_module, "_PIVOTS", 16)
    rows = [np.random.default_rng(7).normal(0.0, 3.0, 4096), np.linspace(12.0, -9.0, 4096)]
    logits = torch.from_numpy(np.stack(rows).astype(np.float32))
    numbers = (np.full(2, value) for value in chosen)
    temperature, top_k, top_p, min_p = numbers
    words = np.arange(2, dtype=np.uint64)
    params = DrawParams(temperature, top_k.astype(np.int64), top_p, min_p, words, words, words)
    reads = Reads(monkeypatch)
    assert draw_on(device, logits, params, monkeypatch) == draw(logits, params).tolist()
    assert reads.passes == 4
