"""The backends against attention written out, over random mixes of chunks and decodes."""

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pdkv.engine import attention_tiles
from pdkv.engine.attention import AttentionBackend, make_backend
from pdkv.engine.attention_cpu import CpuAttention
from pdkv.engine.attention_cuda import CudaAttention
from pdkv.engine.attention_tiles import AttentionLimits, plan_tiles
from pdkv.engine.batch import PersistentBatch, StepInputs
from pdkv.engine.plan import NewRequest, ScheduledRequest
from pdkv.kernels import host
from pdkv.sampling_params import SamplingParams

torch.set_num_threads(1)

BLOCK, LAYERS, KV_HEADS, HEADS, HEAD_SIZE = 16, 2, 2, 6, 16


class Case:
    """Requests given as (computed, scheduled), with random K and V already in the pool."""

    def __init__(self, requests: list[tuple[int, int]], dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        blocks = [-(-(computed + count) // BLOCK) for computed, count in requests]
        ids = torch.randperm(sum(blocks) + 5, generator=generator).tolist()
        shape = (len(ids), LAYERS, 2, KV_HEADS, BLOCK, HEAD_SIZE)
        self.pool = torch.randn(shape, generator=generator).to(dtype)
        self.requests = requests
        self.batch = PersistentBatch(len(requests), 4096, BLOCK)
        for i, ((computed, count), num_blocks) in enumerate(zip(requests, blocks, strict=True)):
            own = [ids.pop() for _ in range(num_blocks)]
            tokens = [0] * (computed + count)
            self.batch.add(NewRequest((str(i), 0), 0, tokens, [], SamplingParams(), own))
        self.inputs: StepInputs = self.batch.prepare(
            [ScheduledRequest((str(i), 0), c, n, [], True) for i, (c, n) in enumerate(requests)]
        )
        total = len(self.inputs.positions)
        self.qkv = torch.randn(total, HEADS + 2 * KV_HEADS, HEAD_SIZE, generator=generator).to(dtype)
        self.last_rows = self.inputs.cu_seqlens_q[1:] - 1

    def run(self, backend: AttentionBackend, layer: int, *, last_only: bool = False) -> torch.Tensor:
        backend.prepare(self.inputs, self.batch.block_tables, self.last_rows if last_only else None)
        wanted = len(self.last_rows) if last_only else len(self.qkv)
        padding = torch.full((backend.padded(len(self.qkv)) - len(self.qkv), *self.qkv.shape[1:]), float("nan"))
        out = backend.attend(layer, torch.cat((self.qkv, padding.to(self.qkv.dtype))))
        assert len(out) == backend.padded(wanted)
        return out[:wanted]

    def expected(self, layer: int) -> torch.Tensor:
        """In float64, request by request, with the step's own K and V taken from qkv."""
        out = []
        for i, (computed, count) in enumerate(self.requests):
            start = int(self.inputs.cu_seqlens_q[i])
            table = self.batch.block_tables[i, : -(-(computed + count) // BLOCK)]
            kv = self.pool[table, layer].double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :computed]
            own = self.qkv[start : start + count].double().transpose(0, 1)
            fresh = own[HEADS:].view(2, KV_HEADS, count, HEAD_SIZE)
            k, v = torch.cat((kv, fresh), dim=2).repeat_interleave(HEADS // KV_HEADS, dim=1)
            visible = torch.ones(count, computed + count).tril(computed).bool()
            attended = torch.nn.functional.scaled_dot_product_attention(own[:HEADS], k, v, attn_mask=visible)
            out.append(attended.transpose(0, 1).flatten(1))
        return torch.cat(out)


MIXES = [
    [(0, 1)],
    [(0, 16), (0, 17), (0, 15)],
    [(0, 300)],
    [(0, 200), (37, 1), (0, 3), (150, 140), (16, 1), (15, 1)],
    [(length, 1) for length in (0, 1, 15, 16, 17, 31, 32, 33, 500, 501, 900)],
    [(length % 7, 1 + length % 5) for length in range(40)],
]


def without_compiled_kernel(kv_pool: torch.Tensor, num_heads: int) -> CpuAttention:
    """The CPU backend of a machine without a compiler."""
    backend = CpuAttention(kv_pool, num_heads)
    backend._singles = None
    return backend


needs_compiled_kernel = pytest.mark.skipif(not host.available(), reason="no compiler when pdkv was installed")


@needs_compiled_kernel
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"), [(6, 2, 16), (4, 4, 32), (8, 2, 64), (3, 1, 128), (2, 2, 80)]
)
def test_single_queries_equal_attention_written_out(
    heads: int, kv_heads: int, head_size: int, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("HEADS", heads), ("KV_HEADS", kv_heads), ("HEAD_SIZE", head_size)):
        monkeypatch.setattr(sys.modules[__name__], name, value)
    torch.set_num_threads(threads)
    try:
        for mix in ([(0, 1)], [(40, 1)], MIXES[4]):
            case = Case(mix, dtype)
            backend = CpuAttention(case.pool, heads)
            assert backend._singles is not None
            close = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.02}
            torch.testing.assert_close(case.run(backend, 1).double(), case.expected(1), **close)
    finally:
        torch.set_num_threads(1)


@needs_compiled_kernel
def test_large_scores_do_not_overflow() -> None:
    case = Case([(100, 1), (0, 1)])
    case.qkv[:, :HEADS] *= 1000
    torch.testing.assert_close(
        case.run(CpuAttention(case.pool, HEADS), 0).double(), case.expected(0), rtol=1e-3, atol=1e-3
    )


@needs_compiled_kernel
def test_head_sizes_that_the_kernel_does_not_take_are_left_to_torch() -> None:
    assert CpuAttention(torch.zeros(2, 1, 2, 1, 16, 8), 1)._singles is None
    assert CpuAttention(torch.zeros(2, 1, 2, 1, 16, 16, dtype=torch.float16), 1)._singles is None


@pytest.mark.parametrize("mix", MIXES, ids=len)
@pytest.mark.parametrize(
    "make", [CpuAttention, without_compiled_kernel, CudaAttention], ids=["cpu", "cpu-torch", "cuda-reference"]
)
def test_backends_equal_attention_written_out(
    mix: list[tuple[int, int]], make: Callable[[torch.Tensor, int], AttentionBackend]
) -> None:
    for layer in range(LAYERS):
        case = Case(mix)
        expected = case.expected(layer)
        backend = make(case.pool, HEADS)
        torch.testing.assert_close(case.run(backend, layer).double(), expected, rtol=1e-4, atol=1e-5)
        some = case.run(backend, LAYERS - 1, last_only=True)
        if layer == LAYERS - 1:
            torch.testing.assert_close(some.double(), expected[case.last_rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    case = Case(MIXES[3], dtype)
    expected = case.expected(0)
    torch.testing.assert_close(case.run(CpuAttention(case.pool, HEADS), 0).double(), expected, rtol=0.05, atol=0.05)


def test_small_buckets_and_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "_BUCKET_BYTES", 20_000)
    monkeypatch.setattr(attention_tiles, "_WASTE_BYTES", 0)
    case = Case(MIXES[3])
    expected = case.expected(0)
    torch.testing.assert_close(case.run(CpuAttention(case.pool, HEADS), 0).double(), expected, rtol=1e-4, atol=1e-5)


def test_only_the_scheduled_slots_are_written() -> None:
    case = Case([(5, 3), (0, 20), (31, 1)])
    before = case.pool.clone()
    case.run(make_backend(case.pool, HEADS), 1)
    written = torch.zeros(case.pool.shape[0], BLOCK, dtype=torch.bool)
    written[case.inputs.block_ids, case.inputs.offsets] = True
    changed = (
        (case.pool != before).any(-1).permute(0, 4, 1, 2, 3).flatten(3)
    )  # (blocks, offsets, layers, sides * heads)
    assert changed[:, :, 1].all(-1).eq(written).all()
    assert not changed[:, :, 0].any()


def test_a_neighbours_nan_stays_its_own() -> None:
    """Requests of unequal length share a bucket; the shorter one's padding must not read the other's blocks."""
    case = Case([(40, 1), (200, 1)])
    expected = case.expected(0)
    others = set(range(case.pool.shape[0])) - set(case.batch.block_tables[0, :3].tolist())
    case.pool[sorted(others)] = float("nan")
    out = case.run(CpuAttention(case.pool, HEADS), 0)
    torch.testing.assert_close(out[0].double(), expected[0], rtol=1e-4, atol=1e-5)
    assert out[1].isnan().all()


def test_tiles_cover_every_query_once() -> None:
    case = Case([(length * 3, 1 + length * 11 % 290) for length in range(30)])
    plan = plan_tiles(case.inputs, None, BLOCK, AttentionLimits(HEADS, KV_HEADS, HEAD_SIZE, 4))
    rows = np.concatenate([bucket.qkv_rows[bucket.real] for bucket in plan.buckets])
    assert sorted(rows.tolist()) == list(range(len(case.inputs.positions)))
    for bucket in plan.buckets:
        assert (bucket.positions == case.inputs.positions[bucket.qkv_rows]).all()
        assert (bucket.seq_lens <= bucket.num_blocks * BLOCK).all()
