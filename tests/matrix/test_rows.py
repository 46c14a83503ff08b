"""What the short cover covers."""

import itertools

from matrix_rows import BACKENDS, BLOCKS, RANKS, TOPOLOGIES, all_rows, cover


def test_the_cover_is_part_of_the_matrix_and_short() -> None:
    assert set(cover()) <= set(all_rows())
    assert len(cover()) == len(set(cover())) == 15


def test_every_value_and_every_other_pair_is_in_the_cover() -> None:
    rows = cover()
    assert {row.backend for row in rows} == set(BACKENDS)
    assert {(row.ranks, row.blocks) for row in rows} == set(itertools.product(RANKS, BLOCKS))
    assert {(row.topology, row.ranks) for row in rows} == set(itertools.product(TOPOLOGIES, RANKS))
    assert {(row.topology, row.blocks) for row in rows} == set(itertools.product(TOPOLOGIES, BLOCKS))
