"""API keys: a file of names, hashes and limits; requests carry a key, and the router finds its tenant.

A key is 32 random bytes, so its plain SHA-256 is safe at rest: it cannot be guessed, so a slow hash such as scrypt
would gain nothing, and would let strangers cost the router time.
"""

import hashlib
import logging
import os
import re
import secrets
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pdkv.base.clock import MONOTONIC
from pdkv.base.options import parse_size
from pdkv.base.secret_options import API_KEY, read_own_file
from pdkv.errors import ConfigError, Unauthorized
from pdkv.router.admission.tenants import ANONYMOUS, Grant, Tenant
from pdkv.wire.kv import MAX_KV_QUOTA_BYTES, MAX_KV_TTL_S, KVTerms

MAX_KEYS = 1024
"""The most keys in one file; each is a label of metrics."""

MAX_FILE_BYTES = 1 << 20

_PREFIX = "pdk_"
_MIN_KEY = 8
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
_Count = Annotated[int, Meta(ge=0, le=2**53)]

logger = logging.getLogger(__name__)


class _Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One [[key]] of the file; omitted fields take Grant's defaults."""

    name: Annotated[str, Meta(pattern=_NAME)]
    hash: Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
    weight: Annotated[float, Meta(gt=0.0, le=1e6)] = 1.0
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    max_requests: _Count = 0
    max_streams: _Count = 0
    requests_per_minute: _Count = 0
    tokens_per_minute: _Count = 0
    salt: Annotated[str, Meta(max_length=256)] = ""
    admin: bool = False
    fallback: bool = False
    models: tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...] = ()
    kv_ttl_s: Annotated[int, Meta(ge=0, le=MAX_KV_TTL_S)] = 0
    kv_quota: str | int | None = None  # a size

    @property
    def digest(self) -> bytes:
        """Hash of the key itself."""
        return bytes.fromhex(self.hash.removeprefix("sha256:"))

    @property
    def grant(self) -> Grant:
        """The key's Grant. A key without a salt of its own gets a secret one, which disappears with the key.

        Values stored under another time to live may be older than this one allows, and their age is not known. So the
        time to live is part of the salt, and values with another one are not found.
        """
        salt = self.salt or _digest_text(f"pdkv salt {self.hash}")
        return msgspec.structs.replace(
            msgspec.convert(self, Grant, from_attributes=True),
            best_priority=self.priority,
            salt=_digest_text(f"pdkv kv_ttl_s {self.kv_ttl_s} {salt}") if self.kv_ttl_s else salt,
            kv_terms=self._kv_terms(salt),
        )

    def _kv_terms(self, salt: str) -> KVTerms | None:
        """Terms of the key's KV. Keys with the same salt share their KV, and so a quota."""
        if not self.kv_ttl_s and self.kv_quota is None:
            return None
        digest = hashlib.blake2b(salt.encode(), digest_size=8, person=b"pdkv-kv-owner").digest()
        return KVTerms(int.from_bytes(digest) >> 1 or 1, self.kv_ttl_s or None, _read_quota(self.kv_quota))


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: list[_Key] = []


class KeyRing:
    """The keys of one file, or the one in the environment, and their tenants."""

    def __init__(self, path: Path | None, *, models: Collection[str] = ()) -> None:
        """Read the keys. `models`: names that keys may have; a warning says which others they name. Raises ConfigError
        if the file cannot be read or is invalid.
        """
        self._models = models
        self._path = path
        self._tenants: dict[str, Tenant] = {}
        self._by_digest: dict[bytes, Tenant] = {}
        self._blinding = secrets.token_bytes(32)
        self._take(read_keys(path) or [])

    @property
    def tenants(self) -> list[Tenant]:
        """All tenants currently in the file."""
        return list(self._tenants.values())

    def reload(self) -> None:
        """Read the file again. If it is invalid, the error is logged and the previous keys stay.

        Requests of a removed key run to their end; a tenant whose name stays keeps its counts.
        """
        try:
            keys = read_keys(self._path) or []
        except ConfigError as error:
            logger.error("the API keys stay as they are: %s", error)
            return
        before = set(self._tenants)
        self._take(keys)
        after = set(self._tenants)
        logger.info(
            "%d API keys are in force (new: %s; gone: %s)",
            len(after),
            ", ".join(sorted(after - before)) or "none",
            ", ".join(sorted(before - after)) or "none",
        )

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant whose key an Authorization header holds. Raises Unauthorized, which repeats nothing of the
        header.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("an API key is required: send it as the header 'Authorization: Bearer KEY'")
        tenant = self._by_digest.get(self._blind(_digest(key.strip())))
        if tenant is None:
            raise Unauthorized("the API key is not known")
        return tenant

    def _blind(self, digest: bytes) -> bytes:
        """The form in which a digest is looked up: a keyed hash, so that the time of a comparison reveals nothing about
        it.
        """
        return hashlib.blake2b(digest, key=self._blinding, digest_size=32).digest()

    def _take(self, keys: Iterable[_Key]) -> None:
        tenants, by_digest = {}, {}
        for key in keys:
            if self._models and (unknown := sorted({*key.grant.models}.difference(self._models))):
                known = ", ".join(self._models)
                logger.warning("the API key %s may use %s, which is not served; known: %s", key.name, unknown, known)
            tenant = self._tenants.get(key.name) or Tenant(key.name, key.grant, MONOTONIC.now)
            tenant.change(key.grant)
            tenants[key.name] = by_digest[self._blind(key.digest)] = tenant
        self._tenants, self._by_digest = tenants, by_digest


def read_keys(path: Path | None) -> list[_Key] | None:
    """The keys of a file, or the one in PDKV_API_KEY, which has admin rights; None: clients need no key.

    Raises:
        ConfigError: as in `read_key_file`; both are given; or a key is too short.
    """
    given = os.environ.get(API_KEY)
    if not given:
        return None if path is None else read_key_file(path)
    if path is not None:
        raise ConfigError(f"API keys are given both in {path} (--api-key-file) and in {API_KEY}: use only one of them")
    if len(given) < _MIN_KEY or not given.isascii() or not given.isprintable() or " " in given:
        raise ConfigError(f"{API_KEY} must have at least {_MIN_KEY} printable ASCII characters, no spaces among them")
    return [_Key(name="environment", hash=f"sha256:{_digest(given).hex()}", admin=True, fallback=True)]


def read_key_file(path: Path) -> list[_Key]:
    """The keys of a file. Raises ConfigError, which says where the fault is and never repeats a hash or a salt."""
    text = read_own_file(path, "the key file", MAX_FILE_BYTES)
    try:
        parsed = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"line \d+", str(error))
        raise ConfigError(f"the key file {path} is not TOML{f', {where[0]}' if where else ''}") from None
    try:
        keys = msgspec.convert(parsed, _File).key
    except msgspec.ValidationError as error:
        raise ConfigError(f"the key file {path}: {error}") from None
    return _checked(keys, path)


def _checked(keys: list[_Key], path: Path) -> list[_Key]:
    if not keys:
        raise ConfigError(f"the key file {path} has no [[key]]: add one with `pd key new NAME --append {path}`")
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"the key file {path} has {len(keys)} keys; at most {MAX_KEYS} are allowed")
    names = [key.name for key in keys]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"the key file {path} has two keys named {name!r}: names must be unique")
    if ANONYMOUS in names:
        raise ConfigError(
            f"the key file {path} has a key named {ANONYMOUS!r}, which is reserved for clients without a key"
        )
    hashes = [key.hash for key in keys]
    for key in keys:
        try:
            _read_quota(key.kv_quota)
        except ConfigError as error:
            raise ConfigError(f"the key file {path}: kv_quota of the key {key.name!r}: {error}") from None
        if hashes.count(key.hash) > 1:
            raise ConfigError(f"the key file {path} has the hash of key {key.name!r} twice")
    return keys


def _read_quota(quota: str | int | None) -> int | None:
    """A quota in bytes. Raises ConfigError for an invalid size."""
    size = None if quota is None else parse_size(str(quota))
    if size is not None and size > MAX_KV_QUOTA_BYTES:
        raise ConfigError(f"a size of at most {MAX_KV_QUOTA_BYTES} bytes was expected, got {quota!r}")
    return size


def make_key(name: str, *, admin: bool = False) -> tuple[str, str]:
    """A new key, and the lines that enter it in a key file.

    Raises:
        ConfigError: no such name.
    """
    if not re.match(_NAME, name) or name == ANONYMOUS:
        raise ConfigError(
            f"a key's name has 1 to 64 letters, digits, '.', '_' and '-', and is not {ANONYMOUS!r}; got {name!r}"
        )
    key = _PREFIX + secrets.token_urlsafe(32)
    lines = [
        "[[key]]",
        f'name = "{name}"',
        f'hash = "sha256:{_digest(key).hex()}"',
        f'salt = "{secrets.token_hex(16)}"',
        *(["admin = true"] if admin else []),
    ]
    return key, "\n".join(lines) + "\n"


def _digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
