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
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


MAX_SHARED_BYTES = 227 << 10
"""Of a program on such a GPU."""


def compile_for_gpu(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], *, num_warps: int = 4) -> Any:
    """Compile down to machine code of compute capability 9.0; arguments not named are int32."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {p.name: pointers.get(p.name, "i32") for p in kernel.params}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constexprs=constants, attrs={})
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True, "num_warps": num_warps}
    )


@pytest.mark.parametrize(
    ("dtype", "head_size", "tile_rows", "num_warps", "has_window", "in_parts"),
    [
        ("bf16", 80, 16, 4, True, True),
        ("bf16", 128, 128, 8, True, False),
        ("bf16", 256, 64, 4, False, False),
        ("fp32", 128, 16, 4, True, True),
    ],
)
def test_attention_compiles_for_a_gpu(
    dtype: str,
    head_size: int,
    tile_rows: int,
    num_warps: int,
    has_window: bool,
    in_parts: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interpreter accepts programs that the compiler refuses."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels.paged_attention_triton import _combine_kernel, _paged_attention_kernel

    pointers = dict.fromkeys(("q", "keys", "values"), f"*{dtype}")
    pointers |= {"out": "*fp32" if in_parts else f"*{dtype}", "bests": "*fp32", "totals": "*fp32", "parts": "*fp32"}
    pointers |= {"block_tables": "*i32", "seq_lens": "*i32", "cu_seqlens_q": "*i32", "scale": "fp32"}
    both = {"HEAD_SIZE": head_size, "HEAD_SIZE_PADDED": 1 << (head_size - 1).bit_length(), "HAS_WINDOW": has_window}
    constants = both | {"BLOCK_SIZE": 16, "GROUP_SIZE": 4, "TILE_QUERIES": tile_rows // 4, "TILE_ROWS": tile_rows}
    constants |= {"TILE_KV": 64 if head_size <= 128 else 32, "IN_PARTS": in_parts}
    compiled = compile_for_gpu(_paged_attention_kernel, pointers, constants, num_warps=num_warps)
    assert compiled.metadata.shared <= MAX_SHARED_BYTES
    assert compiled.asm["cubin"]
    if in_parts:
        pointers["out"] = f"*{dtype}"
        assert compile_for_gpu(_combine_kernel, pointers, both, num_warps=1).asm["cubin"]


def test_copies_compile_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels.kv_copy_triton import _copy_blocks_kernel, _write_kv_kernel

    pointers = dict.fromkeys(("keys", "values", "k", "v"), "*bf16") | {"slot_mapping": "*i64"}
    constants = {"BLOCK_SIZE": 16, "NUM_HEADS": 8, "HEAD_SIZE": 128, "PADDED": 1024}
    assert compile_for_gpu(_write_kv_kernel, pointers, constants).asm["cubin"]
    pointers = {"pool": "*bf16", "buffer": "*bf16", "block_ids": "*i64"}
    for to_pool in (True, False):
        constants = {"TO_POOL": to_pool, "COPY_ELEMENTS": 4096}
        assert compile_for_gpu(_copy_blocks_kernel, pointers, constants).asm["cubin"]


def test_digest_compiles_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels.digest_triton import _digest_kernel

    names = ("pool", "offsets", "words", "seeds", "constants", "digests")
    assert compile_for_gpu(_digest_kernel, dict.fromkeys(names, "*i64"), {"STRIPES": 64}).asm["cubin"]


def test_kernels_import_without_triton() -> None:
    modules = "pdkv.kernels.kv_copy, pdkv.kernels.paged_attention"
    code = f"import sys; sys.modules['triton'] = None; import {modules}; assert 'triton.language' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
