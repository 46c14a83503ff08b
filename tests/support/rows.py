"""One test over the rows of a table, where a test of each would cost more to collect than to run."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

Row = TypeVar("Row")


def check_each(rows: Iterable[Row], check: Callable[[Row], object]) -> None:
    """Check every row, those behind one that fails too.

    Raises:
        BaseExceptionGroup: what the rows that failed raised, each with its row as a note.
    """
    errors: list[BaseException] = []
    for row in rows:
        try:
            check(row)
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"of {row}")
            errors.append(error)
    if errors:
        raise BaseExceptionGroup("some rows fail", errors)
