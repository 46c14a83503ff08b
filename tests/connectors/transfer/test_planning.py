"""Transfer planning and the copies it leads to: every token at its place, nothing else touched, few calls."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.connectors.transfer import block_copy
from pdkv.connectors.transfer.block_copy import STAGING_BYTES, Bytes, copy_blocks, copy_segments
from pdkv.connectors.transfer.planning import Run, Segment, as_ids, merge_runs, run_starts, token_segments, whole_blocks
from pdkv.errors import TransferError
from pdkv.kernels import host


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


def _pool(num_blocks: int, block_bytes: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)


_IDS = {
    "adjacent": (list(range(3, 40)), list(range(20, 57))),
    "destination adjacent": (list(range(60, 10, -1)), list(range(5, 55))),
    "destination adjacent, backwards": (list(range(3, 40)), list(range(60, 23, -1))),
    "source adjacent": (list(range(32)), [i * 37 % 64 for i in range(32)]),
    "scattered": ([i * 29 % 64 for i in range(50)], [i * 37 % 64 for i in range(50)]),
    "one": ([5], [9]),
    "none": ([], []),
}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("block_bytes", [64, 20 * 1024, 300 * 1024])
@pytest.mark.parametrize("case", _IDS)
def test_copied_blocks_are_equal_and_others_untouched(
    case: str, block_bytes: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(host, "available", lambda: False)
    source, destination = _pool(64, block_bytes, 1), _pool(64, block_bytes, 2)
    before = destination.copy()
    source_ids, destination_ids = map(as_ids, _IDS[case])
    copy_blocks(source, destination, source_ids, destination_ids, np.empty(STAGING_BYTES, np.uint8))
    assert np.array_equal(destination[destination_ids], source[source_ids])
    others = np.setdiff1d(np.arange(64), destination_ids)
    assert np.array_equal(destination[others], before[others])


@pytest.mark.parametrize(
    ("source_ids", "destination_ids", "destination_bytes"),
    [
        *(([64], [0], 64), ([-1], [0], 64), ([0], [64], 64), ([0], [-1], 64), ([0], [0, 1], 64)),
        *(([0], [0], 32), ([0], [0], 128)),
    ],
    ids=str,
)
@pytest.mark.parametrize("compiled", [True, False])
def test_blocks_that_are_not_there_or_of_another_size_are_not_copied(
    source_ids: list[int], destination_ids: list[int], destination_bytes: int, compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The kernel is told addresses and looks at nothing: whatever it is asked for must lie in both pools."""
    if not compiled:
        monkeypatch.setattr(host, "available", lambda: False)
    whole = _pool(66, destination_bytes, 2)
    destination, before = whole[1:65], whole.copy()  # what lies before and behind it is in reach
    with pytest.raises(TransferError, match="block"):
        copy_blocks(
            _pool(64, 64, 1),
            destination,
            as_ids(source_ids),
            as_ids(destination_ids),
            np.empty(STAGING_BYTES, np.uint8),
        )
    assert np.array_equal(whole, before)


def test_small_scattered_blocks_are_staged_where_no_kernel_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available", lambda: False)
    pieces: list[int] = []
    real_take = np.take

    def take(source: Bytes, ids: np.ndarray, **arguments: object) -> object:
        pieces.append(ids.size)
        return real_take(source, ids, **arguments)  # type: ignore[call-overload]

    monkeypatch.setattr(block_copy.np, "take", take)
    block_bytes = STAGING_BYTES // 16
    source, destination = _pool(64, block_bytes, 1), np.zeros((64, block_bytes), np.uint8)
    source_ids, destination_ids = as_ids(_IDS["scattered"][0][:40]), as_ids(_IDS["scattered"][1][:40])
    copy_blocks(source, destination, source_ids, destination_ids, np.empty(STAGING_BYTES, np.uint8))
    assert pieces == [16, 16, 8]
    assert np.array_equal(destination[destination_ids], source[source_ids])


@settings(max_examples=60)
@given(
    start=st.integers(0, 70),
    length=st.integers(1, 100),
    sizes=st.sampled_from([(16, 32), (32, 16), (48, 16), (32, 48), (16, 16)]),
    data=st.data(),
)
def test_tokens_move_between_unequal_blocks(
    start: int, length: int, sizes: tuple[int, int], data: st.DataObject
) -> None:
    """Against the plain definition: token t of the source's sequence is token t of the destination's."""
    source_size, destination_size = sizes
    stop, rows, token_bytes = start + length, 3, 4
    units_per_block = source_size // 16
    source = _pool(24, rows * source_size * token_bytes, 1).reshape(24, rows, source_size, token_bytes)
    destination = _pool(24, rows * destination_size * token_bytes, 2).reshape(24, rows, destination_size, token_bytes)
    expected = destination.copy()
    num_units = -(-stop // 16) - start // 16
    source_units = data.draw(st.permutations(range(24 * units_per_block)))[:num_units]
    destination_ids = data.draw(st.permutations(range(24)))[: -(-stop // destination_size) - start // destination_size]
    for token in range(start, stop):
        unit = source_units[token // 16 - start // 16]
        block, offset = divmod(token, destination_size)
        expected[destination_ids[block - start // destination_size], :, offset] = source[
            unit // units_per_block, :, unit % units_per_block * 16 + token % 16
        ]
    segments = token_segments(start, stop, 16, destination_size)
    copy_segments(source, destination, source_units, units_per_block, destination_ids, segments)
    assert np.array_equal(destination, expected)
