"""Servers that the store tests of one module share, and values to store."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import store_servers
from tls import make_certificates, server_context, tls_in_front_of

from pdkv.kv_store.base import KVStore
from pdkv.kv_store.registry import open_store

Open = Callable[..., KVStore]
"""open_(url, **options) -> store, closed at the end of the test."""

SERVERS = ("redis", "redis_tcp", "redis_tls", "lmcache", "mooncake", "s3")
SCHEMES = ("redis", "rediss", "redis+unix", "unix", "lmcache", "mooncake", "s3")
"""Of servers, which on a busy machine may take longer than an engine would wait for them."""

KINDS = ("memory", "host", "file", "tiers", *(pytest.param(name, marks=pytest.mark.processes) for name in SERVERS))


@pytest.fixture
def open_(keep: Callable[..., Any]) -> Open:
    def open_and_keep(url: str, **options: str) -> KVStore:
        if url.partition("://")[0] in SCHEMES:
            options = {**store_servers.PATIENT, **options}
        return keep(open_store(url, options))

    return open_and_keep


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with store_servers.redis_server() as url:
        yield url


@pytest.fixture(scope="session")
def redis_tcp_url() -> Iterator[str]:
    with store_servers.redis_server(tcp=True) as url:
        yield url


@pytest.fixture(scope="session")
def redis_tls_url(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    files = make_certificates(tmp_path_factory.mktemp("tls"))
    with tls_in_front_of(redis_url.partition("://")[2], server_context(files)) as port:
        yield f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={files.authority}"


@pytest.fixture(scope="session")
def lmcache_url() -> Iterator[str]:
    with store_servers.lmcache_server() as url:
        yield url


@pytest.fixture(scope="session")
def mooncake_url() -> Iterator[str]:
    with store_servers.mooncake_server() as url:
        yield url


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    with store_servers.s3_server() as url:
        yield url


@pytest.fixture(params=KINDS)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URL of each kind of store. Servers are shared: tests use keys of their own."""
    match request.param:
        case "memory":
            return f"memory://{tmp_path.name}"
        case "host":
            return f"host://{tmp_path}/segments?capacity=256MiB"
        case "file":
            return f"file://{tmp_path}/values"
        case "tiers":
            return f"memory://{tmp_path.name},file://{tmp_path}/values"
        case kind:
            url: str = request.getfixturevalue(f"{kind}_url")
            return url


@pytest.fixture
def key() -> Callable[[int], bytes]:
    """Keys that no other test has: key(number)."""
    salt = random.randbytes(16)
    return lambda number: salt + number.to_bytes(8, "little") + bytes(24)
