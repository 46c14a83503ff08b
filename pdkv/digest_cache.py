"""Digests of weight files that were taken before: a private directory with one entry per path.

Nothing here is ever fatal: what cannot be trusted, read or written is ignored, and the digests are taken again.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pdkv.file_lock import FileLock
from pdkv.weight_files import Stamp, WeightFile

logger = logging.getLogger(__name__)

DIGEST_BYTES = 16
_VERSION = 1
_CHECKSUM_BYTES = 16
_MAX_OTHER_BYTES = 16 * 1024  # of an entry besides its digests
_MAX_ENTRIES = 1024
_MAX_TEMPORARY_AGE_S = 3600.0  # of a file that its writer left behind
_MIN_AGE_S = 2.0
"""A file that was changed so recently may be changed again within one tick of its clock, and look the same."""


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
    """An open cache directory, or none; a context manager. Used by one thread."""

    def __init__(self, fd: int) -> None:
        """`fd`: of a directory that is this user's alone; negative: nothing is found or kept."""
        self._fd = fd

    @classmethod
    def open(cls, directory: Path | None = None) -> "DigestCache":
        """The user's cache, or that of `directory`. A directory that others could write to or own is not used."""
        try:
            directory = directory or cache_directory()
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (OSError, RuntimeError) as error:
            logger.info("digests of weights are not kept: %s", error)
            return cls(-1)
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            logger.warning(
                "%s is not used: it belongs to user %d with mode %o, user %d with mode 700 was expected; remove it",
                directory, status.st_uid, stat.S_IMODE(status.st_mode), os.geteuid(),
            )  # fmt: skip
            os.close(fd)
            return cls(-1)
        return cls(fd)

    def __enter__(self) -> "DigestCache":
        return self

    def __exit__(self, *_: object) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def keeps(self, file: WeightFile) -> bool:
        """Whether digests of this file can be kept: not while it is too young to be told from a later version."""
        return self._fd >= 0 and file.opened_at - file.stamp.ctime_ns / 1e9 > _MIN_AGE_S

    def get(self, file: WeightFile) -> list[bytes] | None:
        """The digests of the file's tensors as it was when it was opened."""
        if self._fd < 0:
            return None
        try:
            data = self._read(_entry_name(file), limit=_MAX_OTHER_BYTES + 20 * len(file.tensors))
            body = data[_CHECKSUM_BYTES:]
            if _checksum(body) != data[:_CHECKSUM_BYTES]:
                return None
            entry = _decoder.decode(body)
        except (OSError, msgspec.DecodeError, UnicodeError):
            return None
        expected = (_VERSION, _path_text(file), tuple(file.stamp), len(file.tensors))
        found = (entry.version, entry.path, entry.stamp, len(entry.digests))
        whole = all(len(digest) == DIGEST_BYTES for digest in entry.digests)
        return entry.digests if whole and found == expected else None

    def put(self, file: WeightFile, digests: Sequence[bytes]) -> None:
        """Keep what was taken of an unchanged file, all or nothing."""
        if not self.keeps(file):
            return
        stamp: Stamp = file.stamp
        body = msgspec.msgpack.encode(_Entry(_VERSION, _path_text(file), tuple(stamp), list(digests)))
        name = _entry_name(file)
        temporary = f".{name}-{secrets.token_hex(4)}"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
            try:
                with os.fdopen(fd, "wb") as out:
                    out.write(_checksum(body) + body)
                os.replace(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            except OSError:
                os.unlink(temporary, dir_fd=self._fd)
                raise
            self._prune()
        except OSError as error:
            logger.info("digests of %s are not kept: %s", file.path, error)

    def lock(self, file: WeightFile) -> FileLock | None:
        """A lock that all who take digests of this path respect; None: there can be none."""
        if self._fd < 0:
            return None
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            return FileLock(os.open(f"{_entry_name(file)}.lock", flags, 0o600, dir_fd=self._fd))
        except OSError:
            return None

    def _read(self, name: str, limit: int) -> bytes:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with os.fdopen(os.open(name, flags, dir_fd=self._fd), "rb") as entry:
            status = os.fstat(entry.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size > limit:
                raise OSError(f"{name} is no entry of this user")
            return entry.read(limit)

    def _prune(self) -> None:
        """Delete the oldest entries of too many, and what killed writers left."""
        entries = sorted(self._names(), reverse=True)
        overdue = [name for _, name in entries[2 * _MAX_ENTRIES :]]  # each may have a lock beside it
        killed = time.time() - _MAX_TEMPORARY_AGE_S
        overdue += [name for changed_s, name in entries if name.startswith(".") and changed_s < killed]
        for name in overdue:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._fd)

    def _names(self) -> Iterator[tuple[float, str]]:
        """(time of the last change, name) of each file."""
        with os.scandir(self._fd) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    yield entry.stat(follow_symlinks=False).st_mtime, entry.name


def _path_text(file: WeightFile) -> str:
    return os.fsencode(file.path).hex()  # a path need not be text


def _entry_name(file: WeightFile) -> str:
    return hashlib.blake2b(os.fsencode(file.path), digest_size=16).hexdigest()


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES, person=b"pdkv-digests").digest()
