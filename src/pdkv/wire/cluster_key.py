"""Authentication and encryption of the control plane between hosts: CURVE, with keys that all derive from one secret.

The deployment's key file makes two key pairs, the engines' and the routers'. Whoever does not have the file cannot even
begin a handshake, since the engines' public key is in nothing that is sent; and an engine that does not have it cannot
answer one.
"""

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
"""As a text; less would be guessed."""

_MAX_FILE_BYTES = 64 * 1024


class _Pair(NamedTuple):
    public: bytes
    secret: bytes  # both as Z85 texts


class ClusterKey:
    """What the processes of one deployment know and others do not. No `repr` shows it."""

    def __init__(self, secret: bytes) -> None:
        self._engines = _pair(secret, b"pdkv engines")
        self._routers = _pair(secret, b"pdkv routers")

    @classmethod
    def read(cls, path: Path) -> "ClusterKey":
        """The key in a file. Raises ConfigError."""
        return cls(_read_secret(path))

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """An engine's socket: nobody gets in without the engines' public key, nor without a Doorkeeper that looks at
        the routers'. Call it before bind.
        """
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._engines
        socket.setsockopt(zmq.ZAP_DOMAIN, b"pdkv")
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a Doorkeeper in the context nobody gets in

    def is_routers(self, public_key: bytes) -> bool:
        """Whether this is the routers' public key, as 32 bytes: whoever comes with it has proven to have the other."""
        return hmac.compare_digest(public_key, z85.decode(self._routers.public))

    def present(self, socket: "zmq.Socket[bytes]") -> None:
        """A router's socket: it speaks with engines that have the key. Call it before connect."""
        socket.curve_serverkey = self._engines.public
        socket.curve_publickey, socket.curve_secretkey = self._routers


def _pair(secret: bytes, whose: bytes) -> _Pair:
    private = z85.encode(hashlib.blake2b(secret, person=whose, digest_size=32).digest())
    return _Pair(zmq.curve_public(private), private)


def _read_secret(path: Path) -> bytes:
    """The file's text, less spaces around it. Raises ConfigError, which never repeats any of it."""
    try:
        with path.expanduser().open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(_MAX_FILE_BYTES + 1).strip()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"the cluster key file {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"the cluster key file {path} may be read by other users: chmod 600 {path}")
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"the cluster key file {path} has more than {_MAX_FILE_BYTES} bytes")
    if len(data) < MIN_KEY_BYTES:
        raise ConfigError(
            f"the cluster key file {path} has {len(data)} bytes, at least {MIN_KEY_BYTES} are needed: make one with "
            f"`openssl rand -hex 32 > {path}`"
        )
    return data
