"""Transfer planning: every token at its place, in few pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.connectors.transfer.planning import Run, Segment, as_ids, merge_runs, run_starts, token_segments, whole_blocks


def test_runs_merge_only_where_adjacent_on_both_sides() -> None:
    assert merge_runs([4, 5, 6, 9, 10], [0, 1, 2, 3, 7]) == [Run(4, 0, 3), Run(9, 3, 1), Run(10, 7, 1)]


def test_descending_blocks_are_no_run() -> None:
    assert merge_runs([3, 2, 1], [3, 2, 1]) == [Run(3, 3, 1), Run(2, 2, 1), Run(1, 1, 1)]


def test_no_blocks_no_runs() -> None:
    assert merge_runs([], []) == []


def test_unequal_sides_are_refused() -> None:
    with pytest.raises(ValueError, match="2 source blocks for 1"):
        merge_runs([1, 2], [1])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))))
def test_runs_cover_the_pairs_in_order_and_cannot_be_merged_further(pairs: list[tuple[int, int]]) -> None:
    """F18."""
    runs = merge_runs([s for s, _ in pairs], [d for _, d in pairs])
    assert [(r.source + i, r.destination + i) for r in runs for i in range(r.num_blocks)] == pairs
    for a, b in pairwise(runs):
        assert (a.source + a.num_blocks, a.destination + a.num_blocks) != (b.source, b.destination)


def test_run_starts_of_one_side() -> None:
    assert run_starts(as_ids([1, 2, 5, 6, 7, 9])).tolist() == [0, 2, 5]


def test_segments_of_unequal_blocks() -> None:
    """Tokens [20, 70) from blocks of 16 into blocks of 32."""
    assert token_segments(20, 70, 16, 32) == [
        Segment(0, 4, 0, 20, 12),
        Segment(1, 0, 1, 0, 16),
        Segment(2, 0, 1, 16, 16),
        Segment(3, 0, 2, 0, 6),
    ]


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 50), st.integers(1, 50))
def test_segments_cover_the_range_once_within_blocks(start: int, length: int, source: int, destination: int) -> None:
    position = start
    for segment in token_segments(start, start + length, source, destination):
        assert (start // source + segment.source_index) * source + segment.source_offset == position
        assert (start // destination + segment.destination_index) * destination + segment.destination_offset == position
        assert 0 < segment.num_tokens <= min(source - segment.source_offset, destination - segment.destination_offset)
        position += segment.num_tokens
    assert position == start + length


@pytest.mark.parametrize("arguments", [(0, 4, 0, 16), (0, 4, 16, 0), (4, 0, 16, 16), (-1, 4, 16, 16)])
def test_impossible_segments_are_refused(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="no such transfer"):
        token_segments(*arguments)


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
