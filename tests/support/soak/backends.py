"""The backends with deadlines that a soak can outlast, and stores that stay small."""

from collections.abc import Sequence
from pathlib import Path

from matrix_rows import BACKENDS, Choice

from soak.stalls import WATCHDOG

REQUEST_TIMEOUT_S = 10.0
STORE_MIB = 48

DEADLINES = ("--kv-load-timeout-s", "2", "--lease-timeout-s", "4", "--rank-timeout-s", "2")

SEND_TIMEOUT_S = 3.0
CLIENTS = ("--send-timeout-s", f"{SEND_TIMEOUT_S:g}")

_STORE = ("lookup_timeout_s=0.5", "transfer_timeout_s=1.5", "layer_timeout_s=0.5")
_SERVER = (*_STORE, "operation_timeout_s=1", "connect_timeout_s=1")
_FILES = (*_STORE, f"capacity={STORE_MIB}MiB")

OPTIONS: dict[str, Sequence[str]] = {
    "shared_memory": ("load_timeout_s=1",),
    **dict.fromkeys(("p2p", "p2p tcp"), ("timeout_s=1.5", "handshake_timeout_s=1", "idle_s=3")),
    **dict.fromkeys((name for name in BACKENDS if name.startswith("nixl")), ("transfer_timeout_s=1.5",)),
    "shared_storage": _FILES,
    "store redis": _SERVER,
    "store lmcache": _SERVER,
    "store tiers": (*_FILES, "operation_timeout_s=1"),
    "multi": ("shared_memory.load_timeout_s=1", *(f"store.{option}" for option in _FILES)),
}
assert set(OPTIONS) == set(BACKENDS)

HAVE_FILES = ("shared_storage", "store tiers", "multi")


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
    """Backends by name, "_" for a space, or by its first word ("store", "nixl"). Raises ValueError for others."""
    selected: list[str] = []
    for word in words:
        found = [name for name in BACKENDS if word in (name, name.replace(" ", "_"), name.split()[0])]
        if not found:
            raise ValueError(f"no backend {word!r}; there are {', '.join(BACKENDS)}")
        selected += [name for name in found if name not in selected]
    return selected or list(BACKENDS)
