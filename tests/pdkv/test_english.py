"""Docstrings, messages and pages stand alone as sentences or noun phrases, in plain English (CONTRIBUTING.md)."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {"tests", "build", "results"}
WORDS = re.compile(
    r"\b(nobody|somebody|anybody|whoever|whomever|whatsoever|shall|for ever|likewise|raised only"
    r"|(is|are) no (subclass|multiple|regular|whole))\b",
    re.IGNORECASE,
)
HEADLESS = re.compile(
    r"(Of|Who|Whose|Whom|Those|Beside|Behind|It|Its|They|Their|Them|Make (it|them)|By (layer|group|rank|name)"
    r"|((To|For|With|By|In|On|From|Of) (whom|which|whose)))\b|The same(?=[,.:]| (for|with|where|at)\b)"
)
"""A docstring that begins like this continues a sentence whose subject is the name."""


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def modules() -> list[Path]:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."]  # no virtual environment
    found = [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    return [path for path in found if not SKIPPED & set(path.relative_to(ROOT).parts)]


def texts_of(source: str) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether it is a docstring) of each docstring and message."""
    tree = ast.parse(source)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value, node in docstrings


def faults_in(source: str) -> list[str]:
    """What is wrong in a module's docstrings and messages."""
    faults = []
    for line, text, is_docstring in texts_of(source):
        found = WORDS.search(text) or (HEADLESS.match(text) if is_docstring else None)
        if found:
            faults.append(f"{line}: {found[0]!r} in {' '.join(text.split())[:100]!r}")
    return faults


def test_no_docstring_or_message_reads_as_translated() -> None:
    faults = [f"{path.relative_to(ROOT)}:{fault}" for path in modules() for fault in faults_in(path.read_text())]
    assert not faults, "\n".join(faults)


def test_no_page_reads_as_translated() -> None:
    lines = [(path, number, line) for path in pages() for number, line in enumerate(path.read_text().split("\n"), 1)]
    faults = [f"{path.relative_to(ROOT)}:{number}: {line}" for path, number, line in lines if WORDS.search(line)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "text",
    ["Of one piece.", "Whose turn it is.", "To whom it goes.", "It waits for ever.", "Its name.", "The same, later."],
)
def test_fragments_are_refused(text: str) -> None:
    assert faults_in(f'def f():\n    """{text}"""\n')
