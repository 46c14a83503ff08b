"""Stores by URL. A scheme's module is imported when it is used."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.base.options import OptionTexts
from pdkv.base.registry import Registry
from pdkv.base.secret_options import without_secrets
from pdkv.errors import ConfigError
from pdkv.kv_store.base import KVStore
from pdkv.kv_store.options import StoreOptions

STORES: Registry[KVStore] = Registry("store", "pdkv.kv_stores", {}, "pdkv.kv_store.base:KVStore")
"""Third-party stores by the schemes of their URLs; their class is made with the address alone."""

_NEXT_URL = re.compile(r",(?=[a-z][a-z0-9+]*://)")  # a path may have commas of its own
_TIER_OPTIONS = frozenset({"retry_after_s", "write"})
_SERVER_OPTIONS = frozenset({"connect_timeout_s", "operation_timeout_s", "max_bytes_in_flight", "pipeline"})
_TLS_OPTIONS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"})


class _Scheme(NamedTuple):
    open: Callable[[SplitResult, StoreOptions, Clock], KVStore]
    options: frozenset[str]


class _Part(NamedTuple):
    """One URL, split, with its scheme and options."""

    scheme: _Scheme
    parts: SplitResult
    options: StoreOptions


class StorePlan(NamedTuple):
    """Stores that can be opened: their URLs and options are valid."""

    parts: Sequence[_Part]
    retry_after_s: float

    def open(self, clock: Clock = MONOTONIC) -> KVStore:
        """The store, with deadlines by `clock`; several URLs make a TieredStore.

        Raises:
            ConfigError: an invalid address, or a package that is not installed.
        """
        stores: list[KVStore] = []
        try:
            for part in self.parts:
                stores.append(part.scheme.open(part.parts, part.options, clock))
        except BaseException:
            for store in stores:
                store.close()
            raise
        if len(stores) == 1:
            return stores[0]
        from pdkv.kv_store.tiers import TieredStore

        write = [part.options.write for part in self.parts]
        return TieredStore(stores, self.retry_after_s, write=write, clock=clock)


def open_store(url: str, options: Mapping[str, str] | None = None) -> KVStore:
    """The store that a URL names; several URLs, separated by commas, make a TieredStore, fastest first.

    memory://[name], host:///directory, file:///directory, redis://[user:password@]host:port/db (rediss:// with TLS),
    unix:///socket (or redis+unix://), lmcache://host:port, mooncake://host:port, s3://bucket/prefix (gs://, az://),
    or a scheme for which an installed package has an entry point in `pdkv.kv_stores`. Options are given in `options`,
    for all URLs that know them, or in a URL's query; `write` is for all but the first.

    Raises:
        ConfigError: an unknown scheme or option, an invalid value, or a package that is not installed.
    """
    return plan_store(url, options or {}).open()


def plan_store(url: str, options: Mapping[str, Any]) -> StorePlan:
    """The plan of what `open_store` would open. Raises ConfigError for an unknown scheme or option, or an invalid
    value.
    """
    urls = _NEXT_URL.split(url)
    schemes = [_scheme_of(part) for part in urls]
    if len(urls) == 1:
        parts = [_read_url(url, schemes[0], options, others=frozenset())]
        _check_policies(parts)
        return StorePlan(parts, parts[0].options.retry_after_s)
    known = _TIER_OPTIONS.union(*(scheme.options for scheme in schemes))
    common = StoreOptions.parse(OptionTexts(options, without_secrets(url)), only=known)
    of_first = {name: text for name, text in options.items() if name != "write"}
    parts = [
        _read_url(part, scheme, options if place else of_first, others=known)
        for place, (part, scheme) in enumerate(zip(urls, schemes, strict=True))
    ]
    _check_policies(parts)
    return StorePlan(parts, common.retry_after_s)


def _check_policies(parts: Sequence[_Part]) -> None:
    """Raise ConfigError if a value could be written nowhere, or a tier could never get any."""
    first, *others = parts
    policies = {part.options.write for part in others}
    if first.options.write != "all":
        raise ConfigError(
            f"{first.parts.scheme}://: write={first.options.write} is for tiers behind the first one, which takes all: "
            "put host:// or file:// in front, such as by --kv-host-memory"
        )
    if policies - {"all"} and first.parts.scheme == "memory":
        raise ConfigError(
            "write: the first tier, which takes everything, must be one that other processes see, not memory://"
        )
    if "evicted" in policies and first.parts.scheme != "host":
        raise ConfigError(f"write=evicted stores what host:// evicts, but the first tier is {first.parts.scheme}://")


def _read_url(url: str, scheme: _Scheme, common: Mapping[str, Any], *, others: Collection[str]) -> _Part:
    """Read a URL. `others`: common options that belong to other URLs if this one does not know them."""
    where = without_secrets(url)
    parts = urlsplit(url)
    try:
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        parts.port  # noqa: B018  raises ValueError
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    known = scheme.options | ({"write"} if others or "write" in query else set())
    texts = {name: text for name, text in common.items() if name in known or name not in others} | query
    return _Part(scheme, parts, StoreOptions.parse(OptionTexts(texts, where), only=known))


def _scheme_of(url: str) -> _Scheme:
    name, separator, _ = url.partition("://")
    if separator and name in _SCHEMES:
        return _SCHEMES[name]
    others = STORES.targets()
    if separator and name in others:
        return _Scheme(partial(_open_other, name), frozenset())
    known = ", ".join(f"{scheme}://" for scheme in {**_SCHEMES, **others})
    raise ConfigError(f"no store {without_secrets(url)!r}; known: {known}")


def _make(target: str, *args: Any, **kwargs: Any) -> KVStore:
    """A store of a class of this package, "module:Class", which is imported now."""
    store: KVStore = resolve_name(f"pdkv.kv_store.{target}")(*args, **kwargs)
    return store


def _path_of(parts: SplitResult) -> str:
    if parts.netloc or not parts.path.strip("/"):
        found = f"{parts.scheme}://{parts.netloc}{parts.path}"
        raise ConfigError(f"{found}: an absolute path was expected: {parts.scheme}:///directory")
    return unquote(parts.path)


def _server_of(parts: SplitResult) -> tuple[str, int]:
    if not parts.hostname or parts.port is None or parts.path.strip("/"):
        raise ConfigError(f"{parts.scheme}://{parts.netloc}{parts.path}: {parts.scheme}://host:port was expected")
    return parts.hostname, parts.port


def _open_redis(parts: SplitResult, options: StoreOptions, clock: Clock) -> KVStore:
    if parts.scheme.endswith("unix"):
        url = f"unix://{parts.netloc}{parts.path}"
    elif re.fullmatch(r"/?|/\d+", parts.path):
        url = parts._replace(query="").geturl()
    else:  # redis-py would take database 0
        raise ConfigError(f"{without_secrets(parts.geturl())}: {parts.scheme}://host:port/db was expected, db a number")
    return _make("redis_store:RedisStore", url, options, clock=clock)


def _open_objects(parts: SplitResult, options: StoreOptions, clock: Clock) -> KVStore:
    if not parts.netloc or "@" in parts.netloc:
        raise ConfigError(
            f"{without_secrets(parts.geturl())}: {parts.scheme}://bucket/prefix was expected; credentials come from "
            "the environment, such as AWS_ACCESS_KEY_ID"
        )
    return _make("object_store:ObjectStore", parts._replace(query="").geturl(), options)


def _open_other(name: str, parts: SplitResult, options: StoreOptions, clock: Clock) -> KVStore:
    make: Callable[[str], KVStore] = STORES.load(name)
    return make(unquote(parts.netloc + parts.path))


_SCHEMES: Mapping[str, _Scheme] = {
    "memory": _Scheme(
        lambda parts, options, clock: _make("memory_store:MemoryStore", parts.netloc + parts.path, options.capacity),
        frozenset({"capacity"}),
    ),
    "host": _Scheme(
        lambda parts, options, clock: _make("host_store:HostStore", _path_of(parts), options, clock=clock),
        frozenset({"capacity", "segment"}),
    ),
    "file": _Scheme(
        lambda parts, options, clock: _make("file_store:FileStore", _path_of(parts), options, clock=clock),
        frozenset({"capacity", "operation_timeout_s"}),
    ),
    "redis": _Scheme(_open_redis, _SERVER_OPTIONS | {"ttl_s"}),
    "rediss": _Scheme(_open_redis, _SERVER_OPTIONS | {"ttl_s"} | _TLS_OPTIONS),
    "redis+unix": _Scheme(_open_redis, _SERVER_OPTIONS | {"ttl_s"}),
    "unix": _Scheme(_open_redis, _SERVER_OPTIONS | {"ttl_s"}),
    "lmcache": _Scheme(
        lambda parts, options, clock: _make("lmcache_store:LMCacheStore", *_server_of(parts), options, clock),
        _SERVER_OPTIONS,
    ),
    "mooncake": _Scheme(
        lambda parts, options, clock: _make("mooncake_store:MooncakeStore", *_server_of(parts), options, clock),
        (_SERVER_OPTIONS - {"pipeline"}) | {"metadata_server"},
    ),
    "s3": _Scheme(_open_objects, _SERVER_OPTIONS | {"endpoint", "region"}),
    "gs": _Scheme(_open_objects, _SERVER_OPTIONS),
    "az": _Scheme(_open_objects, _SERVER_OPTIONS | {"endpoint"}),
}
assert all(scheme.options <= StoreOptions.names() for scheme in _SCHEMES.values())
