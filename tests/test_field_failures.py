"""docs/field-failures.md, docs/waits.md and the review: every row is there, and every test that they name exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [f"F{number}" for number in (*range(1, 31), 81, 82)]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


QUOTED = re.compile(r"`((?:tests/[\w/]+\.py)?)(?:::(\w+)(?:\[[^\]`]*\])?)?`")
REVIEW = "review-2026-11.md"


def rows(page: str) -> Iterator[list[str]]:
    """Cells of the rows of all tables."""
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if line.startswith("| ") and not line.endswith("| tests |") and not line.startswith("| # |"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def functions(path: Path) -> dict[str, str]:
    """Test functions of a file with their docstrings; where there are none, with the file's."""
    tree = ast.parse(path.read_text())
    whole = ast.get_docstring(tree) or ""
    return {
        node.name: f"{ast.get_docstring(node) or ''} {whole}" for node in tree.body if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("page", ["field-failures.md", "waits.md", "failures.md"])
def test_every_row_names_tests_and_all_of_them_exist(page: str) -> None:
    for row in rows(page):
        named = NAMED.findall(row[-1])
        assert named, f"no test: {row}"
        for path, name in named:
            assert name in functions(ROOT / path), f"{path}::{name} of {row[0]}"


def test_every_row_of_the_review_names_tests_and_all_of_them_exist() -> None:
    for row in rows(REVIEW):
        assert len(row) == 4, row
        path = ""
        for file, name in (named := QUOTED.findall(row[2])):  # `::name` is in the file that was named last
            path = file or path
            assert (ROOT / path).is_file(), f"{path} of {row[:2]}"
            assert not name or name in functions(ROOT / path), f"{path}::{name} of {row[:2]}"
        assert named, f"no test: {row}"
        rest = QUOTED.sub("", row[2])
        assert "`" not in rest, f"neither a file nor a function of tests: {row}"
        assert "tests/" not in rest, f"no backticks: {row}"
        assert "::" not in rest, f"no backticks: {row}"


def place(number: str) -> tuple[bool, int, str]:
    """Of a finding in its table: by number, then what has none."""
    found = re.match(r"[A-Z]?(\d+)(\w*)$", number)
    return (False, int(found[1]), found[2]) if found else (True, 0, "")


def test_findings_of_the_review_are_in_order_and_said_once() -> None:
    tables = (ROOT / "docs" / REVIEW).read_text().split("\n## ")
    for table in tables:
        numbers = [line.split(" | ")[0].strip("| ") for line in table.splitlines() if re.match(r"\| (?!# )", line)]
        assert numbers == sorted(numbers, key=place), table[:20]
    findings = [(row[0], row[1]) for row in rows(REVIEW)]
    assert len(set(findings)) == len(findings)


def test_no_failure_of_the_field_is_left_out() -> None:
    assert [row[0] for row in rows("field-failures.md")] == ROWS


@pytest.mark.parametrize("failure", ROWS)
def test_a_test_says_which_failure_it_covers(failure: str) -> None:
    [row] = [row for row in rows("field-failures.md") if row[0] == failure]
    texts = [functions(ROOT / path)[name] for path, name in NAMED.findall(row[-1])]
    assert any(re.search(rf"\b{failure}\b", text) for text in texts), f"no docstring of {failure}'s tests names it"
