"""A file without a name, such as a memfd or a pipe, that a process of this user holds open, and others open."""

import errno
import os
from functools import partial
from pathlib import Path

import msgspec

from pdkv.host.process_info import process_start_time

ADDRESS = ".memfd"
"""How the names of files with addresses of memfds end."""


class HeldFile(msgspec.Struct, frozen=True):
    """The address of such a file: /proc/PID/fd/FD, as long as that is still the same file of the same process."""

    pid: int
    start_time: int  # of the process: tells a pid that is used again
    fd: int
    inode: int

    def open(self, flags: int, name: str = "/memfd:") -> int:
        """A descriptor of it. Nothing else is ever opened that a path may lead to, such as a device; a named pipe that
        takes the place of the file at that moment is not waited for.

        Args:
            name: how the kernel's name of the file begins.

        Raises:
            FileNotFoundError: it is gone.
            OSError: it cannot be opened.
        """
        path, gone = f"/proc/{self.pid}/fd/{self.fd}", partial(FileNotFoundError, errno.ENOENT)
        start_time = process_start_time(self.pid)
        if start_time is None:
            raise gone(f"process {self.pid} is gone")
        if start_time != self.start_time:
            raise gone(
                f"process {self.pid} is another one now: start time {start_time}, {self.start_time} was expected"
            )
        if not (link := os.readlink(path)).startswith(name):
            raise gone(f"{path} is {link}, {name}... was expected")
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
        inode = os.fstat(fd).st_ino
        if inode != self.inode:
            os.close(fd)
            raise gone(f"{path} is another file now: inode {inode}, {self.inode} was expected")
        return fd


def held_here(fd: int) -> tuple[int, int, int, int]:
    """The fields of `HeldFile` for a descriptor of this process."""
    pid = os.getpid()
    start_time = process_start_time(pid)
    assert start_time is not None
    return pid, start_time, fd, os.fstat(fd).st_ino


def write_address(directory: Path, name: str, address: HeldFile) -> Path:
    """Name a memfd in a directory, where every name must be unique; returns the file with its address."""
    temporary = directory / f".{name}"
    temporary.write_bytes(msgspec.json.encode(address))
    return temporary.rename(directory / f"{name}{ADDRESS}")
