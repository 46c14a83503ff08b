"""A file without a name, such as a memfd or a pipe, that a process of this user holds open, and others open."""

import errno
import os
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
        """A descriptor of it. Nothing else is ever opened that a path may lead to, such as a device.

        Args:
            name: how the kernel's name of the file begins.

        Raises:
            FileNotFoundError: it is gone.
            OSError: it cannot be opened.
        """
        path = f"/proc/{self.pid}/fd/{self.fd}"
        gone = FileNotFoundError(errno.ENOENT, "it is another process or another file by now", path)
        if process_start_time(self.pid) != self.start_time:
            raise gone
        if not os.readlink(path).startswith(name):
            raise FileNotFoundError(errno.ENOENT, f"it is not {name}", path)
        fd = os.open(path, flags | os.O_CLOEXEC)
        if os.fstat(fd).st_ino != self.inode:
            os.close(fd)
            raise gone
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
