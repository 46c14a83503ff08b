"""Which heads, neurons and words a rank holds."""

import pytest

from pdkv.errors import ConfigError
from pdkv.models.shard import Shard


def test_parts_are_equal_and_cover_everything() -> None:
    assert [Shard(rank, 4).part(8, "heads") for rank in range(4)] == [
        slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="9 heads cannot be divided among 4 ranks"):
        Shard(0, 4).part(9, "heads")


@pytest.mark.parametrize(
    ("heads", "size", "held"),
    [(8, 2, [0, 4]), (8, 8, list(range(8))), (2, 4, [0, 0, 1, 1]), (1, 4, [0] * 4), (2, 8, [0] * 4 + [1] * 4)],
)
def test_with_more_ranks_than_kv_heads_neighbours_hold_the_same_one(heads: int, size: int, held: list[int]) -> None:
    """F20: rank r has head r * heads / size, and always as many as the others."""
    parts = [Shard(rank, size).heads(heads) for rank in range(size)]
    assert [part.start for part in parts] == held
    assert {part.stop - part.start for part in parts} == {max(1, heads // size)}


@pytest.mark.parametrize(("heads", "size"), [(3, 2), (2, 3), (3, 4)])
def test_heads_and_ranks_that_do_not_divide_are_refused(heads: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"{heads} key-value heads cannot be divided among {size} ranks"):
        Shard(0, size).heads(heads)


def test_words_need_not_divide_evenly() -> None:
    assert [Shard(rank, 2).padded_part(300) for rank in range(2)] == [slice(0, 150), slice(150, 300)]
    assert [Shard(rank, 4).padded_part(5) for rank in range(4)] == [
        slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 5)
    ]  # fmt: skip
