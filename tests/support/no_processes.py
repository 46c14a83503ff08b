"""`pytest --check` leaves out what starts a process, without a mark on any test.

Which tests do is found at collection, by what their code names, and that of their fixtures and of helpers in tests/:
something of `STARTERS`, directly or through each other. The run guards this: a test that starts a process all the same
fails and says what it called, so that a starter which is missing here cannot go unseen.
"""

import inspect
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

FOLLOWED = [Path(__file__).parents[1], Path(__file__).parents[2] / "benchmarks"]
"""Folders whose code is looked into; what lies elsewhere is judged by its module."""

STARTERS = (
    "subprocess",
    "multiprocessing",
    "pdkv.cli.main",
    "pdkv.connector_kit",
    "pdkv.grammar.matching.host",
    "pdkv.grammar.matching.workers",
    "pdkv.launch.children",
    "pdkv.launch.fork_server",
    "pdkv.launch.launcher",
    "pdkv.launch.supervisor",
    "pdkv.testing.deployment",
    "triton",  # its compiler
)
"""Modules whose functions and classes start processes, or may: to name one of them is enough."""

FORKS = frozenset({"fork", "posix_spawn", "forkpty", "system"})
"""Names of `os` that do."""

EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"})
"""What Python's audit hooks are told: https://docs.python.org/3/library/audit_events.html."""


def starts_processes(item: pytest.Function) -> bool:
    """Whether a test or one of its fixtures names what starts a process, or it is marked so."""
    if item.get_closest_marker("processes") is not None:
        return True
    definitions = item._fixtureinfo.name2fixturedefs.values()
    functions = [item.function, *(fixture.func for chain in definitions for fixture in chain)]
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any(map(starts, [*functions, *(value for value in parameters if callable(value))]))


class StartsProcess(AssertionError):
    """Raised where a test does that was not known to."""


class ProcessGuard:
    """A pytest plugin: no test of this run may start a process."""

    def __init__(self) -> None:
        self._in_test = False
        sys.addaudithook(self.audit)  # for good: it asks whether a test runs

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        return (yield from self._watched())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        return (yield from self._watched())

    def _watched(self) -> Iterator[None]:
        self._in_test = True
        try:
            return (yield)
        finally:
            self._in_test = False

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python calls it at every event."""
        if self._in_test and event in EVENTS:
            raise StartsProcess(f"{event}{arguments[:1]}: this test starts a process; see STARTERS in {__file__}")


@cache
def starts(target: object) -> bool:
    """Whether a function or class names, directly or through code of tests/, what starts a process."""
    return _search(target, set())


def _search(target: Any, seen: set[int]) -> bool:
    """Follow names through code of FOLLOWED."""
    if id(target) in seen:
        return False
    seen.add(id(target))
    if isinstance(target, ModuleType):
        return _is_starter(target.__name__)
    if isinstance(target, type):
        if _is_starter(target.__module__):
            return True
        return _is_ours(target) and any(_search(member, seen) for member in _members(target))
    if isinstance(target, dict):  # a table of starters
        return any(_search(value, seen) for value in target.values())
    function = inspect.unwrap(target) if callable(target) else target
    if not isinstance(function, FunctionType):
        return _is_starter(str(getattr(target, "__module__", "")))
    if _is_starter(function.__module__ or ""):
        return True
    return _is_ours(function) and any(_search(found, seen) for found in _named(function.__code__, function.__globals__))


def _named(code: CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """What code refers to: globals, attributes of modules among them, and the same of functions inside."""
    for name in code.co_names:  # modules that it imports among them
        if _is_starter(name):
            yield sys.modules["subprocess"]
        if name not in names:
            continue
        yield (found := names[name])
        if found is sys.modules["os"] and FORKS & {*code.co_names}:
            yield sys.modules["subprocess"]
        if isinstance(found, ModuleType) and _is_ours(found):
            yield from (found.__dict__[other] for other in code.co_names if other in found.__dict__)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant, names)


def _members(cls: type) -> Iterator[Any]:
    yield from cls.__mro__[1:-1]
    for member in vars(cls).values():
        yield getattr(member, "__func__", getattr(member, "fget", member))


def _is_starter(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in STARTERS)


def _is_ours(target: Any) -> bool:
    module = target if isinstance(target, ModuleType) else sys.modules.get(target.__module__)
    parents = Path(getattr(module, "__file__", None) or "/").parents
    return any(folder in parents for folder in FOLLOWED)
