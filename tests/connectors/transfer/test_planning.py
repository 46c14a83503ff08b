"""Transfer planning: every token at its place, in few pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.connectors.transfer.planning import as_ids, run_starts, whole_blocks


@pytest.mark.parametrize(
    ("source", "target", "starts"),
    [([4, 5, 6, 9, 10], [0, 1, 2, 3, 7], [0, 3, 4]), ([3, 2, 1], [3, 2, 1], [0, 1, 2]), ([], [], [])],
)
def test_runs_are_adjacent_on_both_sides(source: list[int], target: list[int], starts: list[int]) -> None:
    assert run_starts(as_ids(source), as_ids(target)).tolist() == starts


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))))
def test_runs_cover_the_pairs_in_order_and_cannot_be_merged_further(pairs: list[tuple[int, int]]) -> None:
    """F18."""
    starts = run_starts(as_ids([s for s, _ in pairs]), as_ids([d for _, d in pairs])).tolist()
    runs = [pairs[start:stop] for start, stop in pairwise([*starts, len(pairs)])]
    assert [pair for run in runs for pair in run] == pairs
    for run in runs:
        assert run == [(run[0][0] + i, run[0][1] + i) for i in range(len(run))]
    for a, b in pairwise(runs):
        assert (a[-1][0] + 1, a[-1][1] + 1) != b[0]


def test_run_starts_of_one_side() -> None:
    assert run_starts(as_ids([1, 2, 5, 6, 7, 9])).tolist() == [0, 2, 5]


@pytest.mark.parametrize(
    ("units", "blocks"),
    [
        ([6, 7, 2, 3], [3, 1]),
        ([6, 7, 2], [3, 1]),  # a partial last block
        ([7, 2, 3], None),  # not from a block's beginning
        ([6, 3], None),  # halves of two blocks
        ([6, 7, 3, 2], None),
        ([], []),
    ],
)
def test_units_that_are_whole_blocks(units: list[int], blocks: list[int] | None) -> None:
    found = whole_blocks(units, 2)
    assert (None if found is None else found.tolist()) == blocks
