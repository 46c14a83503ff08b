"""Options of stores, as texts from a URL's query or a connector's configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pdkv.config import parse_size
from pdkv.errors import ConfigError
from pdkv.option_types import parse_bool, parse_choice, parse_count, parse_seconds


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Options of one store; each store reads its own, see registry.py."""

    capacity: int | None = None  # bytes kept at most (memory: 1 GiB by default; file: no bound)
    connect_timeout_s: float = 2.0
    operation_timeout_s: float = 10.0  # one call, whatever the size of its batch
    ttl_s: float | None = None  # a value's life from its put on
    max_bytes_in_flight: int = 8 << 20  # asked for and not yet read, over all calls: what a server must buffer for us
    pipeline: int = 64  # most commands of one call ahead of their replies
    retry_after_s: float = 1.0  # tiers: how long one that failed is left alone
    ssl_ca_certs: str | None = None  # file of certificates that sign the server's; none: those of the system
    ssl_certfile: str | None = None  # this client's certificate, where the server asks for one
    ssl_keyfile: str | None = None
    ssl_cert_reqs: Literal["required", "optional", "none"] = "required"  # none: whoever answers is the server
    ssl_check_hostname: bool = True  # the certificate must name the URL's host


CONVERTERS: Mapping[str, Callable[[str], Any]] = {
    "capacity": parse_size,
    "connect_timeout_s": parse_seconds,
    "operation_timeout_s": parse_seconds,
    "ttl_s": parse_seconds,
    "max_bytes_in_flight": parse_size,
    "pipeline": parse_count,
    "retry_after_s": parse_seconds,
    "ssl_ca_certs": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_cert_reqs": parse_choice("required", "optional", "none"),
    "ssl_check_hostname": parse_bool,
}


def convert_options(texts: Mapping[str, str], where: str) -> dict[str, Any]:
    """Values of options whose names are known.

    Raises:
        ConfigError: a value that its converter refuses; `where` is named.
    """
    values: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            values[name] = CONVERTERS[name](text)
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"{where}: option {name}={text!r}: {error}") from None
    return values
