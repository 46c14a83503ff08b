"""docs/field-failures.md and docs/waits.md: every row is there, and every test that they name exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [*(f"F{number}" for number in range(1, 21)), "F23", "F24"]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows(page: str) -> Iterator[list[str]]:
    """Cells of the rows of all tables."""
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if line.startswith("| ") and not line.endswith("| tests |"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def functions(path: Path) -> dict[str, str]:
    """Test functions of a file with their docstrings; where there are none, with the file's."""
    tree = ast.parse(path.read_text())
    whole = ast.get_docstring(tree) or ""
    return {
        node.name: f"{ast.get_docstring(node) or ''} {whole}" for node in tree.body if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("page", ["field-failures.md", "waits.md"])
def test_every_row_names_tests_and_all_of_them_exist(page: str) -> None:
    for row in rows(page):
        named = NAMED.findall(row[-1])
        assert named, f"no test: {row}"
        for path, name in named:
            assert name in functions(ROOT / path), f"{path}::{name} of {row[0]}"


def test_no_failure_of_the_field_is_left_out() -> None:
    assert [row[0] for row in rows("field-failures.md")] == ROWS


@pytest.mark.parametrize("failure", ROWS)
def test_a_test_says_which_failure_it_covers(failure: str) -> None:
    [row] = [row for row in rows("field-failures.md") if row[0] == failure]
    texts = [functions(ROOT / path)[name] for path, name in NAMED.findall(row[-1])]
    assert any(re.search(rf"\b{failure}\b", text) for text in texts), f"no docstring of {failure}'s tests names it"
