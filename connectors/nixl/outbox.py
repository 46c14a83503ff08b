"""Messages for a peer's doorbell: those that do not fit into it wait here, in order, without blocking a thread."""

import os
import threading
from collections import deque
from collections.abc import Callable

MAX_WAITING = 1024
MAX_WAITING_BYTES = 8 << 20
"""The most waiting messages to one peer, which may have been stopped."""

Content = bytes | Callable[[], bytes]
"""A message, or a function that makes it when its turn has come."""


class Outbox:
    """Thread-safe. Messages of several threads of this process are not interleaved.

    Args:
        fd: of the peer's pipe, non-blocking; closed by `close`.
        pack: makes the packets of a message, at least one.
    """

    def __init__(self, fd: int, pack: Callable[[bytes], list[bytes]]) -> None:
        self._fd = fd
        self._pack = pack
        self._lock = threading.Lock()  # guards the following; nothing waits while it is held
        self._closed = False
        self._waiting: deque[Content] = deque()
        self._num_bytes = 0  # of the encoded messages in `_waiting`
        self._packets: deque[bytes] = deque()  # the rest of a message whose first packets may be written

    def put(self, message: Content, *, alone: bool = False) -> bool:
        """Write a message after the waiting ones, or add it to them. `alone`: drop all other waiting messages.

        Returns:
            False: too many wait, or it is closed; the message is lost.

        Raises:
            OSError: the reader is gone.
        """
        with self._lock:
            if alone:
                self._waiting.clear()
                self._num_bytes = 0
            if self._closed or len(self._waiting) >= MAX_WAITING or self._num_bytes >= MAX_WAITING_BYTES:
                return False
            self._waiting.append(message)
            self._num_bytes += _size_of(message)
            self._flush()
            return True

    def flush(self) -> bool:
        """Write as many waiting messages as there is room for. Returns whether none is left. Raises OSError."""
        with self._lock:
            self._flush()
            return self._closed or not (self._packets or self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        with self._lock:
            return not (self._packets or self._waiting)

    def close(self) -> None:
        """Close; waiting messages are lost. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)

    def _flush(self) -> None:
        while not self._closed and (self._packets or self._waiting):
            if not self._packets:
                message = self._waiting.popleft()
                self._num_bytes -= _size_of(message)
                self._packets.extend(self._pack(message if isinstance(message, bytes) else message()))
            try:
                os.write(self._fd, self._packets[0])
            except BlockingIOError:
                return
            self._packets.popleft()


def _size_of(message: Content) -> int:
    return len(message) if isinstance(message, bytes) else 0
