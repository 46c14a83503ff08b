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
    """A datagram socket in Linux's abstract name space, which has no file to be left behind."""

    def __init__(self) -> None:
        self.name = b"\0pdkv-nixl-" + os.urandom(16).hex().encode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.bind(self.name)
        self._lock = threading.Lock()

    def wait(self, timeout_s: float) -> bool:
        """Wait until somebody rings, and forget all rings so far. False: nobody did."""
        try:
            ready, _, _ = select.select([self._socket], [], [], timeout_s)
            while ready:
                self._socket.recv(64)
        except (BlockingIOError, InterruptedError):
            return True
        except (OSError, ValueError):  # closed
            return False
        return False

    def ring(self, name: bytes) -> None:
        """Wake the owner of another doorbell, if there is one; its buffer may be full, then it will look anyway."""
        with contextlib.suppress(OSError), self._lock:
            self._socket.sendto(b"", name)

    def wake(self) -> None:
        """Wake whoever waits at this one."""
        self.ring(self.name)

    def close(self) -> None:
        """Give the socket back. Idempotent."""
        with self._lock:
            self._socket.close()
