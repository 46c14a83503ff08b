"""A directory with files that this process trusts: it belongs to this user, and only this user may write to it.

It is held open, and names are looked up in the open directory: redirecting its path later has no effect.
"""

import contextlib
import errno
import os
import secrets
import stat
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

from pdkv.errors import ConfigError

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_OPEN_FILE = os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO without a peer would wait for one
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_NO_FILE_OF_OURS = (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR, errno.EACCES, errno.EPERM)


class PrivateDirectory:
    """A private directory. Methods raise OSError unless stated otherwise. Threads may share it; close it only when no
    thread is in a call.
    """

    def __init__(self, path: str | Path, what: str) -> None:
        """The directory is created with mode 0700 if it is missing. `what` names it in messages, such as "file store".

        Raises:
            ConfigError: it cannot be made, read or written, is not this user's, others may write to it, or its path
                ends in a symbolic link.
        """
        self.path = str(Path(path))  # without a slash at its end, which would follow a link
        self._what = what
        self._lock = threading.Lock()
        try:
            if not os.path.lexists(self.path):
                os.makedirs(self.path, mode=0o700, exist_ok=True)
            self.fd = self._open()
            self._close = weakref.finalize(self, os.close, self.fd)
        except OSError as error:
            raise ConfigError(f"{what} {self.path}: {error.strerror}") from None

    def reopen_if_removed(self) -> None:
        """If the directory was removed, and there is a new one under its path, continue in that one.

        Raises:
            ConfigError: the new one is refused.
        """
        try:
            if os.fstat(self.fd).st_nlink:
                return
        except OSError as error:
            if error.errno != errno.ESTALE:  # on NFS
                raise
        with self._lock, contextlib.suppress(FileNotFoundError):
            again = self._open()
            os.dup2(
                again, self.fd, inheritable=False
            )  # at once for all threads, which use the descriptor's number in calls
            os.close(again)

    def is_file(self, name: str) -> bool:
        """Whether a regular file of this user has this name."""
        try:
            return _is_ours(os.stat(name, dir_fd=self.fd, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def open(self, name: str, flags: int = os.O_RDONLY) -> int | None:
        """A descriptor of this user's regular file; never waits.

        None: the name belongs to a link, FIFO, socket, device, directory or another user's file.

        Raises:
            FileNotFoundError: the name does not exist.
        """
        try:
            fd = os.open(name, flags | _OPEN_FILE, dir_fd=self.fd)
        except OSError as error:
            if error.errno in _NO_FILE_OF_OURS:
                return None
            raise
        if _is_ours(os.fstat(fd)):
            return fd
        os.close(fd)
        return None

    def create(self, name: str) -> int:
        """A descriptor of a new file, mode 0600, to be written. Raises FileExistsError."""
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN_FILE, 0o600, dir_fd=self.fd)

    def write(self, name: str, data: bytes) -> None:
        """Write a file with this name and content atomically; a failed write leaves nothing behind."""
        temporary = f".{name}-{secrets.token_hex(4)}"
        try:
            with os.fdopen(self.create(temporary), "wb") as file:
                file.write(data)
            self.rename(temporary, name)
        except OSError:
            self.remove(temporary)
            raise

    def rename(self, name: str, new_name: str) -> None:
        """Rename, atomically replacing an existing file."""
        os.rename(name, new_name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, name: str) -> None:
        """Remove a file if it exists; a directory only if it is empty."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):  # the latter on systems other than Linux
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=self.fd)

    @contextlib.contextmanager
    def entries(self) -> Iterator[Iterator[os.DirEntry[str]]]:
        """The entries of the directory. Their `stat` must not follow links."""
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.fd)  # with its own position
        try:
            with os.scandir(fd) as found:
                yield found
        finally:
            os.close(fd)

    def close(self) -> None:
        """Idempotent."""
        self._close()

    def _open(self) -> int:
        """Open the directory. Raises ConfigError for one that is not only this user's."""
        try:
            fd = os.open(self.path, _OPEN_DIRECTORY)
        except OSError:
            if os.path.islink(self.path):
                raise ConfigError(
                    f"{self._what} {self.path} is a symbolic link to {os.readlink(self.path)}, which may be "
                    "redirected: use the directory's own path"
                ) from None
            raise
        try:
            self._check(os.fstat(fd))
            if not os.access(".", os.R_OK | os.W_OK | os.X_OK, dir_fd=fd, effective_ids=True):
                raise PermissionError(errno.EACCES, "no permission to read and write")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check(self, status: os.stat_result) -> None:
        mode = stat.S_IMODE(status.st_mode)
        found = f"{self._what} {self.path} belongs to uid {status.st_uid} and has mode {mode:04o}"
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"{found}: it must belong to this user (uid {os.geteuid()}), because its files are trusted; "
                "chown it, or use another directory"
            )
        if mode & _WRITABLE_BY_OTHERS:
            raise ConfigError(
                f"{found}: others may write to it, but its files are trusted; chmod go-w it, or use a "
                "directory below it, which will be created for this user only"
            )


def _is_ours(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
