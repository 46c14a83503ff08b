"""What tests and benchmarks share lies in tests/support and tests/harness."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"


def support_module(name: str) -> Any:
    """A module of either."""
    for folder in ("support", "harness"):
        if str(TESTS / folder) not in sys.path:
            sys.path.insert(0, str(TESTS / folder))
    return importlib.import_module(name)


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
