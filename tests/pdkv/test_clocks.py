"""Product code reads time and waits for it through `pdkv.base.clock` alone (docs/testing.md)."""

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "src/pdkv", "router", "engine", "connectors", "kv_store", "grammar", "kernels", "models", "prefill", "decode"
)  # fmt: skip
CLOCKS = ("src/pdkv/base/clock.py",)

ALLOWED = {
    "router/http/server/request_body.py": "loop.time",  # asyncio.timeout counts by its loop's clock
    "router/engines/foreign.py": "loop.time",  # likewise
}

LOOPS = ("router/", "src/pdkv/bench/", "src/pdkv/simulate/", "src/pdkv/launch/", "kv_store/object_store.py", *CLOCKS)
"""What runs on an event loop, whose timers count by its time, and so by a test's (`pdkv.testing.VirtualLoop`)."""

LOOP_TIMERS = {"asyncio.timeout", "asyncio.timeout_at", "asyncio.wait"}
"""The last one where it has a time-out. Planned calls of a loop are the others."""

READS = {
    *(f"time.{name}{unit}" for name in ("monotonic", "perf_counter", "time") for unit in ("", "_ns")),
    "time.sleep",
    "asyncio.sleep",
    "asyncio.wait_for",  # before Python 3.12 it may swallow a cancellation
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


@lru_cache(1)  # of the file that is looked at
def parsed(source: str) -> tuple[list[ast.AST], dict[str, str]]:
    """Its nodes, and what the names that it imports stand for."""
    nodes = list(ast.walk(ast.parse(source)))
    return nodes, imports(nodes)


def imports(nodes: list[ast.AST]) -> dict[str, str]:
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update({alias.asname or alias.name: alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return found


def bare_clocks(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each use of a clock or a pause other than pdkv.base.clock's."""
    nodes, imported = parsed(source)
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.args]
    yields = {call.func for call in calls if isinstance(call.args[0], ast.Constant) and call.args[0].value == 0}
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and node not in yields:
            name = dotted(node, imported)
            if name in READS or name == "threading.Event().wait" or name.endswith("loop.time"):
                yield node.lineno, name


def loop_timers(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each timer of an event loop."""
    nodes, imported = parsed(source)
    for node in nodes:
        if isinstance(node, ast.Call):
            name = dotted(node.func, imported)
            waits = name in LOOP_TIMERS and (
                name != "asyncio.wait" or "timeout" in {keyword.arg for keyword in node.keywords}
            )
            if waits or name.endswith((".call_later", "loop.call_at", "loop().call_at")):
                yield node.lineno, name


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_has_a_clock_of_its_own(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        name, source = path.relative_to(ROOT).as_posix(), path.read_text()
        if name not in CLOCKS:
            assert [(name, *found) for found in bare_clocks(source) if found[1] != ALLOWED.get(name)] == []
        if not name.startswith(LOOPS):
            assert [(name, *found) for found in loop_timers(source)] == []


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
    "source",
    [
        "import asyncio\nasyncio.get_running_loop().call_later(1, f)",
        "self._loop.call_at(1, f)",
        "import asyncio\nasync def f():\n    async with asyncio.timeout(1):\n        pass",
        "from asyncio import wait\nwait(tasks, timeout=1)",
    ],
)
def test_timers_of_event_loops_are_found(source: str) -> None:
    assert list(loop_timers(source))


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\nasyncio.sleep(0)\nasyncio.wait(tasks)",
        "import time\ntime.strftime('%Y')",
        "clock.call_at(clock.now(), f)",
    ],
)
def test_others_are_not(source: str) -> None:
    assert not [*bare_clocks(source), *loop_timers(source)]
