"""Cuts connections of another process: copies of its sockets are shut down, and both ends see them end."""

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Iterator

_PIDFD_GETFD = 438


def connections_of(pid: int) -> Iterator[socket.socket]:
    """Copies of a process's connected stream sockets, each closed behind its turn."""
    libc, pidfd = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    try:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/{pid}/fd/{entry}").startswith("socket:"):
                    continue
                fd = libc.syscall(_PIDFD_GETFD, pidfd, int(entry), 0)
                if fd < 0:
                    continue
                with socket.socket(fileno=fd) as connection:
                    connection.getpeername()
                    if connection.type == socket.SOCK_STREAM:
                        yield connection
    finally:
        os.close(pidfd)


def is_to_router(connection: socket.socket, engine: str) -> bool:
    """Whether it came in at the engine's endpoint."""
    name = connection.getsockname()
    return isinstance(name, str) and os.path.basename(name).startswith(engine)


def is_of_transfers(connection: socket.socket, engine: str) -> bool:
    """Whether it leads to another engine or to a store: by TCP, or to or from a socket with an abstract name, or to a
    named one of somebody else's.
    """
    if connection.family != socket.AF_UNIX:
        return True
    return bool(connection.getpeername()) or isinstance(connection.getsockname(), bytes)


def cut(pid: int, engine: str, which: Callable[[socket.socket, str], bool]) -> int:
    """Shut down both directions of those; returns how many."""
    num = 0
    for connection in connections_of(pid):
        if which(connection, engine):
            with contextlib.suppress(OSError):  # its peer was first
                connection.shutdown(socket.SHUT_RDWR)
            num += 1
    return num
