"""What a request does not own never reaches its attention, whatever lies there: every CPU path, bit by bit."""

from collections.abc import Callable

import pytest
import torch
from attention_case import Case, Shape, layers_of, without_compiled_kernel
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.engine.worker.attention.backend import AttentionBackend
from pdkv.engine.worker.attention.cpu import CpuAttention
from tests.conftest import EXAMPLES

torch.set_num_threads(1)

Make = Callable[..., AttentionBackend]
Windows = list[int | None]

PATHS = pytest.mark.parametrize("make", [CpuAttention, without_compiled_kernel], ids=["compiled", "torch"])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

decodes = st.tuples(st.integers(0, 150), st.just(1))
chunks = st.tuples(st.one_of(st.just(0), st.integers(0, 80)), st.integers(2, 150))
steps = st.lists(st.one_of(decodes, chunks), min_size=1, max_size=7)
shapes = st.builds(
    lambda heads, head_size, block_size: Shape(*heads, head_size, block_size),
    st.sampled_from([(1, 1), (4, 4), (6, 2), (8, 1), (3, 1)]),
    st.sampled_from([8, 16, 32, 64, 80, 128]),
    st.sampled_from([16, 32, 48]),
)
windows = st.lists(st.one_of(st.none(), st.integers(1, 200)), min_size=2, max_size=2)
"""Of both layers."""


def poisons(dtype: torch.dtype) -> list[float]:
    """Nothing is worse than these: a product with the last one overflows."""
    return [float("nan"), float("inf"), float("-inf"), torch.finfo(dtype).max]


def check(
    make: Make,
    requests: list[tuple[int, int]],
    dtype: torch.dtype,
    shape: Shape,
    poison: float,
    windows: Windows | None = None,
) -> None:
    """Poison what is nobody's, then one request after the other: the others' results are those of a clean pool."""

    windows = windows or [None, None]

    def attend(case: Case) -> list[torch.Tensor]:
        backend = make(case.pool, shape.heads, layers_of(windows))
        last = shape.layers - 1
        return [case.run(backend, 0), case.run(backend, last), case.run(backend, last, last_only=True)]

    def case() -> Case:
        return Case(requests, dtype, shape=shape)

    clean = attend(case())
    close = 1e-4 if dtype is torch.float32 else 0.05
    for layer in (0, shape.layers - 1):
        expected = case().expected(layer, windows[layer])
        torch.testing.assert_close(clean[layer].double(), expected, rtol=close, atol=close)
    poisoned = case()
    poisoned.fill_foreign(poison)
    for result, expected in zip(attend(poisoned), clean, strict=True):
        assert torch.equal(result, expected)
    for victim in range(len(requests)):
        poisoned = case()
        poisoned.fill_foreign(poison)
        poisoned.poison(victim, poison)
        others = torch.ones(len(poisoned.qkv), dtype=torch.bool)
        others[poisoned.rows(victim)] = False
        for result, expected in zip(attend(poisoned), clean, strict=True):
            wanted = others if len(result) == len(others) else others[poisoned.last_rows]
            assert torch.equal(result[wanted], expected[wanted])


@PATHS
@settings(max_examples=12 * EXAMPLES)
@given(data=st.data(), requests=steps, shape=shapes, dtype=st.sampled_from(DTYPES), windows=windows)
def test_only_owned_kv_counts(
    make: Make, data: st.DataObject, requests: list[tuple[int, int]], shape: Shape, dtype: torch.dtype, windows: Windows
) -> None:
    check(make, requests, dtype, shape, data.draw(st.sampled_from(poisons(dtype))), windows)


@PATHS
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("queries", [1, 2, 20])
def test_every_length_of_the_last_block(queries: int, block_size: int, make: Make) -> None:
    """Beside a long request, in whose bucket the short ones are padded with their own blocks."""
    requests = [(length, queries) for length in range(2 * block_size + 1)] + [(20 * block_size, queries)]
    clean, poisoned = (Case(requests, shape=Shape(block_size=block_size)) for _ in range(2))
    poisoned.fill_foreign(float("nan"))
    results = [case.run(make(case.pool, case.shape.heads, case.layers), 0) for case in (clean, poisoned)]
    assert torch.equal(*results)


@PATHS
def test_a_block_whose_owner_overflowed(make: Make) -> None:
    """A clean prompt of 20 tokens gets, as its second block, one that was full of NaN."""
    case = Case([(0, 20)])
    expected = case.expected(0)
    case.pool[case.blocks(0)[1]] = float("nan")
    torch.testing.assert_close(case.run(make(case.pool, 6, case.layers), 0).double(), expected, rtol=1e-4, atol=1e-5)


@PATHS
@settings(max_examples=12 * EXAMPLES)
@given(data=st.data(), requests=steps, shape=shapes, dtype=st.sampled_from(DTYPES), windows=windows)
def test_no_token_gets_anything_of_a_later_one(
    make: Make, data: st.DataObject, requests: list[tuple[int, int]], shape: Shape, dtype: torch.dtype, windows: Windows
) -> None:
    """Else KV of a prompt's first tokens, which other prompts find by those tokens, depends on what came behind."""
    clean, poisoned = (Case(requests, dtype, shape=shape) for _ in range(2))
    poison = data.draw(st.sampled_from(poisons(dtype)))
    before = torch.ones(len(clean.qkv), dtype=torch.bool)
    for victim in range(len(requests)):
        rows = poisoned.rows(victim)
        first = data.draw(st.integers(rows.start, rows.stop))  # at the end: none of it
        poisoned.qkv[first : rows.stop] = poison
        before[first : rows.stop] = False
    for layer in (0, shape.layers - 1):
        results = [case.run(make(case.pool, shape.heads, layers_of(windows)), layer) for case in (clean, poisoned)]
        assert torch.equal(results[0][before], results[1][before])


@PATHS
@pytest.mark.parametrize(("head_size", "block_size"), [(80, 32), (64, 48)])
def test_rows_of_products_whose_ends_fill_no_tile_are_apart(make: Make, head_size: int, block_size: int) -> None:
    """On AMX, oneDNN reads beyond such an end into the next row, which a NaN there survives."""
    clean, poisoned = (Case([(0, 97)], torch.bfloat16, shape=Shape(1, 1, head_size, block_size)) for _ in range(2))
    poisoned.qkv[1:] = float("nan")
    first, again = (case.run(make(case.pool, 1, layers_of([None, None])), 0)[0] for case in (clean, poisoned))
    assert torch.equal(first, again)


@PATHS
@settings(max_examples=12 * EXAMPLES)
@given(data=st.data(), requests=steps, shape=shapes, dtype=st.sampled_from(DTYPES), window=st.integers(1, 60))
def test_no_token_gets_anything_from_before_its_window(
    make: Make, data: st.DataObject, requests: list[tuple[int, int]], shape: Shape, dtype: torch.dtype, window: int
) -> None:
    """What was computed up to some position is poisoned, and with it those that see some of it; no one else."""
    clean, poisoned = (Case(requests, dtype, shape=shape) for _ in range(2))
    poison = data.draw(st.sampled_from(poisons(dtype)))
    apart = torch.ones(len(clean.qkv), dtype=torch.bool)
    for i, (computed, _) in enumerate(requests):
        stop = data.draw(st.integers(0, computed))  # positions [0, stop) are bad
        for j, block in enumerate(poisoned.blocks(i)):
            poisoned.pool[block, :, :, :, : max(0, stop - j * shape.block_size)] = poison
        rows = clean.rows(i)
        positions = torch.from_numpy(clean.inputs.positions[rows.start : rows.stop])
        apart[rows] = positions - window + 1 >= stop
    for layer in (0, shape.layers - 1):
        results = [case.run(make(case.pool, shape.heads, layers_of([window] * 2)), layer) for case in (clean, poisoned)]
        assert torch.equal(results[0][apart], results[1][apart])
