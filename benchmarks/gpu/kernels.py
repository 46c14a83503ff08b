"""Kernels on a GPU: achieved GB/s or TFLOP/s beside the device's own copy, matmul and torch's attention, and the error
against the reference in float64. On a CPU they run in Triton's interpreter (slow).
"""

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import cycle, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.report import Claim


class Result(NamedTuple):
    """One line of the report; the rate is of useful work (bytes read and written once, causal FLOPs)."""

    name: str
    shape: str
    milliseconds: float  # median
    rate: float
    unit: str
    max_error: float | None  # largest absolute difference from the reference; None: nothing to compare with


class Sizes(NamedTuple):
    """How big the cases are."""

    copy_bytes: int
    matmul: int  # rows, columns and depth
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    block_size: int
    decode: tuple[tuple[int, int], ...]  # (sequences, context)
    prefill: tuple[tuple[int, int], ...]  # new tokens of a prompt, and all
    rows: int  # of passes
    copy_blocks: int
    row_layers: tuple[tuple[int, int], ...]  # outputs and inputs of layers of one row
    linear: tuple[int, int]  # outputs and inputs of a quantized layer
    linear_rows: tuple[int, ...]  # of decodes, which memory bounds, and of a prompt
    copies: tuple[tuple[int, int], ...]  # layers and heads that are copied of a block
    table_tokens: int  # of the model's longest sequence, for which block tables of decodes have columns
    draws: tuple[int, ...]  # rows
    vocab_size: int


LLAMA_8B_GATE_UP = (28_672, 4096)
FULL = Sizes(
    1 << 30, 8192, 8, 32, 8, 128, 16, ((1, 1024), (8, 4096), (64, 4096), (1, 131_072)),
    ((8192, 8192), (2048, 32_768)), 8192, 2048,
    ((6144, 4096), (4096, 4096), LLAMA_8B_GATE_UP, (4096, 14_336), (5120, 5120)), LLAMA_8B_GATE_UP, (1, 64, 4096),
    ((8, 8), (1, 8), (8, 4)), 131_072, (1, 64, 512), 128_256,
)  # fmt: skip
BRIEF = FULL._replace(
    decode=((8, 4096),), prefill=FULL.prefill[:1], row_layers=FULL.row_layers[:1], linear_rows=(1,), copies=((8, 8),),
    draws=(64,),
)  # fmt: skip
"""One figure for each kernel."""
SMALL = Sizes(
    1 << 16, 64, 2, 4, 2, 32, 16, ((2, 40),), ((20, 20), (8, 40)), 8, 3, ((48, 320),), (48, 320), (1, 5, 300),
    ((2, 2), (1, 2), (2, 1)), 640, (2,), 500,
)  # fmt: skip

_CHECKED_QUERIES = 128
_QUEUED_CYCLES = 1_000_000  # half a millisecond, in which a call is queued as a whole
_LINEAR_COPIES = 4  # of a quantized weight, used in turn: one might stay in a cache
_MEMORY_BOUND_ROWS = 64
_UNCACHED_BYTES = 256 << 20  # of weights used in turn


def _prefill(new: int, num_tokens: int) -> str:
    return f"prefill, {new} of {num_tokens}"


class Bench:
    """Times calls on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, sizes: Sizes, repeats: int) -> None:
        self.device = device
        self.dtype = dtype
        self.sizes = sizes
        self.repeats = repeats

    def seconds(self, call: Callable[[], object]) -> float:
        """Median time of a call, after one that is not counted."""
        call()
        make_event: Any = torch.cuda.Event  # has no types
        times: list[float] = []
        for _ in range(self.repeats):
            if self.device.type == "cuda":
                begin, end = make_event(enable_timing=True), make_event(enable_timing=True)
                torch.cuda._sleep(_QUEUED_CYCLES)
                begin.record()
                call()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
            else:
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
        return statistics.median(times)

    def run(self) -> Iterator[Result]:
        """All cases."""
        yield self.copy_yardstick()
        yield self.matmul_yardstick()
        for num_seqs, context in self.sizes.decode:
            shape = f"decode, {num_seqs} x {context}"
            yield self.attention([(1, context)] * num_seqs, shape, "GB/s", self.sizes.table_tokens)
        for new, num_tokens in self.sizes.prefill:
            yield self.torch_attention(new, num_tokens)
            yield self.attention([(new, num_tokens)], _prefill(new, num_tokens), "TFLOP/s")
        yield from self.passes()
        for num_layers, num_heads in self.sizes.copies:
            for to_pool in (False, True):
                yield self.copy_of_blocks(num_layers, num_heads, to_pool=to_pool)
        for outputs, inputs in self.sizes.row_layers:
            yield self.linear_row(outputs, inputs)
        for rows in self.sizes.linear_rows:
            yield self.linear_int4(rows)
            yield self.linear_fp8(rows)
        for rows in self.sizes.draws:
            yield self.draw(rows)

    def copy_yardstick(self) -> Result:
        """The device's own copy."""
        source = torch.ones(self.sizes.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        seconds = self.seconds(lambda: target.copy_(source))
        return Result("copy", f"{source.nbytes} bytes", seconds * 1e3, 2 * source.nbytes / seconds / 1e9, "GB/s", None)

    def matmul_yardstick(self) -> Result:
        """The device's own matmul."""
        size = self.sizes.matmul
        a = torch.randn(size, size, device=self.device).to(self.dtype)
        seconds = self.seconds(lambda: a @ a)
        return Result("matmul", f"{size}^3", seconds * 1e3, 2 * size**3 / seconds / 1e12, "TFLOP/s", None)

    def attention(self, lengths: list[tuple[int, int]], shape: str, unit: str, table_tokens: int = 0) -> Result:
        """Sequences of (queries, tokens) over a shuffled pool, with block tables for `table_tokens` or more."""
        from pdkv.kernels.paged_attention_triton import paged_attention_triton

        s = self.sizes
        max_blocks = -(-max(tokens for _, tokens in lengths) // s.block_size)
        num_blocks = len(lengths) * max_blocks
        pool = self._pool(num_blocks, layers=1)
        queries = [q for q, _ in lengths]
        q = torch.randn(sum(queries), s.heads, s.head_size, device=self.device).to(self.dtype)
        tables = torch.zeros(len(lengths), max(max_blocks, table_tokens // s.block_size), device=self.device).int()
        tables[:, :max_blocks] = torch.randperm(num_blocks, device=self.device).view(len(lengths), max_blocks)
        index = (
            tables,
            torch.tensor([tokens for _, tokens in lengths], device=self.device, dtype=torch.int32),
            torch.tensor([0, *queries], device=self.device).cumsum(0).int(),
        )
        scale = s.head_size**-0.5
        seconds = self.seconds(lambda: paged_attention_triton(q, pool, 0, *index, scale))
        error = self._attention_error(paged_attention_triton(q, pool, 0, *index, scale), q, pool, index, scale)
        if unit == "GB/s":
            kv_bytes = sum(tokens for _, tokens in lengths) * 2 * s.kv_heads * s.head_size * pool.element_size()
            rate = (kv_bytes + 2 * q.nbytes) / seconds / 1e9
        else:
            rate = sum(self._attention_flops(*each) for each in lengths) / seconds / 1e12
        return Result("paged_attention", shape, seconds * 1e3, rate, unit, error)

    def _attention_flops(self, new: int, num_tokens: int) -> int:
        pairs = new * num_tokens - new * (new - 1) // 2
        return 4 * pairs * self.sizes.heads * self.sizes.head_size

    def _attention_error(
        self, found: torch.Tensor, q: torch.Tensor, pool: torch.Tensor, index: tuple[torch.Tensor, ...], scale: float
    ) -> float:
        """The error in the last queries of each sequence: the reference takes memory by queries x tokens."""
        from pdkv.kernels.paged_attention import paged_attention_reference

        tables, seq_lens, cu_seqlens = index
        ends = cu_seqlens.tolist()
        kept = [range(max(start, stop - _CHECKED_QUERIES), stop) for start, stop in pairwise(ends)]
        rows = torch.tensor([row for each in kept for row in each], device=self.device)
        cu_kept = torch.tensor([0, *(len(each) for each in kept)], device=self.device).cumsum(0).int()
        expected = paged_attention_reference(q[rows].double(), pool.double(), 0, tables, seq_lens, cu_kept, scale)
        return _difference(found[rows], expected)

    def torch_attention(self, new: int, num_tokens: int) -> Result:
        """The yardstick of prompts: torch's own attention over contiguous KV, causal to the end of the tokens."""
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.bias import causal_lower_right

        s = self.sizes
        q = torch.randn(1, s.heads, new, s.head_size, device=self.device).to(self.dtype)
        k, v = torch.randn(2, 1, s.kv_heads, num_tokens, s.head_size, device=self.device).to(self.dtype)
        mask = causal_lower_right(new, num_tokens)
        attend = torch.nn.functional.scaled_dot_product_attention
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, *([SDPBackend.MATH] if self.device.type == "cpu" else [])]):
            seconds = self.seconds(lambda: attend(q, k, v, attn_mask=mask, enable_gqa=True))
        rate = self._attention_flops(new, num_tokens) / seconds / 1e12
        return Result("torch_attention", _prefill(new, num_tokens), seconds * 1e3, rate, "TFLOP/s", None)

    def passes(self) -> Iterator[Result]:
        """What is computed of each row by itself."""
        from benchmarks.gpu.passes import make_passes

        s = self.sizes
        for case in make_passes(s.rows, s.heads, s.kv_heads, s.head_size, self.dtype, self.device, s.block_size):
            error = _difference(case.call(), case.expected)
            seconds = self.seconds(case.call)
            yield Result(case.name, case.shape, seconds * 1e3, case.num_bytes / seconds / 1e9, "GB/s", error)

    def copy_of_blocks(self, num_layers: int, num_heads: int, *, to_pool: bool) -> Result:
        """Half of a pool's blocks in random order into a buffer, or a buffer into them; of so many layers and heads."""
        from pdkv.kernels.kv_copy import copy_units_reference
        from pdkv.kernels.kv_copy_triton import copy_units_triton

        count, part = self.sizes.copy_blocks, ((0, num_layers), (0, num_heads))
        pool = self._pool(2 * count, layers=self.sizes.layers)
        ids = torch.randperm(2 * count, device=self.device)[:count]
        buffer = self._pool(count, layers=num_layers)[:, :, :, :num_heads].contiguous()
        written = pool if to_pool else buffer
        expected = written.clone()
        tensors = (expected, ids, buffer) if to_pool else (pool, ids, expected)
        copy_units_reference(*tensors, *part, to_pool=to_pool)
        seconds = self.seconds(lambda: copy_units_triton(pool, ids, buffer, *part, to_pool=to_pool))
        name, shape = "scatter_blocks" if to_pool else "gather_blocks", f"{num_layers} layers x {num_heads} heads"
        rate, error = 2 * buffer.nbytes / seconds / 1e9, _difference(written, expected)
        return Result(name, f"{count} blocks x {shape}", seconds * 1e3, rate, "GB/s", error)

    def linear_row(self, outputs: int, inputs: int) -> Result:
        """One row by a dense weight, with a residual."""
        from pdkv.kernels.linear_row_triton import linear_row_triton

        copies = max(_LINEAR_COPIES, _UNCACHED_BYTES // (outputs * inputs * self.dtype.itemsize))
        if self.device.type != "cuda":
            copies = 1
        weights = [torch.randn(outputs, inputs, device=self.device).to(self.dtype) for _ in range(copies)]
        x, residual = (torch.randn(1, size, device=self.device).to(self.dtype) for size in (inputs, outputs))
        x *= inputs**-0.5
        expected = x.double() @ weights[0].double().T + residual.double()
        error = _difference(linear_row_triton(x, weights[0], residual=residual), expected)
        in_turn = cycle(weights)
        seconds = self.seconds(lambda: linear_row_triton(x, next(in_turn), residual=residual))
        rate = weights[0].nbytes / seconds / 1e9
        return Result("linear_row", f"{inputs} to {outputs}", seconds * 1e3, rate, "GB/s", error)

    def linear_int4(self, rows: int) -> Result:
        """Packed weights in groups of 128 with zero points, as of AWQ."""
        from pdkv.kernels import linear_int4 as module
        from pdkv.kernels.int4_weight import pack_int4
        from pdkv.kernels.linear_int4_triton import linear_int4_triton

        outputs, inputs = self.sizes.linear
        groups = -(-inputs // 128)
        scales = torch.full((groups, outputs), 0.05 * inputs**-0.5, dtype=self.dtype, device=self.device)
        numbers = [torch.randint(0, 16, (outputs, inputs), device=self.device).byte() for _ in range(_LINEAR_COPIES)]
        zeros = torch.randint(6, 11, scales.shape, device=self.device).byte()
        weights = [pack_int4(each, scales, zeros, 128) for each in numbers]
        x = torch.randn(rows, inputs, device=self.device).to(self.dtype)
        multiply = linear_int4_triton if rows <= _MEMORY_BOUND_ROWS else module.linear_int4
        expected = module.linear_int4_reference(x[:_CHECKED_QUERIES], weights[0])
        error = _difference(multiply(x, weights[0])[:_CHECKED_QUERIES], expected)
        in_turn = cycle(weights)
        seconds = self.seconds(lambda: multiply(x, next(in_turn)))
        read = sum(each.nbytes for each in weights[0] if isinstance(each, torch.Tensor))
        return self._linear("linear_int4", x, read, seconds, error)

    def linear_fp8(self, rows: int) -> Result:
        """FP8 weights, and the quantization of each row of inputs."""
        from pdkv.kernels.quantize_fp8 import quantize_rows
        from pdkv.models.quantized_linear import Fp8Linear

        outputs, inputs = self.sizes.linear
        scales = torch.full((outputs,), 0.25 * inputs**-0.5, device=self.device)
        dense = [torch.randn(outputs, inputs, device=self.device) for _ in range(_LINEAR_COPIES)]
        weights = [each.to(torch.float8_e4m3fn) for each in dense]
        layers = [Fp8Linear(weight, scales, None, None) for weight in weights]
        x = torch.randn(rows, inputs, device=self.device).bfloat16()
        numbers, row_scales = (each.double() for each in quantize_rows(x[:_CHECKED_QUERIES], None))
        expected = numbers * row_scales @ (weights[0].double() * scales.double()[:, None]).T
        error = _difference(layers[0](x)[:_CHECKED_QUERIES], expected)
        in_turn = cycle(layers)
        seconds = self.seconds(lambda: next(in_turn)(x))
        return self._linear("linear_fp8", x, weights[0].nbytes + scales.nbytes, seconds, error)

    def draw(self, rows: int) -> Result:
        """Tokens with top-k 20 and top-p 0.95, as Qwen's default is; the error is the number of wrong ones."""
        from pdkv.engine.worker.sampling.draw import DrawParams, _table, draw
        from pdkv.kernels.draw_triton import draw_triton

        logits = torch.randn(rows, self.sizes.vocab_size, device=self.device).mul_(3.0)
        words = np.arange(rows, dtype=np.uint64)
        filters = (np.full(rows, value) for value in (0.7, 20, 0.95, 0.0))
        temperature, top_k, top_p, min_p = filters
        params = DrawParams(temperature, top_k.astype(np.int64), top_p, min_p, words, words, words)
        made = torch.from_numpy(_table(logits, params, np.full(rows, -np.inf))).to(self.device)
        table = made.clone()
        found = draw_triton(logits, table)
        seconds = self.seconds(lambda: draw_triton(logits, table.copy_(made)))
        wrong = float((found.cpu() != draw(logits.cpu(), params)).sum())
        return Result("draw", f"{rows} x {self.sizes.vocab_size}", seconds * 1e3, seconds * 1e3, "ms", wrong)

    def _linear(self, name: str, x: torch.Tensor, weight_bytes: int, seconds: float, error: float) -> Result:
        (outputs, inputs), rows = self.sizes.linear, len(x)
        shape = f"{rows} rows x {inputs} to {outputs}"
        if rows > _MEMORY_BOUND_ROWS:
            rate = 2 * rows * inputs * outputs / seconds / 1e12
            return Result(name, shape, seconds * 1e3, rate, "TFLOP/s", error)
        rate = (weight_bytes + x.nbytes + rows * outputs * x.element_size()) / seconds / 1e9
        return Result(name, shape, seconds * 1e3, rate, "GB/s", error)

    def _pool(self, num_blocks: int, layers: int) -> torch.Tensor:
        s = self.sizes
        pool = torch.empty(
            num_blocks, layers, 2, s.kv_heads, s.block_size, s.head_size, dtype=self.dtype, device=self.device
        )
        return pool.normal_()


_WANTED = {
    **dict.fromkeys([("gather_blocks", "GB/s"), ("scatter_blocks", "GB/s")], ("copy", 0.9)),
    **dict.fromkeys([("rms_norm", "GB/s"), ("silu_mul", "GB/s"), ("pass_heads", "GB/s")], ("copy", 0.8)),
    ("paged_attention", "GB/s"): ("copy", 0.9),
    ("paged_attention", "TFLOP/s"): ("torch_attention", 0.75),
    ("linear_row", "GB/s"): ("copy", 0.85),
    ("linear_int4", "GB/s"): ("copy", 0.6),
    ("linear_int4", "TFLOP/s"): ("matmul", 0.6),
    ("linear_fp8", "GB/s"): ("copy", 0.6),
    ("linear_fp8", "TFLOP/s"): ("matmul", 1.0),
}
"""What bounds a kernel, of few rows (GB/s) and of many, and the least share of it."""

_STEP_BYTES = 15.1e9
"""What a decode step of Llama 3.1 8B reads."""
_DRAWS = {512: 0.1}
"""The largest share of the time of that, by rows; of fewer ones 0.02."""

_MAX_ERROR = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def run(device: str, scale: str) -> Iterator[Claim]:
    """A claim on each kernel's speed, and one on its error."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16  # Triton's interpreter has no bfloat16
    sizes = {"tiny": SMALL, "smoke": BRIEF, "full": FULL}[scale]
    bench = Bench(torch.device(device), dtype, sizes, 1 if scale == "tiny" else 20)
    yardsticks: dict[str, Result] = {}
    for result in bench.run():
        if result.max_error is None:
            yardsticks[result.name] = result
            continue
        name = f"{result.name}, {result.shape}"
        if result.name == "draw":
            share = result.milliseconds / (_STEP_BYTES / yardsticks["copy"].rate / 1e6)
            limit = _DRAWS.get(int(result.shape.split()[0]), 0.02)
            yield Claim(f"{name}: of a step that reads 15.1 GB", share, limit, "lower", {"ms": result.milliseconds})
            yield Claim(f"{name}: other tokens than on a CPU", result.max_error, 0.0, "lower", {})
            continue
        yardstick, limit = _WANTED[result.name, result.unit]
        yard = yardsticks[yardstick]
        limit = 0.7 if result.shape.startswith("decode, 1 x") else limit
        figures = {result.unit: result.rate, f"{yard.name} {yard.unit}": yard.rate, "ms": result.milliseconds}
        yield Claim(f"{name}: of {yard.name}", result.rate / yard.rate, limit, "higher", figures)
        bound = _MAX_ERROR[torch.bfloat16 if result.name == "linear_fp8" else dtype]
        yield Claim(f"{name}: error over bound", result.max_error / bound, 1.0, "lower", {"error": result.max_error})


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max())
