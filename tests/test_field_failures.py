"""docs/field-failures.md, docs/waits.md and docs/failures.md: every row names tests, and all of them exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows(page: str) -> Iterator[list[str]]:
    """Cells of the rows of all tables."""
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if line.startswith("| ") and not line.endswith("| tests |") and not line.startswith("| # |"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


@cache
def functions(path: Path) -> dict[str, str]:
    """Test functions of a file with their docstrings; where there are none, with the file's."""
    tree = ast.parse(path.read_text())
    whole = ast.get_docstring(tree) or ""
    return {
        node.name: f"{ast.get_docstring(node) or ''} {whole}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("page", ["field-failures.md", "waits.md", "failures.md"])
def test_every_row_names_tests_and_all_of_them_exist(page: str) -> None:
    for row in rows(page):
        named = NAMED.findall(row[-1])
        assert named, f"no test: {row}"
        for path, name in named:
            assert name in functions(ROOT / path), f"{path}::{name} of {row[0]}"
