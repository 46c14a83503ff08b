"""The backends against attention written out, over random mixes of chunks and decodes."""

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
from pdkv.sampling_params import SamplingParams

torch.set_num_threads(1)

BLOCK, LAYERS, KV_HEADS, HEADS, HEAD_SIZE = 16, 2, 2, 6, 8


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


@pytest.mark.parametrize("mix", MIXES, ids=len)
@pytest.mark.parametrize("make", [CpuAttention, CudaAttention], ids=["cpu", "cuda-reference"])
def test_backends_equal_attention_written_out(mix: list[tuple[int, int]], make: type[CpuAttention]) -> None:
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
