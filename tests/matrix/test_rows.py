"""What the short cover covers, and the table of results."""

from pathlib import Path

import pytest
from matrix_rows import all_rows, cover, window_cover, window_rows
from matrix_table import PASSED, every_row, main, passed_rows, table

PAGE = Path(__file__).parents[2] / "docs/conformance.md"


def test_the_covers_are_part_of_the_matrix() -> None:
    assert set(cover()) < set(all_rows())
    assert set(window_cover()) < set(window_rows())


def test_results_become_a_table_and_what_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *others, last = every_row()
    results = tmp_path / "results"
    results.write_text("".join(f"{row}{PASSED}3 s\n" for row in [*others, others[0]]))
    assert main([str(results)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| `shared_memory` | " + " | ".join(["6 of 6"] * 5) + " | 4 of 4 |"
    assert lines[-2:] == ["| `multi` | 6 of 6 | 6 of 6 | 6 of 6 | 6 of 6 | 6 of 6 | 4 of 4 |", f"not passed: {last}"]
    with results.open("a") as file:
        file.write(f"{last}{PASSED}3 s\n")
    assert main([str(results)]) == 0
    with pytest.raises(ValueError, match="'something' is no row"):
        passed_rows(["something"])


def test_the_page_of_the_kit_shows_the_whole_matrix() -> None:
    assert "\n".join(table({*every_row()})) in PAGE.read_text()
