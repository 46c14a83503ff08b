"""The compiled copy against numpy."""

import numpy as np
import pytest

from pdkv.kernels import host

pytestmark = pytest.mark.skipif(not host.available(), reason="no compiler when pdkv was installed")


def test_pieces_of_one_row_are_whole_blocks() -> None:
    source = np.random.default_rng(0).integers(0, 256, (9, 40), dtype=np.uint8)
    target = np.zeros((7, 40), dtype=np.uint8)
    from_ids, to_ids = np.array([8, 0, 3]), np.array([2, 6, 0])
    rows = host.Rows(1, 0, 0, 1, 0, 0, 40)
    host.copy_pieces(target.ctypes.data, source.ctypes.data, to_ids * 40, from_ids * 40, rows)
    expected = np.zeros_like(target)
    expected[to_ids] = source[from_ids]
    assert np.array_equal(target, expected)


def test_rows_follow_both_strides_of_both_sides() -> None:
    source = np.random.default_rng(1).integers(0, 256, (5, 4, 6, 8), dtype=np.uint8)  # blocks, outer, inner, bytes
    target = np.zeros((3, 2, 4, 5, 8), dtype=np.uint8)  # blocks, halves, outer, inner, bytes
    blocks, places = np.array([4, 1]), np.array([0, 2])
    rows = host.Rows(
        outer=4, target_outer_stride=5 * 8, source_outer_stride=6 * 8,
        inner=3, target_inner_stride=8, source_inner_stride=8, row_bytes=8,
    )  # fmt: skip
    to, start = places * target[0].nbytes + target[0, 0].nbytes + 2 * 8, blocks * source[0].nbytes + 3 * 8
    host.copy_pieces(target.ctypes.data, source.ctypes.data, to, start, rows)
    expected = np.zeros_like(target)
    expected[places, 1, :, 2:5] = source[blocks, :, 3:6]
    assert np.array_equal(target, expected)


def test_no_piece_copies_nothing() -> None:
    target, nothing = np.zeros(4, dtype=np.uint8), np.empty(0, dtype=np.int64)
    host.copy_pieces(target.ctypes.data, target.ctypes.data, nothing, nothing, host.Rows(1, 0, 0, 1, 0, 0, 4))
    assert not target.any()
