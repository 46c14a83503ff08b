"""What tests and benchmarks share lies in tests/support and tests/harness."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"


def support_module(name: str) -> Any:
    """A module of either."""
    for folder in ("support", "harness"):
        if str(TESTS / folder) not in sys.path:
            sys.path.insert(0, str(TESTS / folder))
    return importlib.import_module(name)


def recall_module() -> ModuleType:
    """examples/default_model/recall.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("recall", TESTS.parent / "examples" / "default_model" / "recall.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["recall"] = module  # where its dataclasses look
    spec.loader.exec_module(module)
    return module


@contextmanager
def redis_server() -> Iterator[str]:
    """The URL of a Redis without persistence, which evicts beyond 3 GB. Raises RuntimeError where there is none."""
    servers = support_module("store_servers")
    try:
        server = servers.RedisServer("--maxmemory", "3gb", "--maxmemory-policy", "allkeys-lru")
    except servers.pytest.skip.Exception as skipped:
        raise RuntimeError(f"no redis-server can be started: {skipped}") from None
    with server:
        yield server.url
