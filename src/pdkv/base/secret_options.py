"""Options that are secrets: read from a file instead of a command line, and masked wherever text is shown."""

import os
import re
import stat
from pathlib import Path

from pdkv.errors import ConfigError

MAX_FILE_BYTES = 64 * 1024

STORE_SIGN_KEY = "PDKV_STORE_SIGN_KEY"
"""The environment variable of the secret that signs stored values; it has no flag."""

API_KEY = "PDKV_API_KEY"
"""The environment variable of the only key of a launch without a key file; it has no flag either."""

_URLS = re.compile(r"(?<=://)(?!/)[^\s'\"]+")  # file:///… has no user and no password
_NEXT_URL = re.compile(r"(,[a-z+]+://)")
_IN_QUERY = re.compile(r"(?<=[?&])(user(?:name)?|password)=[^&\s'\",]*", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """A text for logs and errors: credentials before the host of a URL, and passwords in its query, become ***.

    A user name and a password may contain characters that should have been quoted, such as "@", "/" and ",".
    """
    if "://" not in text and "?" not in text and "&" not in text:
        return text  # true of nearly every line
    return _IN_QUERY.sub(r"\1=***", _URLS.sub(_mask_users, text))


def _mask_users(urls: re.Match[str]) -> str:
    parts = _NEXT_URL.split(urls[0])
    return "".join(f"***@{part.rpartition('@')[2]}" if "@" in part else part for part in parts)


def has_secret(text: str) -> bool:
    """Whether `without_secrets` would mask anything."""
    return without_secrets(text) != text


def read_own_file(path: Path, what: str, max_bytes: int) -> str:
    """The text of a file that is writable only by its owner, this user or root. Raises ConfigError, which names it by
    `what`.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from None
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{what} {path} may be written by other users: make it yours, and chmod 600 {path}")
    if len(data) > max_bytes:
        raise ConfigError(f"{what} {path} has more than {max_bytes} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {path} is not UTF-8 text") from None


def read_option(value: str, where: str) -> str:
    """A connector option's value: the text itself, or for @FILE the file's content without its last line end.

    A literal "@" at the beginning is written twice.

    Raises:
        ConfigError: the file cannot be read, is too large or not text; `where` names the option.
    """
    if not value.startswith("@") or value.startswith("@@"):
        return value.removeprefix("@")
    path = Path(value[1:])
    try:
        with path.expanduser().open("rb") as file:  # which may be a pipe: the shell's <(command)
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise ConfigError(f"{where}: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: {path} is not UTF-8 text") from None
    except (RuntimeError, ValueError) as error:  # an unknown home directory; a name with a null byte
        raise ConfigError(f"{where}: {path}: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{where}: {path} has more than {MAX_FILE_BYTES} bytes: too long for an option's value")
    return text.rstrip("\r\n")
