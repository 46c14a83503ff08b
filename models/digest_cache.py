"""A cache of weight files' digests: a private directory with one entry per path.

Nothing here is ever fatal: entries that cannot be trusted, read or written are ignored, and the digests are computed
again.
"""

import contextlib
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdkv.base.clock import unix_time
from pdkv.errors import ConfigError, MalformedMessage
from pdkv.host.file_lock import FileLock
from pdkv.host.private_directory import PrivateDirectory
from pdkv.models.weight_files import WeightFile
from pdkv.wire.decoding import decode_total

logger = logging.getLogger(__name__)

DIGEST_BYTES = 16
_VERSION = 1
_CHECKSUM_BYTES = 16
_MAX_OTHER_BYTES = 16 * 1024  # of an entry besides its digests
_MAX_FILES = 2048  # an entry has a lock beside it
_MAX_TEMPORARY_AGE_S = 3600.0  # of a file that its writer left behind


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    version: int
    path: str
    stamp: tuple[int, int, int, int, int]
    digests: list[bytes]  # of the tensors in the order of their bytes


_decoder = msgspec.msgpack.Decoder(_Entry)


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/pdkv/weights, or the same below ~/.cache. Raises RuntimeError if this user has no home."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "pdkv" / "weights"


class DigestCache:
    """An open cache directory, or none. Used by one thread at a time."""

    def __init__(self, directory: Path | None = None) -> None:
        """Open the user's cache, or the one in `directory`. A directory that others may write to, or that cannot be
        created, is not used.
        """
        self._directory: PrivateDirectory | None = None
        try:
            self._directory = PrivateDirectory(directory or cache_directory(), "cache of weight digests")
        except (ConfigError, RuntimeError) as error:
            logger.warning("%s; weight digests are not cached", error)

    def close(self) -> None:
        """Idempotent."""
        if self._directory is not None:
            self._directory.close()

    def keeps(self, file: WeightFile) -> bool:
        """Whether digests of this file can be kept: not while it is too young to be told from a later version."""
        return self._directory is not None and file.is_settled

    def get(self, file: WeightFile) -> list[bytes] | None:
        """The digests of the file's tensors, as it was when it was opened; None: they are not known."""
        try:
            data = self._read(_entry_name(file), limit=_MAX_OTHER_BYTES + 20 * len(file.tensors))
            body = data[_CHECKSUM_BYTES:]
            if _checksum(body) != data[:_CHECKSUM_BYTES]:
                return None
            entry = decode_total(_decoder, body)
        except (OSError, MalformedMessage):
            return None
        expected = (_VERSION, _path_text(file), tuple(file.stamp), len(file.tensors))
        found = (entry.version, entry.path, entry.stamp, len(entry.digests))
        whole = all(len(digest) == DIGEST_BYTES for digest in entry.digests)
        return entry.digests if whole and found == expected else None

    def put(self, file: WeightFile, digests: Sequence[bytes]) -> None:
        """Store the digests of an unchanged file, all or nothing."""
        directory = self._directory
        if directory is None or not self.keeps(file):
            return
        body = msgspec.msgpack.encode(_Entry(_VERSION, _path_text(file), file.stamp, list(digests)))
        try:
            directory.write(_entry_name(file), _checksum(body) + body)
            _prune(directory)
        except OSError as error:
            logger.info("the digests of %s are not cached: %s", file.path, error)

    def lock(self, file: WeightFile) -> FileLock | None:
        """A lock shared by all processes that compute digests of this path; None: it cannot be made."""
        if self._directory is None:
            return None
        name = f"{_entry_name(file)}.lock"
        try:
            with contextlib.suppress(FileExistsError):
                return FileLock(self._directory.create(name))
            fd = self._directory.open(name)
        except OSError:
            return None
        return None if fd is None else FileLock(fd)

    def _read(self, name: str, limit: int) -> bytes:
        """Empty: there is no such entry of this user, or one that is too long. Raises OSError."""
        fd = None if self._directory is None else self._directory.open(name)
        if fd is None:
            return b""
        with os.fdopen(fd, "rb") as entry:
            return entry.read(limit) if os.fstat(fd).st_size <= limit else b""


def _prune(directory: PrivateDirectory) -> None:
    """Delete the oldest of too many files, and what killed writers left. Raises OSError."""
    with directory.entries() as found:
        files = []
        for entry in found:
            with contextlib.suppress(FileNotFoundError):
                files.append((entry.stat(follow_symlinks=False).st_mtime, entry.name))
    files.sort(reverse=True)
    killed = unix_time() - _MAX_TEMPORARY_AGE_S
    overdue = [name for _, name in files[_MAX_FILES:]]
    overdue += [name for changed_s, name in files if name.startswith(".") and changed_s < killed]
    for name in overdue:
        directory.remove(name)


def _path_text(file: WeightFile) -> str:
    return os.fsencode(file.path).hex()  # a path need not be text


def _entry_name(file: WeightFile) -> str:
    return hashlib.blake2b(os.fsencode(file.path), digest_size=16).hexdigest()


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES, person=b"pdkv-digests").digest()
