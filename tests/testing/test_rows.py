"""A test over rows says which of them fail, and looks at all."""

import pytest
from rows import check_each


def test_each_row_that_fails_is_named_and_those_behind_it_are_checked() -> None:
    seen: list[int] = []

    def check(row: int) -> None:
        seen.append(row)
        assert row != 1
        if row == 2:
            with pytest.raises(ValueError):
                pass

    with pytest.raises(BaseExceptionGroup) as failed:
        check_each(range(4), check)
    assert seen == [0, 1, 2, 3]
    assert [error.__notes__ for error in failed.value.exceptions] == [["of 1"], ["of 2"]]
    assert [type(error) for error in failed.value.exceptions] == [AssertionError, pytest.fail.Exception]
    check_each(range(1), check)
