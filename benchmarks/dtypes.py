"""The matrix products of a layer in float32 and in bfloat16, with this processor's bfloat16 and with its emulation.

    python -m benchmarks.run dtypes

oneDNN's ONEDNN_MAX_CPU_ISA makes a child process compute as an older processor does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.report import Claim, Context
from pdkv.connector_kit.bench.turns import times_in_turns
from pdkv.host.processor import emulates_bfloat16
from pdkv.models.linear import linear_kind, make_linear

HIDDEN, INTERMEDIATE, NUM_LAYERS = 1024, 3072, 3
SHAPES = ((2 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))  # (out, in)
EMULATING = ("AVX512_CORE", "AVX2")
TIMEOUT_S = 600.0


def run(context: Context) -> list[Claim]:
    """Where bfloat16 is emulated float32 must be faster; where it is not, bfloat16. Single rows: figures alone."""
    native = [] if emulates_bfloat16() else ["DEFAULT"]
    claims = []
    for isa in [*native, *EMULATING]:
        for rows, figures in _measure(isa, context.quick).items():
            ratio = figures["float32 ms"] / figures["bfloat16 ms"]
            better = "higher" if isa == "DEFAULT" or int(rows) == 1 else "lower"
            name = "native bfloat16" if isa == "DEFAULT" else f"oneDNN limited to {isa}"
            claims.append(Claim(f"float32 / bfloat16, {rows} rows, {name}", ratio, 1.0, better, figures))
    return claims


def _measure(isa: str, quick: bool) -> dict[str, dict[str, float]]:
    """{rows: figures} of a child process."""
    command = [sys.executable, "-m", "benchmarks.dtypes", "2" if quick else "15"]
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa}
    root = Path(__file__).parent.parent
    result = subprocess.run(
        command, env=environment, cwd=root, check=True, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    found: dict[str, dict[str, float]] = json.loads(result.stdout)
    return found


def main() -> None:
    """The child: print {rows: figures}, on one thread."""
    torch.set_num_threads(1)
    layers = {}
    for dtype in (torch.float32, torch.bfloat16):
        kind = linear_kind(dtype, torch.device("cpu"), "torch")
        layers[dtype] = [make_linear(torch.randn(s).to(dtype), None, kind) for s in SHAPES * NUM_LAYERS]

    def products(dtype: torch.dtype, rows: int) -> None:
        inputs = {size: torch.ones(rows, size, dtype=dtype) for size in (HIDDEN, INTERMEDIATE)}
        for layer, (_, size) in zip(layers[dtype], SHAPES * NUM_LAYERS, strict=True):
            layer(inputs[size])

    found = {}
    for rows in (1, 8, 256):
        times = times_in_turns(
            {str(dtype).removeprefix("torch."): lambda d=dtype, n=rows: products(d, n) for dtype in layers},
            int(sys.argv[1]),
        )
        found[rows] = {key: ms for name, each in times.items() for key, ms in each.figures(name).items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
