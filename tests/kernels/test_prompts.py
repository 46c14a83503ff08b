"""The compiled attention of prompts against the reference in float64: every level, and bit by bit against itself."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from isas import kernels_of

from pdkv.kernels.compiled import levels
from pdkv.kernels.host import DTYPES
from pdkv.kernels.linear import available
from pdkv.kernels.paged_attention import paged_attention_reference
from pdkv.kernels.prompts import PromptArgs, attend_prompts, takes

pytestmark = pytest.mark.skipif(not available(), reason="no compiler when pdkv was installed")

F32, BF16 = torch.float32, torch.bfloat16
LENGTHS = [(1, 1), (2, 3), (17, 17), (40, 127), (129, 129), (1, 128), (5, 260), (300, 300), (0, 7)]
"""Queries of a sequence, and its keys."""

CLOSE = {F32: {"rtol": 1e-5, "atol": 5e-6}, BF16: {"rtol": 0.02, "atol": 0.02}}


def prompt_attention(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    num_threads: int | None = None,
) -> torch.Tensor:
    """What `paged_attention` says, with the arguments of `paged_attention_reference`, in host memory.

    Args:
        num_threads: torch's by default.
    """
    _, num_layers, _, kv_heads, block_size, head_size = kv_pool.shape
    assert takes(kv_pool.dtype, q.shape[1], kv_heads, head_size), kv_pool.shape
    assert (kv_pool.is_contiguous(), q.stride()[1:]) == (True, (head_size, 1)), q.stride()
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = cu_seqlens_q.numpy().astype(np.int64)
    counts = np.diff(starts)
    [runs] = np.nonzero(counts)
    tables = np.ascontiguousarray(block_tables.numpy(), dtype=np.int64)
    first_rows, num_queries = starts[:-1][runs], counts[runs]
    positions = seq_lens.numpy().astype(np.int64)[runs] - num_queries
    first_blocks = runs * tables.shape[1]
    side = kv_heads * block_size * head_size
    first = kv_pool.data_ptr() + 2 * layer * side * kv_pool.element_size()
    attend_prompts(
        PromptArgs(
            keys=first,
            values=first + side * kv_pool.element_size(),
            qkv=q.data_ptr(),
            out=out.data_ptr(),
            q_rows=first_rows.ctypes.data,
            out_rows=first_rows.ctypes.data,
            positions=positions.ctypes.data,
            counts=num_queries.ctypes.data,
            tables=first_blocks.ctypes.data,
            block_tables=tables.ctypes.data,
            n=len(runs),
            heads=q.shape[1],
            kv_heads=kv_heads,
            head_size=head_size,
            block_size=block_size,
            block_stride=num_layers * 2 * side,
            row_stride=q.stride(0),
            window=window or 0,
            dtype=DTYPES[str(kv_pool.dtype).removeprefix("torch.")],
            num_threads=num_threads or torch.get_num_threads(),
            scale=scale,
        )
    )
    return out


class Step(NamedTuple):
    """What `prompt_attention` takes, in its order."""

    q: torch.Tensor
    pool: torch.Tensor
    layer: int
    tables: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor
    scale: float

    def run(self, window: int | None = None, threads: int = 1) -> torch.Tensor:
        return prompt_attention(*self, window=window, num_threads=threads)

    def exact(self, window: int | None = None) -> torch.Tensor:
        whole = self._replace(q=self.q.double(), pool=self.pool.double())
        return paged_attention_reference(*whole, window=window)


def make(
    lengths: list[tuple[int, int]] = LENGTHS,
    dtype: torch.dtype = F32,
    heads: tuple[int, int] = (4, 2),
    head_size: int = 32,
    block_size: int = 16,
) -> Step:
    """Queries are rows of a wider tensor that is NaN elsewhere; tables name no block behind a sequence's last."""
    generator = torch.Generator().manual_seed(len(lengths) + head_size)
    needed = [-(-keys // block_size) for _, keys in lengths]
    ids = torch.randperm(sum(needed) + 3, generator=generator).int()
    pool = torch.randn(len(ids), 2, 2, heads[1], block_size, head_size, generator=generator).to(dtype)
    tables = torch.full((len(lengths), max(needed) + 2), 1 << 30, dtype=torch.int32)
    for i, count in enumerate(needed):
        tables[i, :count], ids = ids[:count], ids[count:]
    num_queries = [queries for queries, _ in lengths]
    starts = torch.tensor([0, *num_queries]).cumsum(0).int()
    wide = torch.full((sum(num_queries) + 1, heads[0] + 3, head_size), float("nan"), dtype=dtype)
    wide[:-1, : heads[0]] = torch.randn(sum(num_queries), heads[0], head_size, generator=generator).to(dtype)
    seq_lens = torch.tensor([keys for _, keys in lengths], dtype=torch.int32)
    return Step(wide[:-1, : heads[0]], pool, 1, tables, seq_lens, starts, head_size**-0.5)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("heads", "head_size", "block_size"),
    [((4, 4), 16, 16), ((6, 2), 32, 48), ((4, 2), 64, 16), ((3, 1), 80, 4), ((2, 1), 128, 32), ((40, 1), 16, 256),
     ((2, 2), 256, 16), ((1, 1), 112, 100)],
)  # fmt: skip
def test_equals_the_reference_at_every_level(
    dtype: torch.dtype, heads: tuple[int, int], head_size: int, block_size: int
) -> None:
    step = make(dtype=dtype, heads=heads, head_size=head_size, block_size=block_size)
    for window in (None, 1, 50, 128, 200):
        exact = step.exact(window)
        for isa in levels():
            with kernels_of(isa):
                result = step.run(window, threads=2)
            torch.testing.assert_close(
                result.double(), exact, **CLOSE[dtype], msg=lambda text, isa=isa, w=window: f"{isa}, window {w}: {text}"
            )


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("window", [None, 70])
def test_a_query_has_the_same_bits_however_its_prompt_is_cut_beside_whatever_others_on_any_threads(
    isa: str, dtype: torch.dtype, window: int | None
) -> None:
    whole = make([(300, 300)], dtype, heads=(6, 2), head_size=80)
    expected = whole.run(window)
    for threads in (2, 5):
        assert torch.equal(whole.run(window, threads), expected)
    for cuts in ([1], [128, 129], [7, 100, 299], list(range(3, 300, 13))):
        bounds = [0, *cuts, 300]
        step = whole._replace(
            tables=whole.tables.expand(len(cuts) + 1, -1),
            seq_lens=torch.tensor(bounds[1:], dtype=torch.int32),
            starts=torch.tensor(bounds, dtype=torch.int32),
        )
        assert torch.equal(step.run(window, 2), expected)


def test_float32_has_the_same_bits_at_every_level() -> None:
    step = make(heads=(6, 2), head_size=80)
    expected = step.run(100, 2)
    for isa in levels():
        with kernels_of(isa):
            same = step.run(100, 1)
        assert isa == "v2" or torch.equal(same, expected)  # v2 rounds products and sums apart
        torch.testing.assert_close(same, expected, **CLOSE[F32])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_reaches_the_queries_that_see_it_and_no_others(
    isa: str, dtype: torch.dtype, window: int | None, poison: float
) -> None:
    step = make([(200, 230), (35, 35)], dtype)
    clean = step.run(window, 2)
    owned = torch.zeros(len(step.pool), 16, dtype=torch.bool)
    for i, keys in enumerate(step.seq_lens.tolist()):
        for key in range(keys):
            owned[step.tables[i, key // 16], key % 16] = True
    step.pool.permute(0, 4, 1, 2, 3, 5)[~owned] = poison
    step.pool[:, 0] = poison  # another layer
    assert torch.equal(step.run(window, 2), clean)
    for side in (0, 1):
        for bad in (3, 140, 229):
            pool = step.pool.clone()
            pool[step.tables[0, bad // 16], 1, side, :, bad % 16] = poison
            result = step._replace(pool=pool).run(window, 2)
            positions = torch.arange(30, 230)
            sees = (positions >= bad) if window is None else (positions >= bad) & (positions < bad + window)
            unhurt = torch.cat((~sees, torch.ones(35, dtype=torch.bool)))
            assert torch.equal(result[unhurt], clean[unhurt])
            if side == 1 or poison != poison:
                assert not result[:200][sees].isfinite().any()


def test_scores_of_any_size_neither_overflow_nor_vanish(isa: str) -> None:
    """Scores of thousands, and a query whose own key alone counts."""
    step = make([(150, 150)])
    large = step._replace(q=step.q * 1000)
    torch.testing.assert_close(large.run().double(), large.exact(), rtol=1e-3, atol=1e-3)
    none = step._replace(q=step.q * 0)
    torch.testing.assert_close(none.run().double(), none.exact(), rtol=1e-5, atol=1e-6)


def test_what_the_kernel_does_not_take() -> None:
    assert takes(F32, 4, 2, 64)
    for dtype, heads, head_size in ((torch.float16, 4, 64), (F32, 4, 24), (F32, 4, 592), (F32, 512, 64)):
        assert not takes(dtype, heads, 1, head_size)
