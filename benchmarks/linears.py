"""A model's linear layers over the machine's limits: max(bytes / bandwidth, operations / peak), measured beside them.

    python -m benchmarks.run linears
    python -m benchmarks.run linears --threads 1 --cpu-time      on a machine that others use, too

Shapes are mid's (benchmarks/models.py). torch's own layers (oneDNN's packed ones) stand beside. Needs a C compiler.
"""

import ctypes
import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.report import Claim, Context
from benchmarks.support import support_module
from pdkv.connector_kit.bench.turns import times_in_turns
from pdkv.kernels.compiled import isa, levels
from pdkv.kernels.linear import PackedWeight, available
from pdkv.models.linear import linear_kind, make_linear

SHAPES = {"qkv": (2048, 1024), "output": (1024, 1024), "gate_up": (5632, 1024), "down": (1024, 2816)}  # (out, in)
ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
KINDS = {  # of inputs, of weights
    "float32": (torch.float32, torch.float32),
    "float32, weights of bfloat16": (torch.float32, torch.bfloat16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
}
ALLOWED = {512: 1.12}
"""The time over the bound, by rows; 1.6 where there are fewer than a prompt's."""

COLD_BYTES = 96 << 20
"""Weights that are read by turns, and the bytes that the bandwidth is measured with: more than a cache holds."""

PEAK_ROUNDS = 500_000
PEAKS = {"avx2": (12, 8), "avx512": (24, 16), "avx512_bf16": (24, 32)}
"""limits.c's: sums, and multiplications of each at once."""

PEAK_OF = {"v3": "avx2", "v4": "avx512", "v4_bf16": "avx512_bf16"}
"""Levels measured; lower ones are left out."""


class Case(NamedTuple):
    """One kind of layer, and how it is timed."""

    kind: str
    threads: int
    rounds: int
    clock: Callable[[], float]
    isa: str


class Limits:
    """What limits.c measures."""

    def __init__(self, folder: Path) -> None:
        """Compile it into `folder`."""
        source, library = Path(__file__).with_name("limits.c"), folder / "limits.so"
        flags = ["-std=gnu11", "-O3", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True, timeout=60.0)
        self._library = ctypes.CDLL(str(library))
        self._numbers = torch.zeros(COLD_BYTES // 4)

    def read(self, threads: int, num_bytes: int = COLD_BYTES) -> None:
        """Read so many bytes, COLD_BYTES at most."""
        address, count = ctypes.c_void_p(self._numbers.data_ptr()), ctypes.c_int64(num_bytes // 4)
        self._library.limit_read(address, count, ctypes.c_int(threads))

    def compute(self, name: str, threads: int) -> None:
        """PEAK_ROUNDS of PEAKS[name], on each thread."""
        getattr(self._library, f"limit_{name}")(ctypes.c_int64(PEAK_ROUNDS), ctypes.c_int(threads))

    @staticmethod
    def operations(name: str, threads: int) -> int:
        """How many `compute` does."""
        sums, lanes = PEAKS[name]
        return PEAK_ROUNDS * sums * lanes * 2 * threads


def peak_of(level: str, dtype: torch.dtype) -> str:
    """The best instructions of a level for inputs of this dtype, by its name in PEAKS."""
    return "avx512" if level == "v4_bf16" and dtype != torch.bfloat16 else PEAK_OF[level]


def peak_flops(threads: int) -> float:
    """Operations a second of this processor's best vector instructions; infinite: not known."""
    if shutil.which("cc") is None or isa() not in PEAK_OF:
        return math.inf
    name = PEAK_OF[isa()]
    with tempfile.TemporaryDirectory() as folder:
        limits = Limits(Path(folder))
        took = times_in_turns({"": lambda: limits.compute(name, threads)}, 5)[""]
    return Limits.operations(name, threads) / took.low * 1e3


def run(context: Context) -> list[Claim]:
    """One claim for each kind and number of rows: of the shape furthest from its bound. None without a kernel.

    Of the best instructions of this processor, and of avx2.
    """
    if not available() or shutil.which("cc") is None:
        return []
    threads, rounds = torch.get_num_threads(), 2 if context.quick else 15
    claims = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        limits = Limits(Path(folder))
        for name in [isa()] if context.quick else reversed(levels()):
            if name not in PEAK_OF:
                continue
            with support_module("isas").kernels_of(name):
                for kind in KINDS:
                    case = Case(kind, threads, rounds, context.clock, name)
                    claims += _claims(case, limits, quick=context.quick)
    return claims


def _claims(case: Case, limits: Limits, *, quick: bool) -> list[Claim]:
    all_rows = ROWS[1:7:3] if quick else ROWS
    worst, figures = dict.fromkeys(all_rows, 0.0), {rows: dict[str, float]() for rows in all_rows}
    for shape in ("output",) if quick else SHAPES:
        for rows, (ratio, found) in _shape(case, limits, shape, all_rows).items():
            worst[rows] = max(worst[rows], ratio)
            figures[rows] |= found
    used = case.isa
    return [
        Claim(
            f"{case.kind}, {rows} rows, {used}, {case.threads} threads: the worst layer / its bound",
            worst[rows], ALLOWED.get(rows, 1.6), "lower", figures[rows],
        )
        for rows in all_rows
    ]  # fmt: skip


def _shape(
    case: Case, limits: Limits, shape: str, all_rows: tuple[int, ...]
) -> dict[int, tuple[float, dict[str, float]]]:
    """{rows: (ratio, figures)}."""
    dtype, weight_dtype = KINDS[case.kind]
    outputs, inputs = SHAPES[shape]
    num_bytes = outputs * inputs * weight_dtype.itemsize
    count = -(-COLD_BYTES // num_bytes)
    weights = [torch.randn(outputs, inputs).to(weight_dtype) for _ in range(count)]
    packed = [PackedWeight(weight, None, dtype) for weight in weights]
    kind = linear_kind(dtype, torch.device("cpu"), "torch")
    by_torch = [make_linear(weight.to(dtype), None, kind) for weight in weights]
    del weights
    peak = peak_of(case.isa, dtype)
    found = {}
    for rows in all_rows:
        x = torch.randn(rows, inputs).to(dtype)
        times = times_in_turns(
            {
                "read": lambda: limits.read(case.threads),
                "compute": lambda: limits.compute(peak, case.threads),
                "layers": lambda x=x: [weight.multiply(x, None, case.threads) for weight in packed],
                "torch": lambda x=x: [linear(x) for linear in by_torch],
            },
            case.rounds if rows < 512 else min(case.rounds, 3),
            case.clock,
        )
        bandwidth = COLD_BYTES / times["read"].median
        operations = limits.operations(peak, case.threads) / times["compute"].median
        bound = max(num_bytes / bandwidth, 2 * outputs * inputs * rows / operations)
        found[rows] = (
            times["layers"].median / count / bound,
            {
                f"{shape}: ms": times["layers"].median / count,
                f"{shape}: torch ms": times["torch"].median / count,
                f"{shape}: bound ms": bound,
                f"{shape}: GB/s": bandwidth / 1e6,
                f"{shape}: GFLOP/s": operations / 1e6,
            },
        )
    return found
