"""Values as safetensors files in a directory that several processes share."""

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from pdkv.base.clock import MONOTONIC, Clock, unix_time_ns
from pdkv.errors import ConfigError, StoreFull, StoreUnavailable
from pdkv.host.private_directory import PrivateDirectory
from pdkv.kv_store.base import Arrived, Buffer, Scattered, ScatteringStore
from pdkv.kv_store.connections import Deadline
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.value_file import ReadResult, read_value, write_value

_SUFFIX = ".safetensors"
_TEMPORARY_SUFFIX = ".tmp"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SCANS_PER_CAPACITY = 16


class FileStore(ScatteringStore):
    """A value is one file, named after its key's digest; the directory is the truth, whichever process writes to it.

    - A file is written under a temporary name and renamed: it exists whole or not at all. Nothing is synced: a file
      that a crash of the machine cut short is recognized by its size, removed, and counts as a miss. Other damage is
      detected by the reader, as with every store (connectors/store/envelope.py).
    - A writer holds a lock on its temporary file. A temporary file without a lock belonged to a dead writer; the next
      start removes it.
    - With a capacity the least recently used files go first, by their time of modification, which a hit renews. Each
      process counts what it writes and looks at the directory again after every 1/16 of the capacity: n processes
      exceed it by at most n/16.

    The deadline is checked between files; a file system that hangs holds the calling thread. Anything but a regular
    file of this user is a miss and is removed like a damaged value; nothing waits for it.
    """

    medium: ClassVar[str] = "disk"

    def __init__(self, directory: str | Path, options: StoreOptions | None = None, clock: Clock = MONOTONIC) -> None:
        """The directory is created (mode 0700) if it is missing, and cleaned of leftovers.

        Raises:
            ConfigError: it cannot be made, read or written, or others could write there (PrivateDirectory).
        """
        self._options = options or StoreOptions()
        self._clock = clock
        self._directory = PrivateDirectory(directory, "file store")
        self._where = f"file store {self._directory.path}"
        self._capacity = self._options.capacity
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # with a capacity: files, least recently used first
        self._num_bytes = 0
        self._changed: OrderedDict[str, int | None] | None = None  # while the directory is counted again
        self._written_since_scan = 0
        self._num_calls = 0  # under way
        self._closed = False
        self.num_damaged = 0  # values that were none; what was found in their place is removed
        self.num_evicted = 0
        try:
            self._sweep()
            if self._capacity is not None:
                self._scan()
        except OSError as error:
            self._directory.close()
            raise ConfigError(f"{self._where}: {error.strerror}") from error

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._io():
            return [self._directory.is_file(file_name(key)) for key in keys]

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        with self._io() as deadline:
            now = unix_time_ns()
            for index, (key, value) in enumerate(items):
                deadline.remaining()
                if not self._directory.is_file(file_name(key)):
                    self._write(key, value, now - index)
            self._touch([key for key, _ in items])

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._io():
            for key in keys:
                self._remove(file_name(key))

    def count_damaged(self) -> int:
        return self.num_damaged

    def close(self) -> None:
        with self._lock:
            self._closed = True
            in_use = self._num_calls > 0
        if not in_use:  # or `_end_call` does it
            self._directory.close()

    @contextlib.contextmanager
    def _io(self) -> Iterator[Deadline]:
        """A context with a call's deadline; an error of the system becomes a StoreError."""
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"{self._where} is closed")
            self._num_calls += 1
        try:
            self._directory.reopen_if_removed()
            yield Deadline(self._options.operation_timeout_s, self._where, self._clock)
        except OSError as error:
            kind = StoreFull if error.errno in _FULL else StoreUnavailable
            raise kind(f"{self._where}: {error.strerror}") from error
        except ConfigError as error:
            raise StoreUnavailable(str(error)) from error
        finally:
            self._end_call()

    def _end_call(self) -> None:
        """End a call; the last one of a store that was closed meanwhile closes the directory."""
        with self._lock:
            self._num_calls -= 1
            is_last = self._closed and not self._num_calls
        if is_last:
            self._directory.close()

    def _read_all(self, keys: Sequence[bytes], out: Sequence[Scattered], arrived: Arrived) -> list[bool]:
        with self._io() as deadline:
            now = unix_time_ns()
            found: list[bool] = []
            for index, (key, buffers) in enumerate(zip(keys, out, strict=True)):
                deadline.remaining()
                found.append(self._read(key, buffers, now - index, partial(arrived, index)))
            self._touch([key for key, is_found in zip(keys, found, strict=True) if is_found])
            return found

    def _read(self, key: bytes, out: Scattered, used_ns: int, arrived: Callable[[int], None]) -> bool:
        name = file_name(key)
        try:
            fd = self._directory.open(name)
        except FileNotFoundError:
            return False
        result: ReadResult = "damaged"
        if fd is not None:
            try:
                result = read_value(fd, key, out, arrived)
                if result == "whole" and self._capacity is not None:
                    os.utime(fd, ns=(used_ns, used_ns))
            finally:
                os.close(fd)
        if result == "damaged":
            self._remove(name)
            with self._lock:
                self.num_damaged += 1
        return result == "whole"

    def _write(self, key: bytes, value: Buffer, used_ns: int) -> None:
        self._make_room(len(value))
        name = file_name(key)
        fd, temporary = self._open_temporary()
        try:
            write_value(fd, key, value)
            os.utime(fd, ns=(used_ns, used_ns))
            size = os.fstat(fd).st_size
            self._directory.rename(temporary, name)
        except BaseException:
            self._directory.remove(temporary)
            raise
        finally:
            os.close(fd)
        if self._capacity is not None:
            with self._lock:
                self._written_since_scan += size
                self._count(name, size)

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Note that a batch was used: its first file is evicted last."""
        with self._lock:
            for name in map(file_name, reversed(keys)):
                if name in self._sizes:
                    self._count(name, self._sizes[name])

    def _open_temporary(self) -> tuple[int, str]:
        """A new file that is locked while it is open: its descriptor and name."""
        while True:
            name = f".{uuid.uuid4().hex}{_TEMPORARY_SUFFIX}"
            fd = self._directory.create(name)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    return fd, name
            except BlockingIOError:
                pass  # a sweep was faster: it takes the file for a dead writer's
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _sweep(self) -> None:
        """Remove the temporary files of writers that are gone."""
        with self._directory.entries() as entries:
            names = [entry.name for entry in entries if entry.name.endswith(_TEMPORARY_SUFFIX)]
        for name in names:
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                fd = self._directory.open(name, os.O_WRONLY)
                try:
                    if fd is not None:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._directory.remove(name)
                finally:
                    if fd is not None:
                        os.close(fd)

    def _scan(self) -> None:
        """Count the directory again: other processes write and remove too. Other calls go on meanwhile."""
        with self._lock:
            if self._changed is not None:
                return  # another thread does it
            self._changed = OrderedDict()
            self._written_since_scan = 0
        sizes: OrderedDict[str, int] | None = None
        try:
            sizes = self._list()
        finally:
            with self._lock:
                changed, self._changed = self._changed, None
                if sizes is not None:
                    self._sizes, self._num_bytes = sizes, sum(sizes.values())
                    for name, size in changed.items():
                        self._count(name, size)

    def _list(self) -> OrderedDict[str, int]:
        """The sizes of all files, least recently used first."""
        files: list[tuple[int, str, int]] = []
        with self._directory.entries() as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        files.append((status.st_mtime_ns, entry.name, status.st_size))
        return OrderedDict((name, size) for _, name, size in sorted(files))

    def _count(self, name: str, size: int | None) -> None:
        """Count a file that was written or used, or (None) is gone. Under the lock."""
        self._num_bytes += (size or 0) - self._sizes.pop(name, 0)
        if size is not None:
            self._sizes[name] = size
        if self._changed is not None:
            self._changed.pop(name, None)
            self._changed[name] = size

    def _make_room(self, size: int) -> None:
        """Remove least recently used files until `size` more bytes and a header fit."""
        if self._capacity is None:
            return
        size += 1024
        if size > self._capacity:
            raise StoreFull(f"{self._where}: {size} bytes do not fit into the capacity of {self._capacity}")
        if self._written_since_scan > self._capacity // _SCANS_PER_CAPACITY:
            self._scan()
        while (name := self._oldest_beyond(self._capacity - size)) is not None:
            self._remove(name)
            with self._lock:
                self.num_evicted += 1

    def _oldest_beyond(self, limit: int) -> str | None:
        with self._lock:
            return next(iter(self._sizes)) if self._sizes and self._num_bytes > limit else None

    def _remove(self, name: str) -> None:
        self._directory.remove(name)
        with self._lock:
            self._count(name, None)


def file_name(key: bytes) -> str:
    """The name of a key's file."""
    return hashlib.blake2b(key, digest_size=20).hexdigest() + _SUFFIX
