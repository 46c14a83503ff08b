"""The matrix's backends and tiers, with deadlines that a soak can outlast, and stores that stay small."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import matrix_rows
from matrix_rows import Choice, Chosen, served
from store_servers import MooncakeServer, RedisServer, S3Server, StoreServer

from soak.stalls import WATCHDOG

REQUEST_TIMEOUT_S = 10.0
STORE_MIB = 48

HOST_MEMORY = "4MiB"
"""Of an engine, beside a lower tier: 64 values at most."""

HOST_MEMORY_ALONE = "16MiB"


@contextlib.contextmanager
def _tiers(handoff: str, start: Callable[[], StoreServer] | None, *, directory: Path) -> Iterator[Chosen]:
    flags = ("--connector", handoff, "--kv-host-memory", HOST_MEMORY, "--kv-store")
    if start is None:
        yield Chosen((*flags, f"file://{directory}/kv"))
        return
    with start() as server:
        yield Chosen((*flags, server.url), server)


@contextlib.contextmanager
def _host(*, directory: Path) -> Iterator[Chosen]:
    yield Chosen(("--connector", "store", "--kv-host-memory", HOST_MEMORY_ALONE))


BACKENDS: dict[str, Callable[..., Choice]] = {
    **matrix_rows.BACKENDS,
    "store host": _host,
    "store mooncake": functools.partial(served, lambda: MooncakeServer(STORE_MIB << 20)),
    "store s3": functools.partial(served, S3Server),
    "tiers file": functools.partial(_tiers, "nixl", None),
    "tiers redis": functools.partial(_tiers, "p2p", RedisServer),
}
"""name -> (directory) -> the flags that choose it, while its server runs."""

HAVE_CONNECTIONS = (*matrix_rows.HAVE_CONNECTIONS, "store s3", "tiers redis")

DEADLINES = ("--kv-load-timeout-s", "2", "--lease-timeout-s", "4", "--rank-timeout-s", "2")

SEND_TIMEOUT_S = 3.0
CLIENTS = ("--send-timeout-s", f"{SEND_TIMEOUT_S:g}")

_STORE = ("lookup_timeout_s=0.5", "transfer_timeout_s=1.5", "layer_timeout_s=0.5")
_SERVER = (*_STORE, "operation_timeout_s=1", "connect_timeout_s=1")
_FILES = (*_STORE, f"capacity={STORE_MIB}MiB")
_P2P = ("timeout_s=1.5", "handshake_timeout_s=1", "idle_s=3")


def _of_store(options: Sequence[str]) -> list[str]:
    """Options of a child of `multi`."""
    return [f"store.{option}" for option in options]


OPTIONS: dict[str, Sequence[str]] = {
    "shared_memory": ("load_timeout_s=1",),
    **dict.fromkeys(("p2p", "p2p tcp"), _P2P),
    **dict.fromkeys((name for name in BACKENDS if name.startswith("nixl")), ("transfer_timeout_s=1.5",)),
    "shared_storage": _FILES,
    "store redis": _SERVER,
    "store lmcache": _SERVER,
    "store tiers": (*_FILES, "operation_timeout_s=1"),
    "multi": ("shared_memory.load_timeout_s=1", *_of_store(_FILES)),
    "store host": _STORE,
    "store mooncake": _SERVER,
    "store s3": _SERVER,
    "tiers file": ("transfer_timeout_s=1.5", *_of_store(_FILES)),
    "tiers redis": (*_P2P, *_of_store(_SERVER)),
}
assert set(OPTIONS) == set(BACKENDS)

HAVE_FILES = ("shared_storage", "store tiers", "multi", "tiers file")


def choose(name: str, directory: Path) -> Choice:
    """The backend's flags while its server runs; `extra_flags` come beside them."""
    return BACKENDS[name](directory=directory)


def extra_flags(name: str) -> list[str]:
    """Deadlines and bounds, and a look at what holds the router's event loop."""
    return [
        *DEADLINES,
        *CLIENTS,
        *WATCHDOG,
        *(word for option in OPTIONS[name] for word in ("--connector-config", option)),
    ]


def select(words: Sequence[str]) -> list[str]:
    """Backends by name, "_" for a space; a first word that is no name ("store", "nixl") means all that begin with it.
    Raises ValueError for others.
    """
    selected: list[str] = []
    for word in words:
        found = [name for name in BACKENDS if word in (name, name.replace(" ", "_"))]
        found = found or [name for name in BACKENDS if word == name.split()[0]]
        if not found:
            raise ValueError(f"no backend {word!r}; there are {', '.join(BACKENDS)}")
        selected += [name for name in found if name not in selected]
    return selected or list(BACKENDS)
