"""The Triton kernels: run in Triton's interpreter or on the GPU, and compiled for a GPU where there is none.

The interpreter must be chosen before Triton is imported, which other tests may have done: hence a new process.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.mark.parametrize("where", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kernels_equal_their_references(where: str) -> None:
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if where == "interpreter":
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "cases_triton.py")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def compile_for_gpu(kernel: Any, pointers: dict[str, str], constants: dict[str, Any]) -> dict[str, Any]:
    """Compile down to machine code of compute capability 9.0; arguments not named are int32."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {p.name: pointers.get(p.name, "i32") for p in kernel.params}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constexprs=constants, attrs={})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True}).asm


@pytest.mark.parametrize(("dtype", "has_window"), [("bf16", False), ("bf16", True), ("fp32", True)])
def test_attention_compiles_for_a_gpu(
    dtype: str, has_window: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter accepts programs that the compiler refuses."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels.paged_attention_triton import _paged_attention_kernel

    pointers = dict.fromkeys(("out", "q", "keys", "values"), f"*{dtype}")
    pointers |= {"block_tables": "*i32", "seq_lens": "*i32", "cu_seqlens_q": "*i32", "scale": "fp32"}
    constants = {"BLOCK_SIZE": 16, "HEAD_SIZE": 80, "HEAD_SIZE_PADDED": 128, "GROUP_SIZE": 4}
    constants |= {"TILE_QUERIES": 4, "TILE_ROWS": 16, "TILE_KV": 64, "HAS_WINDOW": has_window}
    assert compile_for_gpu(_paged_attention_kernel, pointers, constants)["cubin"]


def test_copies_compile_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels.kv_copy_triton import _copy_blocks_kernel, _write_kv_kernel

    pointers = dict.fromkeys(("keys", "values", "k", "v"), "*bf16") | {"slot_mapping": "*i64"}
    constants = {"BLOCK_SIZE": 16, "NUM_HEADS": 8, "HEAD_SIZE": 128, "PADDED": 1024}
    assert compile_for_gpu(_write_kv_kernel, pointers, constants)["cubin"]
    pointers = {"pool": "*bf16", "buffer": "*bf16", "block_ids": "*i64"}
    for to_pool in (True, False):
        constants = {"TO_POOL": to_pool, "COPY_ELEMENTS": 4096}
        assert compile_for_gpu(_copy_blocks_kernel, pointers, constants)["cubin"]


def test_digest_compiles_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels.digest_triton import _digest_kernel

    names = ("pool", "offsets", "words", "seeds", "constants", "digests")
    assert compile_for_gpu(_digest_kernel, dict.fromkeys(names, "*i64"), {"STRIPES": 64})["cubin"]


def test_kernels_import_without_triton() -> None:
    modules = "pdkv.kernels.kv_copy, pdkv.kernels.paged_attention"
    code = f"import sys; sys.modules['triton'] = None; import {modules}; assert 'triton.language' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
