"""Sources of engines' addresses that are looked at again and again: a file, and DNS (docs/membership.md)."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pdkv.base.clock import MONOTONIC
from pdkv.base.limits import clip
from pdkv.base.log_limit import LogLimit
from pdkv.errors import ConfigError
from pdkv.router.engines.address import check_engine_name, check_numeric, split_pool

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver

LOOK_S = 1.0
"""Seconds between looks at the file's inode, size and time: inotify sees neither network file systems nor the links
that Kubernetes exchanges.
"""

MAX_FILE_BYTES = 1 << 20

MIN_TTL_S, MAX_TTL_S = 1.0, 300.0
"""How long an answer of DNS is used at least and at most, whatever its TTL."""

RETRY_S = 2.0
"""Seconds until a DNS server that failed is asked again; as long as it fails, its last answer counts."""

EMPTY_S = 60.0
"""Seconds for which empty answers of DNS are not believed."""

DNS_TIMEOUT_S = 5.0

Propose = Callable[[Mapping[str, str]], None]
"""Called with all names by endpoint; empty: any. Raises ConfigError."""

logger = logging.getLogger(__name__)


async def watch_file(path: Path, propose: Propose) -> None:
    """Propose what the file has, and each new version of it. A broken one is logged, and changes nothing; one that is
    refused, since there would be too many, is proposed again and again.
    """
    seen: object = None
    is_refused = False
    while True:
        if (found := await asyncio.to_thread(_stamp, path)) != seen or is_refused:
            is_new, seen, is_refused = found != seen, found, False
            try:
                wanted = await asyncio.to_thread(read_engines, path)
                is_refused = True
                propose(wanted)
                is_refused = False
            except ConfigError as error:
                if is_new:
                    logger.error("engines stay as they were: %s", error)
        await MONOTONIC.pause(LOOK_S)


def _stamp(path: Path) -> object:
    try:
        status = path.stat()
    except OSError as error:
        return error.errno
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_engines(path: Path) -> dict[str, str]:
    """Names by endpoint of a file of lines NAME[@POOL]=tcp://ADDRESS:PORT. Raises ConfigError with the line."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--engines-file {path} cannot be read: {error}") from None
    if not data or len(data) > MAX_FILE_BYTES:
        raise ConfigError(
            f"--engines-file {path} has {len(data)} bytes, and 1 to {MAX_FILE_BYTES} were expected (for no engine, a "
            "line with #)"
        )
    found: dict[str, str] = {}
    names = set[str]()
    for number, line in enumerate(text.splitlines(), 1):
        name, _, endpoint = (part.strip() for part in line.partition("#")[0].partition("="))
        if not name and not endpoint:
            continue
        try:
            check_engine_name(split_pool(name)[0])
            check_numeric(endpoint)
        except ConfigError as error:
            raise ConfigError(f"--engines-file {path}, line {number}, {clip(line)!r}: {error}") from None
        if endpoint in found or split_pool(name)[0] in names:
            raise ConfigError(f"--engines-file {path}, line {number}: {clip(line)!r} is there twice")
        found[endpoint] = name
        names.add(split_pool(name)[0])
    return found


def split_dns_name(text: str) -> tuple[str, int | None]:
    """The name and the engines' port in NAME[:PORT][@POOL]; None: SRV records have it. Raises ConfigError."""
    name, colon, port = split_pool(text)[0].partition(":")
    if not name or (colon and not (port.isdecimal() and 1 <= int(port) < 65535)):
        raise ConfigError(f"a name in DNS was expected, with a port or of SRV records, got {text!r}")
    return name, int(port) if port else None


def make_resolver() -> "Resolver":
    """A resolver with the host's configuration. Raises ConfigError without the extra or such a configuration."""
    try:
        import dns.asyncresolver
        import dns.exception
    except ImportError:
        raise ConfigError("--engines-dns needs dnspython: pip install 'pdkv[dns]'") from None
    try:
        return dns.asyncresolver.Resolver()
    except dns.exception.DNSException as error:
        raise ConfigError(f"--engines-dns: this host has no resolver: {error}") from None


async def watch_dns(text: str, propose: Propose, resolver: "Resolver | None" = None) -> None:
    """Propose each answer for a name (`split_dns_name`); the next question follows when its TTL is over.

    The last good answer stays while servers fail, and for EMPTY_S of empty answers.
    """
    import dns.exception

    resolver = resolver or make_resolver()
    name, port = split_dns_name(text)
    log_limit, good_at, has_any = LogLimit(), MONOTONIC.now(), False
    while True:
        try:
            found, ttl_s = await _look_up(resolver, name, port)
        except (dns.exception.DNSException, OSError) as error:
            if log_limit.passes():
                logger.warning("--engines-dns %s: engines stay as they were: %s", text, error)
            await MONOTONIC.pause(RETRY_S)
            continue
        if found or not has_any or MONOTONIC.now() - good_at >= EMPTY_S:
            good_at, has_any = MONOTONIC.now(), bool(found)
            try:
                propose(dict.fromkeys(found, f"@{pool}" if (pool := split_pool(text)[1]) else ""))
            except ConfigError as error:
                logger.error("--engines-dns %s: engines stay as they were: %s", text, error)
        await MONOTONIC.pause(min(max(ttl_s, MIN_TTL_S), MAX_TTL_S))


async def _look_up(resolver: "Resolver", name: str, port: int | None) -> tuple[list[str], float]:
    """Endpoints, and how long they hold, in seconds. Raises DNSException, OSError."""
    if port is not None:
        addresses, ttl_s = await _ask(resolver, name, "A")
        return [f"tcp://{address}:{port}" for address in addresses], ttl_s
    services, ttl_s = await _ask(resolver, name, "SRV")
    looked_up = await asyncio.gather(*(_ask(resolver, service.split()[3], "A") for service in services))
    found = [
        f"tcp://{address}:{service.split()[2]}"
        for service, (addresses, _) in zip(services, looked_up, strict=True)
        for address in addresses
    ]
    return found, min([ttl_s, *(own_ttl_s for _, own_ttl_s in looked_up)])


async def _ask(resolver: "Resolver", name: str, kind: str) -> tuple[list[str], float]:
    """Records as text, and their TTL in seconds; none if there is no such name or record."""
    import dns.resolver

    try:
        answer = await resolver.resolve(name, kind, lifetime=DNS_TIMEOUT_S, search=True)
    except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
        return [], 0.0
    return sorted(record.to_text() for record in answer), float(answer.chaining_result.minimum_ttl)
