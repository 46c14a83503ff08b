"""Authentication and encryption of the control plane between hosts: CURVE, with keys that all derive from one secret.

The deployment's key file determines two key pairs, the engines' and the routers'. Without the file, a client cannot
even begin a handshake, since the engines' public key is never sent; and an engine cannot answer one.
"""

import copy
import hashlib
import hmac
import os
import stat
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from pdkv.errors import ConfigError

MIN_KEY_BYTES = 32
"""Minimum length as text; fewer characters could be guessed."""

_MAX_FILE_BYTES = 64 * 1024


class _Pair(NamedTuple):
    public: bytes
    secret: bytes  # both as Z85 texts


class ClusterKey:
    """The secret of the processes of one deployment. No `repr` shows it."""

    def __init__(self, secret: bytes) -> None:
        self._engines = _pair(secret, b"pdkv engines")
        self._routers = _pair(secret, b"pdkv routers")

    @classmethod
    def read(cls, path: Path) -> "ClusterKey":
        """The key in a file. Raises ConfigError."""
        return cls(_read_secret(path))

    def swapped(self) -> "ClusterKey":
        """The same secret for the opposite direction: a router listens, and engines connect."""
        other = copy.copy(self)
        other._engines, other._routers = self._routers, self._engines
        return other

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """Guard an engine's socket: only clients with the engines' public key get in, and only with a Doorkeeper that
        checks the routers'. Call it before bind.
        """
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._engines
        socket.setsockopt(zmq.ZAP_DOMAIN, b"pdkv")
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a Doorkeeper in the context, no connection is admitted

    def is_routers(self, public_key: bytes) -> bool:
        """Whether this is the routers' public key, as 32 bytes: a client that presents it has proven to own the private
        key.
        """
        return hmac.compare_digest(public_key, z85.decode(self._routers.public))

    def present(self, socket: "zmq.Socket[bytes]") -> None:
        """Prepare a router's socket to talk to engines that have the key. Call it before connect."""
        socket.curve_serverkey = self._engines.public
        socket.curve_publickey, socket.curve_secretkey = self._routers


def _pair(secret: bytes, whose: bytes) -> _Pair:
    private = z85.encode(hashlib.blake2b(secret, person=whose, digest_size=32).digest())
    return _Pair(zmq.curve_public(private), private)


def _read_secret(path: Path) -> bytes:
    """The file's text without surrounding spaces. Raises ConfigError, which never repeats any of it."""
    try:
        with path.expanduser().open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(_MAX_FILE_BYTES + 1).strip()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"the cluster key file {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    group = stat.S_IRGRP if status.st_uid == 0 != os.geteuid() else 0  # root chose it, as Kubernetes for its secrets
    if stat.S_IMODE(status.st_mode) & 0o077 & ~group:
        raise ConfigError(f"the cluster key file {path} is readable by other users: chmod 600 {path}")
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"the cluster key file {path} has more than {_MAX_FILE_BYTES} bytes")
    if len(data) < MIN_KEY_BYTES:
        raise ConfigError(
            f"the cluster key file {path} has {len(data)} bytes, but at least {MIN_KEY_BYTES} are needed: make one "
            f"with `openssl rand -hex 32 > {path}`"
        )
    return data
