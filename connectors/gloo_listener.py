"""Gloo goes on to listen where a group has met, accepts whoever comes, and ends the process when no descriptor is left.

A group of two needs its listening socket until both have met, and never again: then it is taken away from it.
"""

import contextlib
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterable


def stop_listening(addresses: Iterable[bytes]) -> int:
    """Put a socket to which nobody can connect in the place of each that listens at one of these addresses.

    Gloo owns the descriptors, and will close them: so they stay open, and an `accept` on them finds nobody.

    Args:
        addresses: what Gloo has told its peers, in which the addresses are somewhere.

    Returns:
        How many there were.
    """
    told = list(addresses)
    found = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _listens_at(fd, told)]
    if found:
        with _deaf_socket() as deaf:
            for fd in found:
                os.dup2(deaf.fileno(), fd, inheritable=False)
    return len(found)


def _listens_at(fd: int, told: list[bytes]) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        with socket.socket(fileno=os.dup(fd)) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            host, port = copy.getsockname()[:2]
            packed = socket.inet_pton(copy.family, host)
    except OSError:  # closed meanwhile, by another thread
        return False
    gap = b"" if len(packed) == 4 else bytes(4)  # the flow of an IPv6 address
    address = struct.pack("=H", copy.family) + struct.pack("!H", port) + gap + packed
    return any(address in text for text in told)


def _deaf_socket() -> socket.socket:
    """A socket that listens, does not block, and whose name is gone."""
    deaf = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with tempfile.TemporaryDirectory(prefix="pdkv-") as directory:
            deaf.bind(os.path.join(directory, "s"))
            deaf.listen(0)
    except BaseException:
        with contextlib.suppress(OSError):
            deaf.close()
        raise
    return deaf
