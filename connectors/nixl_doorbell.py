"""Wakes a rank's message thread: NIXL has no descriptor to wait on for notifications.

Who has sent a notification to an agent on its host sends an empty datagram after it. A datagram means "look", nothing
else: one too many costs a look, and one that got lost is made up for by the slow polling of the message thread.
"""

import contextlib
import os
import select
import socket
import threading


class Doorbell:
    """A datagram socket in Linux's abstract name space, which has no file to be left behind; an eventfd for oneself."""

    def __init__(self) -> None:
        self.name = b"\0pdkv-nixl-" + os.urandom(16).hex().encode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.bind(self.name)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._closed = False

    def wait(self, timeout_s: float) -> bool:
        """Wait until somebody rings or wakes, and forget all of that so far. False: nobody did, or it is closed."""
        try:
            ready, _, _ = select.select([self._socket.fileno(), self._wake_fd], [], [], timeout_s)
        except (OSError, ValueError):  # closed
            return False
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        with contextlib.suppress(BlockingIOError):
            while self._socket.fileno() in ready:
                self._socket.recv(64)
        return bool(ready)

    def ring(self, name: bytes) -> None:
        """Wake the owner of another doorbell, if there is one; its buffer may be full, then it will look anyway."""
        with contextlib.suppress(OSError), self._lock:
            self._socket.sendto(b"", name)

    def wake(self) -> None:
        """Wake who waits here. Does not block, whatever its thread is doing."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Give the descriptors back, when nobody waits any more. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._socket.close()
            os.close(self._wake_fd)
