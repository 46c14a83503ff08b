"""benchmarks/gpu.py runs, in Triton's interpreter and with tiny shapes, and what it times is right."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_smoke_run_reports_every_kernel() -> None:
    done = run("--device", "cpu", "--dtype", "float32", "--smoke", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    kernels = {"paged_attention", "write_kv", "gather_blocks", "scatter_blocks"}
    assert {result["name"] for result in results} == kernels | {"copy", "matmul"}
    assert all(result["rate"] > 0 for result in results)
    assert all(result["max_error"] < 1e-5 for result in results if result["name"] in kernels)


def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
