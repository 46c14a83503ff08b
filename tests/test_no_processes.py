"""What `make check` leaves out is found by names, and what is missed there fails when it runs."""

import functools
import subprocess

import pytest
from changed import ALWAYS, folders_of
from no_processes import EVENTS, ProcessGuard, starts


def starts_one() -> None:
    subprocess.run(["true"], check=True)


def starts_one_through_a_helper() -> None:
    def inner() -> None:
        starts_one()

    inner()


class Starter:
    def run(self) -> None:
        starts_one_through_a_helper()


class Derived(Starter):
    pass


def imports_what_starts_one() -> None:
    from pdkv.launch.launcher import launch

    launch(None)  # type: ignore[arg-type]


def makes_an_object() -> None:
    Derived().run()


@functools.wraps(starts_one)
def wrapper() -> None:
    starts_one()


def calls_itself(depth: int) -> int:
    return calls_itself(depth - 1) if depth else len(EVENTS)


@pytest.mark.parametrize(
    "function", [starts_one, starts_one_through_a_helper, imports_what_starts_one, makes_an_object, wrapper]
)
def test_what_starts_a_process_is_found_through_helpers_and_classes(function: object) -> None:
    assert starts(function)


@pytest.mark.parametrize("function", [calls_itself, pytest.raises, len])
def test_what_starts_none_is_kept(function: object) -> None:
    assert not starts(function)


def test_a_test_that_starts_a_process_all_the_same_fails_and_others_do_not() -> None:
    guard = ProcessGuard()
    guard.audit("subprocess.Popen", ("true",))  # not in a test
    run = guard.pytest_runtest_call()
    next(run)
    try:
        with pytest.raises(AssertionError, match=r"os\.fork.*this test starts a process"):
            guard.audit("os.fork", ())
        guard.audit("open", ("file", "r", 0))
    finally:
        run.close()
    guard.audit("os.fork", ())


def test_a_change_is_checked_by_the_nearest_folder_that_mirrors_it_once() -> None:
    paths = [
        "router/http/read/new.py",
        "router/process.py",
        "src/pdkv/base/clock.py",
        "README.md",
        "src/pdkv/config.py",
    ]
    assert set(folders_of(paths)) == {*ALWAYS, "tests/router", "tests/base"}
    assert set(folders_of(["router/http/read/new.py", "docs/a.md"])) == {*ALWAYS, "tests/router/http/read"}
