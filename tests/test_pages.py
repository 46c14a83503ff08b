"""What the pages name exists: paths, links with their anchors, make targets, tests. What they say stands elsewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

from rows import check_each

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])

LINK = re.compile(r"\]\(([^)\s:#]*)(?:#([^)\s]*))?\)")  # a link with a scheme is another site's
QUOTED = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"(?:[\w.-]+/)+[\w.-]*(?=$|::)")
TEST = re.compile(r"(?<![\w/])(tests/[\w/]+\.py)::(\w+)")
TARGET = re.compile(r"(?:`|^)make ([a-z][a-z ]*)", re.MULTILINE)
MADE = {"build", "dist"}  # by an installation; they may be there or not
HIDDEN = {".ci", ".github"}
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."} - MADE | HIDDEN
MODULES = {
    path.name for path in [*ROOT.glob("*.py"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))]
}


def text_of(page: Path) -> str:
    """A page without its fenced code."""
    return FENCE.sub("", page.read_text())


def named_paths(page: Path) -> Iterator[str]:
    """What stands in backticks and can only be a path of this repository."""
    for quoted in QUOTED.findall(text_of(page)):
        found = PATH.match(quoted)
        if found and (quoted.split("/")[0] in FOLDERS or found[0].endswith((".py", ".md", ".c"))):
            yield found[0]


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_path_that_a_page_names_exists() -> None:
    def check(page: Path) -> None:
        missing = [path for path in named_paths(page) if not (ROOT / path).exists()]
        missing += {quoted for quoted in QUOTED.findall(text_of(page)) if re.fullmatch(r"\w+\.py", quoted)} - MODULES
        assert not missing

    check_each(PAGES, check)


def test_every_link_leads_somewhere() -> None:
    def check(page: Path) -> None:
        for path, anchor in LINK.findall(text_of(page)):
            target = page.parent / path if path else page
            assert target.exists(), path
            assert not anchor or anchor in anchors(target), f"{path}#{anchor}"

    check_each(PAGES, check)


def test_every_test_and_make_target_that_a_page_names_exists() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    targets = {*phony[1].split()}

    def check(page: Path) -> None:
        text = page.read_text()
        for path, name in TEST.findall(text):
            assert re.search(rf"^(?:async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
        assert {target for line in TARGET.findall(text) for target in line.split()} <= targets

    check_each(PAGES, check)


def test_the_pages_are_found_and_their_paths_recognized() -> None:
    """So that the tests above do not pass because they look at nothing."""
    paths = {path for page in PAGES for path in named_paths(page)}
    assert {"README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/glossary.md"} <= {
        str(page.relative_to(ROOT)) for page in PAGES
    }
    assert {"connectors/base.py", "engine/worker/attention/", "src/pdkv/wire/messages.py"} <= paths
    assert len(paths) > 150
