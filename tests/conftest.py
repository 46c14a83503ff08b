"""Fixtures that several folders share: small random Hugging Face models."""

import atexit
import contextlib
import gc
import inspect
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from coroutines import run
from isas import kernels_of
from no_processes import ProcessGuard, starts_processes
from small_models import make_hf_model
from warm import WarmPopen

from pdkv.kernels.compiled import levels
from pdkv.testing.deployment import Deployment

# Several test processes share few cores: one computing thread each, and no spinning while others work. OpenMP reads
# this when it is loaded, with torch, which nothing imports before files of tests are collected.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

EXAMPLES = int(os.environ.get("EXAMPLES", "1"))
"""So many times the random cases of `make test`; `make matrix` has more."""

# How long an example takes is up to the machine.
hypothesis.settings.register_profile("pdkv", deadline=None, max_examples=40 * EXAMPLES)
hypothesis.settings.load_profile("pdkv")


@pytest.fixture(params=levels())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each level of compiled kernels that this host has: those that the test runs."""
    with kernels_of(request.param):
        yield request.param


@pytest.fixture(params=[*(pytest.param(level, marks=pytest.mark.slow) for level in levels()[:-1]), *levels()[-1:]])
def engine_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same for tests that run an engine: lower levels than the best are slow."""
    with kernels_of(request.param):
        yield request.param


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--check",
        action="store_true",
        help="leave out tests that start processes; draw a tenth of the random schedules",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--check"):
        config.pluginmanager.register(ProcessGuard())
    else:
        Deployment.popen = WarmPopen
        WarmPopen.around = dict(os.environ)


LONGEST_FIRST = (
    "e2e",
    "kernels",
    "soak",
    "matrix",
    "connector_kit",
    "benchmarks",
    "connectors",
    "state_machine",
    "launch",
)
"""Folders whose files take long: what one process begins last shall not take longer than what the others have left."""


@cache
def place(path: Path) -> int:
    """Where a file's folder is among LONGEST_FIRST."""
    folder = path.relative_to(Path(__file__).parent).parts[0]
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is imported and collected stays: no search for garbage goes through it, now or while tests run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries complain of what is left when the interpreter ends


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Sort what is collected. Hypothesis's plugin would read the constants of every imported module here; tests that
    draw read them anyway.
    """
    items.sort(key=lambda item: place(item.path))
    if config.getoption("--check"):
        left_out = {item for item in items if isinstance(item, pytest.Function) and starts_processes(item)}
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hypothesis.internal.conjecture.providers._get_local_constants", dict, raising=False)
        return (yield)


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, on the loop that its module's `event_loop` makes, or on asyncio's."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    run(pyfuncitem.obj(**arguments), getattr(pyfuncitem.module, "event_loop", None))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """A test that runs a command in this process leaves no log level to the next one."""
    loggers = [logging.getLogger(name) for name in ("", "pdkv", "pdkv.access")]
    levels = [logger.level for logger in loggers]
    try:
        return (yield)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@pytest.fixture
def real_pd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's launches start interpreters, as a user's do; those of other tests are forked (warm.py)."""
    monkeypatch.setattr(Deployment, "popen", subprocess.Popen)


@pytest.fixture
def keep() -> Iterator[Callable[..., Any]]:
    """keep(object): that object, which is closed when the test is over."""
    with contextlib.ExitStack() as stack:
        yield lambda thing: stack.enter_context(contextlib.closing(thing))


HFModel = Callable[..., Path]
"""(family, dtype="float32", **config_overrides) -> model directory without a tokenizer."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")


@pytest.fixture(scope="session")
def thoroughness(pytestconfig: pytest.Config) -> float:
    """What share of its random cases a test that draws thousands of them shall draw."""
    return 0.1 if pytestconfig.getoption("--check") else 1.0


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Digests of the tests' models go to a cache of this session, that of every process it starts included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> HFModel:
    """Makes a model directory; the same arguments give the same directory within a session."""
    made: dict[tuple[Any, ...], Path] = {}

    def get(family: str, dtype: str = "float32", **overrides: Any) -> Path:
        key = (family, dtype, repr(sorted(overrides.items())))
        if key not in made:
            made[key] = make_hf_model(tmp_path_factory.mktemp(family), family, dtype, **overrides)
        return made[key]

    return get


@pytest.fixture(scope="session")
def tiny_model_dir(hf_model: HFModel) -> Path:
    """A small float32 Llama."""
    return hf_model("llama")
