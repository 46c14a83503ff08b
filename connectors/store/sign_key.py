"""The secret that signs stored values: from a private file or the environment, never from a command line."""

import os
import stat

from pdkv.base.secret_options import STORE_SIGN_KEY
from pdkv.connectors.store.envelope import Sealer
from pdkv.errors import ConfigError

MIN_BYTES, MAX_BYTES = 16, 4096


def make_sealer(*, sign: bool, key_file: str) -> Sealer:
    """A sealer that makes checksums or, with `sign`, signatures.

    Raises:
        ConfigError: with `sign`, no secret, one that is too short, or a file that is not private to this user; or
            `key_file` given without `sign`.
    """
    if not sign:
        if key_file:
            raise ConfigError(f"connector option sign_key_file={key_file} needs sign=true")
        return Sealer()
    if key_file:
        return Sealer(_checked(_read_private(key_file), key_file))
    if secret := os.environ.get(STORE_SIGN_KEY):
        return Sealer(_checked(secret.encode(), STORE_SIGN_KEY))
    raise ConfigError(
        f"connector option sign=true requires a secret: sign_key_file=PATH or the environment variable {STORE_SIGN_KEY}"
    )


def _checked(secret: bytes, where: str) -> bytes:
    if len(secret) < MIN_BYTES:
        raise ConfigError(f"{where}: the secret must have at least {MIN_BYTES} bytes, got {len(secret)}")
    return secret


def _read_private(path: str) -> bytes:
    """A file's content without the end of its last line."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is refused below, not waited for
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path}: the file of a secret must be a regular file")
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise ConfigError(
                    f"{path}: only its owner may have access to a secret: it belongs to user {status.st_uid} and has "
                    f"mode {stat.S_IMODE(status.st_mode):04o}; chown it to user {os.geteuid()} and chmod it to 0600"
                )
            secret = os.read(fd, MAX_BYTES + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if len(secret) > MAX_BYTES:
        raise ConfigError(f"{path}: more than {MAX_BYTES} bytes: too long for a secret")
    return secret.rstrip(b"\r\n")
