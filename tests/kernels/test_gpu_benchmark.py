"""benchmarks/gpu/kernels.py runs, in Triton's interpreter and with tiny shapes, and what it times is right."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


_LAYER = 3 * 2 * 2 * 16 * 32 * 4  # bytes of 3 blocks: K and V, 2 heads, 16 tokens, 32 numbers of 4 bytes
_INT4 = 48 * (512 // 2) + 3 * 48 * (4 + 1)  # bytes of 48 x 320 numbers in whole chunks; scales and zeros of 3 groups
_FP8 = 48 * 320 + 48 * 4  # bytes of as many numbers, and of scales
WORK = [  # name, shape, unit, and what is done in a call: bytes read and written once, or operations
    ("copy", "65536 bytes", "GB/s", 2 * 65536),
    ("matmul", "64^3", "TFLOP/s", 2 * 64 * 64 * 64),
    ("paged_attention", "decode, 2 x 40", "GB/s", 2 * 40 * (2 * 2 * 32 * 4) + 2 * (2 * 4 * 32 * 4)),
    ("torch_attention", "prefill, 20 of 20", "TFLOP/s", sum(range(1, 21)) * 4 * (2 * 32 + 2 * 32)),  # causal; 4 heads
    ("paged_attention", "prefill, 20 of 20", "TFLOP/s", sum(range(1, 21)) * 4 * (2 * 32 + 2 * 32)),
    ("torch_attention", "prefill, 8 of 40", "TFLOP/s", sum(range(33, 41)) * 4 * (2 * 32 + 2 * 32)),
    ("paged_attention", "prefill, 8 of 40", "TFLOP/s", sum(range(33, 41)) * 4 * (2 * 32 + 2 * 32)),
    ("rms_norm", "8 x 128", "GB/s", 2 * 8 * 128 * 4),
    ("silu_mul", "8 x 896", "GB/s", 8 * (896 + 448) * 4),
    ("pass_heads", "8 x 8 x 32", "GB/s", 2 * 8 * (4 + 2 * 2) * 32 * 4 + 2 * 8 * 32 * 4),  # and cos and sin of a row
    ("gather_blocks", "3 blocks x 2 layers x 2 heads", "GB/s", 2 * 2 * _LAYER),
    ("scatter_blocks", "3 blocks x 2 layers x 2 heads", "GB/s", 2 * 2 * _LAYER),
    ("gather_blocks", "3 blocks x 1 layers x 2 heads", "GB/s", 2 * _LAYER),
    ("scatter_blocks", "3 blocks x 1 layers x 2 heads", "GB/s", 2 * _LAYER),
    ("gather_blocks", "3 blocks x 2 layers x 1 heads", "GB/s", 2 * _LAYER),
    ("scatter_blocks", "3 blocks x 2 layers x 1 heads", "GB/s", 2 * _LAYER),
    ("linear_row", "320 to 48", "GB/s", 48 * 320 * 4),
    ("linear_int4", "1 rows x 320 to 48", "GB/s", _INT4 + (320 + 48) * 4),
    ("linear_fp8", "1 rows x 320 to 48", "GB/s", _FP8 + (320 + 48) * 2),
    ("linear_int4", "5 rows x 320 to 48", "GB/s", _INT4 + 5 * (320 + 48) * 4),
    ("linear_fp8", "5 rows x 320 to 48", "GB/s", _FP8 + 5 * (320 + 48) * 2),
    ("linear_int4", "300 rows x 320 to 48", "TFLOP/s", 300 * 320 * 48 * 2),
    ("linear_fp8", "300 rows x 320 to 48", "TFLOP/s", 300 * 320 * 48 * 2),
    ("draw", "2 x 500", "ms", 0),
]
"""Of the smoke run's shapes, worked out by hand."""


_RUN = """
import json, torch
import pytest
from benchmarks.gpu.kernels import SMALL, Bench
print(json.dumps([result._asdict() for result in Bench(torch.device("cpu"), torch.float32, SMALL, 1).run()]))
"""


@pytest.mark.slow
def test_smoke_run_reports_every_kernel() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [(result["name"], result["shape"]) for result in results] == [(name, shape) for name, shape, _, _ in WORK]
    for result, (name, _, unit, work) in zip(results, WORK, strict=True):
        assert result["unit"] == unit
        done_per_ms = {"GB/s": 1e6, "TFLOP/s": 1e9, "ms": 0}[unit] * result["rate"]
        assert math.isclose(done_per_ms * result["milliseconds"], work, rel_tol=1e-9), name
        error, bound = result["max_error"], 1e-2 if name == "linear_fp8" else 1e-5  # the former gives bfloat16
        assert error is None if name in ("copy", "matmul", "torch_attention") else error < bound, name
