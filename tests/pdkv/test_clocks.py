"""Product code reads time and waits for it through `pdkv.base.clock` alone (docs/testing.md)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "src/pdkv", "router", "engine", "connectors", "kv_store", "grammar", "kernels", "models", "prefill", "decode"
)  # fmt: skip
CLOCKS = ("src/pdkv/base/clock.py",)

ALLOWED = {
    "router/http/server/request_body.py": "loop.time",  # asyncio.timeout counts by its loop's clock
}

READS = {
    *(f"time.{name}{unit}" for name in ("monotonic", "perf_counter", "time") for unit in ("", "_ns")),
    "time.sleep",
    "asyncio.sleep",
    "datetime.datetime.now",
}
"""Names that stand for a clock or a pause of their own; `asyncio.sleep(0)` is neither."""


def dotted(node: ast.expr, imported: dict[str, str]) -> str:
    """`time.monotonic` of `monotonic`, `t.monotonic`, … as a file's imports have it."""
    match node:
        case ast.Name(name):
            return imported.get(name, name)
        case ast.Attribute(value, name):
            return f"{dotted(value, imported)}.{name}"
        case ast.Call(function):
            return f"{dotted(function, imported)}()"
    return "?"


def imports(tree: ast.AST) -> dict[str, str]:
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({alias.asname or alias.name: alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return found


def bare_clocks(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each use of a clock or a pause other than pdkv.base.clock's."""
    tree = ast.parse(source)
    imported = imports(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    yields = {call.func for call in calls if isinstance(call.args[0], ast.Constant) and call.args[0].value == 0}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and node not in yields:
            name = dotted(node, imported)
            if name in READS or name == "threading.Event().wait" or name.endswith("loop.time"):
                yield node.lineno, name


FILES = [
    path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))
    if path.relative_to(ROOT).as_posix() not in CLOCKS
]  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_file_has_a_clock_of_its_own(path: Path) -> None:
    allowed = ALLOWED.get(path.relative_to(ROOT).as_posix())
    assert not [(line, name) for line, name in bare_clocks(path.read_text()) if name != allowed]


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.monotonic()",
        "from time import monotonic as now\nnow()",
        "import time as t\ndeadline = t.time",
        "import threading\nthreading.Event().wait(1)",
        "from threading import Event\nEvent().wait(1)",
        "import asyncio\nasyncio.sleep(1)",
        "def f(loop):\n    return loop.time()",
        "self.loop.time()",
        "from datetime import datetime\ndatetime.now()",
    ],
)
def test_bare_clocks_are_found(source: str) -> None:
    assert list(bare_clocks(source))


@pytest.mark.parametrize(
    "source", ["import asyncio\nasyncio.sleep(0)", "import time\ntime.strftime('%Y')", "clock.now()"]
)
def test_others_are_not(source: str) -> None:
    assert not list(bare_clocks(source))
