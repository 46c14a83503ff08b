"""The Triton kernels: run in Triton's interpreter or on the GPU, and compiled for a GPU where there is none."""

import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from interpreted import WAYS, run_cases

HERE = Path(__file__).parent


@pytest.mark.parametrize("way", WAYS)
def test_kernels_equal_their_references(way: str) -> None:
    if way == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    graphs = [] if way == "cuda" else [HERE.parent / "engine/worker/cases_graphs.py"]
    run_cases(*sorted(HERE.glob("cases_*.py")), *graphs, way=way)


MAX_SHARED_BYTES = 227 << 10
"""Of a program on such a GPU."""


def compile_for_gpu(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    aligned: Collection[str] = (),
    fuses: bool = True,
) -> Any:
    """Compile down to machine code of compute capability 9.0; arguments not named are int32.

    `aligned`: arguments that are divisible by 16, as the launcher finds them.
    `fuses`: whether a multiply-add may be one instruction.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {p.name: types.get(p.name, "i32") for p in kernel.params}
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(kernel.params) if p.name in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"enable_fp_fusion": fuses, "num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize(
    ("dtype", "stored", "head_size", "num_queries", "has_window", "in_parts"),
    [
        ("bf16", "bf16", 128, 64, False, False),
        ("fp16", "fp8e4nv", 80, 1, True, True),
        pytest.param("bf16", "bf16", 80, 1, True, True, marks=pytest.mark.slow),
        pytest.param("bf16", "bf16", 128, 64, True, False, marks=pytest.mark.slow),
        pytest.param("bf16", "bf16", 128, 64, True, True, marks=pytest.mark.slow),
        pytest.param("bf16", "bf16", 256, 64, False, False, marks=pytest.mark.slow),
        pytest.param("fp32", "fp32", 128, 1, True, True, marks=pytest.mark.slow),
        pytest.param("bf16", "fp8e4nv", 128, 1, False, True, marks=pytest.mark.slow),
        pytest.param("bf16", "fp8e4nv", 128, 64, True, False, marks=pytest.mark.slow),
        pytest.param("fp16", "fp8e4nv", 64, 1, True, False, marks=pytest.mark.slow),
        pytest.param("fp32", "fp8e4nv", 64, 64, False, False, marks=pytest.mark.slow),
    ],
)
def test_attention_compiles_for_a_gpu(
    dtype: str,
    stored: str,
    head_size: int,
    num_queries: int,
    has_window: bool,
    in_parts: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interpreter accepts programs that the compiler refuses."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels.paged_attention_triton import _combine_kernel, _paged_attention_kernel, _Tiles

    tiles = _Tiles.of(torch.empty(num_queries, 8, head_size, dtype=DTYPES[dtype], device="meta"), 1, 4)
    pointers = {"q": f"*{dtype}", "keys": f"*{stored}", "values": f"*{stored}"}
    pointers |= {"out": f"*{dtype}", "bests": "*fp32", "totals": "*fp32", "parts": "*fp32", "plans": "*i32"}
    pointers |= {"block_tables": "*i32", "seq_lens": "*i32", "cu_seqlens_q": "*i32", "scale": "fp32", "v_scale": "fp32"}
    pointers["softcap"] = "fp32"
    both = {"HEAD_SIZE": head_size, "HEAD_SIZE_PADDED": 1 << (head_size - 1).bit_length()}
    both["TILE_QUERIES"] = tiles.queries
    constants = both | {"BLOCK_SIZE": 16, "GROUP_SIZE": 4, "TILE_ROWS": tiles.rows, "HAS_WINDOW": has_window}
    constants["SEQS"] = 512
    constants |= {"TILE_KV": tiles.kv, "IN_PARTS": in_parts, "HAS_SOFTCAP": in_parts}
    constants |= {"TURNED": 0, "TURNED_PADDED": 16}
    compiled = compile_for_gpu(
        _paged_attention_kernel, pointers, constants, num_warps=tiles.num_warps, num_stages=tiles.num_stages
    )
    assert compiled.metadata.shared <= MAX_SHARED_BYTES
    assert compiled.asm["cubin"]
    if in_parts:
        assert compile_for_gpu(_combine_kernel, pointers, both | {"TILE_PARTS": 16}).asm["cubin"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_attention_over_latent_rows_compiles_for_a_gpu(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the published size; sums of latents stay in registers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels.paged_attention_triton import _paged_attention_kernel, _Tiles

    tiles = _Tiles.of(torch.empty(64, 128, 576, dtype=DTYPES[dtype], device="meta"), 1, 16)
    types = dict.fromkeys(("out", "q", "keys", "values"), f"*{dtype}")
    types |= dict.fromkeys(("parts", "bests", "totals"), "*fp32")
    types |= dict.fromkeys(("plans", "block_tables", "seq_lens", "cu_seqlens_q"), "*i32")
    types |= dict.fromkeys(("scale", "v_scale", "softcap"), "fp32")
    constants = {"HEAD_SIZE": 512, "HEAD_SIZE_PADDED": 512, "TURNED": 64, "TURNED_PADDED": 64, "HAS_WINDOW": False}
    constants |= {"BLOCK_SIZE": 16, "GROUP_SIZE": 16, "TILE_QUERIES": tiles.queries, "TILE_ROWS": tiles.rows}
    constants |= {"TILE_KV": tiles.kv, "IN_PARTS": True, "HAS_SOFTCAP": False, "SEQS": 512}
    compiled = compile_for_gpu(
        _paged_attention_kernel, types, constants, num_warps=tiles.num_warps, num_stages=tiles.num_stages
    )
    assert compiled.metadata.shared <= MAX_SHARED_BYTES
    assert compiled.asm["cubin"]


@pytest.mark.parametrize(("stored", "computed"), [("bf16", "bf16"), ("fp8e4nv", "bf16"), ("fp8e4nv", "fp32")])
def test_write_kv_compiles_for_a_gpu(
    stored: str, computed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels.kv_copy_triton import _write_kv_kernel

    types = dict.fromkeys(("keys", "values"), f"*{stored}") | dict.fromkeys(("k", "v"), f"*{computed}")
    types |= {"slot_mapping": "*i64", "k_scale": "fp32", "v_scale": "fp32"}
    constants = {"BLOCK_SIZE": 16, "NUM_HEADS": 8, "HEAD_SIZE": 128, "PADDED": 1024, "QUANTIZE": stored != computed}
    assert compile_for_gpu(_write_kv_kernel, types, constants).asm["cubin"]


def test_experts_compile_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels.experts_triton import _grouped_kernel

    types = dict.fromkeys(("out", "x", "weights"), "*bf16") | dict.fromkeys(("x_rows", "ends", "tile_ends"), "*i64")
    constants = {"SIZE_IN": 2048, "SIZE_OUT": 1536, "GATHERS": True, "TILE_ROWS": 64, "TILE_OUT": 64, "TILE_IN": 64}
    compiled = compile_for_gpu(_grouped_kernel, types, constants)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= MAX_SHARED_BYTES


def test_launches_pass_each_argument_under_its_own_name() -> None:
    """The launcher is code that Triton writes with names of its own, which an argument of that name would hide."""
    import importlib
    import inspect

    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    import pdkv.kernels

    backend = make_backend(GPUTarget("cuda", 90, 32))
    kernels: dict[str, Any] = {}
    for path in Path(pdkv.kernels.__path__[0]).glob("*_triton.py"):
        module = importlib.import_module(f"pdkv.kernels.{path.stem}")
        kernels |= {f"{path.stem}.{n}": k for n, k in vars(module).items() if isinstance(k, JITFunction)}
    assert len(kernels) > 20
    for name, kernel in kernels.items():
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        given = {parameter: number for number, parameter in enumerate(inspect.signature(bind).parameters, 2)}
        given.pop("options", None)
        bound, _, options = bind(**given, num_warps=4)
        assert bound == given, name
        assert options == {"num_warps": 4}, name


@pytest.mark.parametrize("to_pool", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp8e4nv"])
def test_copies_compile_for_a_gpu(dtype: str, to_pool: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into loads and stores of 16 bytes each."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels.kv_copy_triton import _copy_units_kernel

    types = {"pool": f"*{dtype}", "buffer": f"*{dtype}", "unit_ids": "*i64"}
    constants = {"UNITS_PER_BLOCK": 2, "PIECE": 16 * 128, "TILE_PIECES": 2, "TILE_ELEMENTS": 2048}
    constants |= {"TO_POOL": to_pool}
    strides = ("stride_pool_block", "stride_pool_side", "stride_pool_head")
    compiled = compile_for_gpu(_copy_units_kernel, types, constants, aligned=("pool", "buffer", *strides))
    assert compiled.asm["cubin"]
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert "st.global.v4.b32" in compiled.asm["ptx"]


def test_a_copy_between_pools_compiles_for_a_gpu_and_moves_16_bytes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels.pool_copy_triton import _copy_pieces_kernel

    names = ("target", "source", "target_offsets", "source_offsets")
    compiled = compile_for_gpu(
        _copy_pieces_kernel, dict.fromkeys(names, "*i64"), {"TILE_WORDS": 2048}, aligned=("target", "source")
    )
    assert compiled.asm["cubin"]
    assert "ld.global.v2.b64" in compiled.asm["ptx"]
    assert "st.global.v2.b64" in compiled.asm["ptx"]


def test_digest_compiles_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels.digest_triton import _digest_kernel

    names = ("pool", "offsets", "words", "seeds", "constants", "digests")
    assert compile_for_gpu(_digest_kernel, dict.fromkeys(names, "*i64"), {"STRIPES": 64}).asm["cubin"]


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_the_draw_compiles_for_a_gpu_as_it_is_written(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each float64 operation rounds by itself, and divides exactly; constants have all their bits."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels import draw_triton

    pointers = {"logits": f"*{dtype}", "table": "*fp64", "bests": "*fp32", "tokens": "*i64", "kept": "*fp32"}
    pointers |= {"keys": "*i64", "times": "*fp64", "winners": "*i64"} | dict.fromkeys(
        ("high_magic", "low_magic"), "fp32"
    )
    code = {}
    for name in ("filter", "race"):
        kernel = getattr(draw_triton, f"_{name}_kernel")
        own = {p.name: pointers[p.name] for p in kernel.params if p.name in pointers}
        sizes = {"TILE": draw_triton._TILE, "PIVOTS": draw_triton._PIVOTS, "BINS": draw_triton._BINS, "LOWEST": -64.0}
        constants = {p.name: sizes[p.name] for p in kernel.params if p.name in sizes}
        compiled = compile_for_gpu(kernel, own, constants, num_warps=draw_triton._WARPS, fuses=False)
        assert compiled.asm["cubin"]
        code[name] = compiled.asm["ptx"].lower()
        assert "fma.rn.f64" not in code[name]
        assert "div.rn.f64" in code[name]
    assert "mul.rn.f64" in code["filter"]
    for constant in (1.26177193074810590878e-4, 2.27265548208155028766e-1, 2.52448340349684104192e-3):
        assert struct.pack(">d", constant).hex() in code["filter"]
    for constant in (1.01875663804580931796e-4, 2.31251620126765340583e1, 4.52279145837532221105e1):
        assert struct.pack(">d", constant).hex() in code["race"]


@pytest.mark.parametrize("size", [4096, 1000])
def test_a_layer_of_one_row_compiles_for_a_gpu(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into loads of 16 bytes each."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels import linear_row_triton as module

    types = dict.fromkeys(("x", "weight", "bias", "residual", "norm", "out"), "*bf16") | {"epsilon": "fp32"}
    constants = {"SIZE": size, "HAS_BIAS": True, "HAS_RESIDUAL": True, "HAS_NORM": False, "GATED": False, "GELU": False}
    tile_inputs = min(module._TILE, 1 << (size - 1).bit_length())
    constants |= {"TILE_OUTPUTS": module._TILE // tile_inputs, "TILE_INPUTS": tile_inputs}
    aligned = (*(name for name in types if name != "epsilon"), "stride_weight")
    for parts in ({}, {"HAS_RESIDUAL": False, "HAS_NORM": True, "GATED": True}):
        compiled = compile_for_gpu(
            module._linear_row_kernel, types, constants | parts, num_warps=module._WARPS, aligned=aligned
        )
        assert "ld.global.v4.b32" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("dtype", "group_size", "rows", "num_stages"),
    [
        ("bf16", 128, 16, 3),
        *(pytest.param(*s, marks=pytest.mark.slow) for s in (("fp16", 32, 32, 3), ("bf16", 128, 64, 2))),
    ],
)
def test_4_bit_layers_compile_for_a_gpu(
    dtype: str, group_size: int, rows: int, num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For tensor cores, the weight in registers; room for two programs and more on a processor."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels.linear_int4_triton import _TILE_OUTPUTS, _combine_kernel, _linear_int4_kernel, _unpack_kernel

    types = dict.fromkeys(("x", "bias", "residual", "scales", "out"), f"*{dtype}") | {"words": "*i32", "zeros": "*u8"}
    weight = {"GROUP_SIZE": group_size, "HAS_ZEROS": True, "TILE_OUTPUTS": _TILE_OUTPUTS}
    added = {"HAS_BIAS": True, "HAS_RESIDUAL": True}
    aligned = ("x", "words", "scales", "zeros", "out", "num_outputs", "num_inputs", "stride_x")
    compiled = compile_for_gpu(
        _linear_int4_kernel, types, weight | added | {"TILE_ROWS": rows}, num_stages=num_stages, aligned=aligned
    )
    assert compiled.asm["cubin"]
    assert 2 * compiled.metadata.shared <= MAX_SHARED_BYTES
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert compile_for_gpu(_unpack_kernel, types, weight, aligned=aligned).asm["cubin"]
    types["parts"] = "*fp32"
    assert compile_for_gpu(_combine_kernel, types, added | {"OUTPUTS": 512}).asm["cubin"]


@pytest.mark.parametrize("has_scale", [True, False])
def test_rows_in_fp8_compile_for_a_gpu(has_scale: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels.quantize_fp8 import MIN_SCALE
    from pdkv.kernels.quantize_fp8_triton import _quantize_rows_kernel

    types = {"x": "*bf16", "scale": "*fp32", "numbers": "*fp8e4nv", "scales": "*fp32"}
    constants = {"HAS_SCALE": has_scale, "FP8_MAX": 448.0, "MIN_SCALE": MIN_SCALE, "BLOCK": 2048}
    compiled = compile_for_gpu(_quantize_rows_kernel, types, constants, aligned=("x", "numbers", "stride_x"))
    assert compiled.asm["cubin"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.asm["ptx"]


@pytest.mark.parametrize("dtype", ["bf16", *(pytest.param(d, marks=pytest.mark.slow) for d in ("fp32", "fp16"))])
def test_passes_compile_for_a_gpu(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole vectors are read and written: a thread's load is of 16 bytes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from pdkv.kernels.passes_triton import _gated_kernel, _heads_kernel, _rms_norm_kernel

    types = dict.fromkeys(("out", "x", "weight"), f"*{dtype}") | {"epsilon": "fp32"}
    aligned = ("out", "x", "weight", "stride_row")
    vector = "v4.b32"
    norm = {name: types[name] for name in types}
    compiled = compile_for_gpu(
        _rms_norm_kernel, norm, {"SIZE": 4096, "PADDED": 4096, "ADDS": True}, num_warps=8, aligned=aligned
    )
    assert vector in compiled.asm["ptx"]
    gated = {"out": f"*{dtype}", "x": f"*{dtype}"}
    compiled = compile_for_gpu(_gated_kernel, gated, {"SIZE": 14336, "TILE": 1024, "GELU": True}, aligned=aligned)
    assert vector in compiled.asm["ptx"]
    names = ("qkv", "cosines", "sines", "q_weight", "k_weight")
    types = dict.fromkeys(names, f"*{dtype}") | {"positions": "*i64", "slots": "*i64"}
    types |= dict.fromkeys(("q_epsilon", "k_epsilon", "k_scale", "v_scale"), "fp32")
    for head_size, rotary, has_norm, pool in (
        (128, 128, True, dtype), (128, 128, False, "fp8e4nv"), (128, 128, False, ""), (80, 20, True, dtype),
    ):  # fmt: skip
        constants = {"NUM_HEADS": 32, "NUM_ROTATED": 40, "HEAD_SIZE": head_size, "HALF": rotary // 2}
        constants |= {"HALF_PADDED": 64 if rotary == 128 else 16, "REST_PADDED": 0 if rotary == head_size else 64}
        constants |= {"HAS_NORM": has_norm, "TILE_HEADS": 16, "WRITES": bool(pool), "BLOCK_SIZE": 16}
        constants["QUANTIZE"] = pool == "fp8e4nv"
        aligned = (*names, "positions", "stride_token", "pool", "stride_block")
        compiled = compile_for_gpu(_heads_kernel, types | {"pool": f"*{pool or dtype}"}, constants, aligned=aligned)
        assert compiled.asm["cubin"]
        assert rotary != head_size or vector in compiled.asm["ptx"]


def test_kernels_import_without_triton() -> None:
    modules = "pdkv.kernels.kv_copy, pdkv.kernels.paged_attention, pdkv.kernels.linear_int4, pdkv.kernels.quantize_fp8"
    code = f"""import sys
for name in [name for name in sys.modules if name.startswith("pdkv.kernels")]: del sys.modules[name]
sys.modules["triton"] = None; import {modules}; assert "triton.language" not in sys.modules"""
    done = warm.run([*warm.PYTHON, "-c", code])
    assert done.returncode == 0, done.stderr
