"""Rounded sizes hold what they round, waste little, and are few."""

import pytest

from pdkv.engine.worker.attention.shapes import round_blocks, round_queries, round_rows, round_tiles


def test_rows() -> None:
    sizes = [round_rows(count) for count in range(2049)]
    assert all(count <= size <= max(count + 7, count * 1.25) for count, size in enumerate(sizes))
    assert len(set(sizes)) < 120
    assert sizes[512] == 512
    assert sizes[519] == 528


def test_queries() -> None:
    sizes = [round_queries(count) for count in range(1, 129)]
    assert all(count <= size for count, size in enumerate(sizes, 1))
    assert len(set(sizes)) == 10


@pytest.mark.parametrize("block_size", [16, 64])
def test_blocks(block_size: int) -> None:
    sizes = [round_blocks(count, block_size) for count in range(1, 513)]
    assert all(count <= size <= max(count, count * 1.125) for count, size in enumerate(sizes, 1))
    assert len(set(sizes)) <= 56


def test_tiles() -> None:
    assert [round_tiles(count) for count in (1, 2, 3, 4, 5, 7, 8, 13)] == [
        (1, 1), (2, 2), (3, 3), (4, 4), (4, 6), (6, 8), (8, 8), (12, 16),
    ]  # fmt: skip
