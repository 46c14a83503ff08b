"""Addresses of engines, which the launcher sends to the router at the start and later."""

import ipaddress
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from pdkv.base.limits import clip
from pdkv.base.options import TCP
from pdkv.errors import ConfigError

Role = Literal["prefill", "decode", "any"]


class EngineAddress(msgspec.Struct, frozen=True):
    """Where the router finds an engine."""

    name: str  # unique, such as "prefill-0"
    role: Role | Literal["fallback"]
    endpoint: str  # ipc:// or tcp://
    refusal: Path | None = None  # where a launcher writes why it keeps the engine out (RefusalNote)

    @property
    def source(self) -> str:
        """The source of the address: this launch, or other starters, on hosts that it was given."""
        return {"ipc": "launch", "tcp": "remote"}.get(self.endpoint.partition(":")[0], "backend")


_ENGINE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_engine_name(name: str, what: str = "an engine's name") -> None:
    """Raise ConfigError for an invalid name, or that of another deployment; `what` has it, as the error says."""
    if name == "fallback":
        raise ConfigError("no engine can be called fallback: that is another deployment's name (docs/fallback.md)")
    if not _ENGINE_NAME.fullmatch(name):
        raise ConfigError(f"{what} has 1 to 64 letters, digits, '-' and '_', such as decode-b0; got {name!r}")


def split_pool(text: str) -> tuple[str, str]:
    """What stands before @POOL, and the pool; "": none."""
    what, _, pool = text.partition("@")
    return what, pool


def read_split(given: Mapping[str, float | str], pools: Collection[str]) -> dict[str, float]:
    """Percent by pool. Raises ConfigError for what is no such number, unknown, or too much."""
    shares: dict[str, float] = {}
    for name, text in given.items():
        try:
            percent = float(text)
        except ValueError:
            percent = math.nan
        if name not in pools or not 0.0 <= percent <= 100.0:
            known = f"POOL=PERCENT, 0 to 100 of one of {', '.join(pools) or 'no pools (--pool)'}"
            raise ConfigError(f"split: {known} was expected, got {clip(f'{name}={text}')}")
        shares[name] = percent
    if sum(shares.values()) > 100.0:
        raise ConfigError(f"split: at most 100 percent in all was expected, got {shares}")
    return shares


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError for an endpoint that other hosts cannot reach. The highest port is left for the beats."""
    found = re.fullmatch(TCP, endpoint)
    if found is None or not 1 <= int(found[2]) < 65535:
        raise ConfigError(f"an address such as tcp://10.0.0.2:7000 was expected (ports 1 to 65534), got {endpoint!r}")


def check_numeric(endpoint: str) -> None:
    """Raise ConfigError for an endpoint that is not an IPv4 address and a port. ZeroMQ would look names up on the
    thread that moves all engines' messages.
    """
    check_endpoint(endpoint)
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        address = None
    if address is None or address.is_unspecified:
        raise ConfigError(f"the address of one host was expected, such as tcp://10.0.0.2:7000, got {endpoint!r}")
