"""A stream between two ranks of one engine: whole messages, descriptors, a deadline on every wait.

The launcher makes the socket pairs. A rank that dies closes its ends, which the other one sees at once.
"""

import select
import socket
import struct
import threading
from collections.abc import Sequence

from pdkv.base.clock import MONOTONIC
from pdkv.errors import RankGone, RankTimeout

_LENGTH = struct.Struct("<Q")
_PIECE_BYTES = 1 << 20


class RankChannel:
    """One end of the stream. `send` may be called on any thread, the rest on one. `peer` names the other rank in
    errors.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        """Owns `sock`, a unix stream socket."""
        self.peer = peer
        self._socket = sock
        self._send_lock = threading.Lock()
        sock.setblocking(False)

    def fileno(self) -> int:
        """For poll sets; the other rank's end of stream is POLLHUP."""
        return self._socket.fileno()

    def send(self, message: bytes, timeout_s: float) -> None:
        """Send one message of any size.

        Raises:
            RankTimeout: the other rank does not read, and the stream is now broken.
            RankGone: it is gone.
        """
        deadline = MONOTONIC.now() + timeout_s
        with self._send_lock:
            for piece in (_LENGTH.pack(len(message)), memoryview(message)):
                self._send_all(memoryview(piece), deadline)

    def receive(self, timeout_s: float | None) -> bytearray:
        """The next message; `timeout_s` None: wait without a limit. Raises as `send`."""
        deadline = None if timeout_s is None else MONOTONIC.now() + timeout_s
        (size,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size, deadline))
        try:
            return self._receive_exactly(size, deadline)
        except RankTimeout:
            self.close()  # the next input would be the rest of this message
            raise

    def send_fds(self, fds: Sequence[int]) -> None:
        """Give the other rank copies of descriptors; a lone first message. Raises RankGone."""
        try:
            socket.send_fds(self._socket, [b"\0"], list(fds))
        except OSError as error:
            raise RankGone(f"{self.peer} is gone: {error.strerror}") from None

    def receive_fds(self, count: int, timeout_s: float) -> list[int]:
        """Receive the descriptors of `send_fds`. Raises as `send`."""
        self._wait(select.POLLIN, MONOTONIC.now() + timeout_s)
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, 1, count)
        except OSError as error:
            raise RankGone(f"{self.peer} is gone: {error.strerror}") from None
        if not data:
            raise RankGone(f"{self.peer} is gone")
        assert len(fds) == count, fds
        return fds

    def close(self) -> None:
        """Close this end, which the other rank sees. Idempotent."""
        self._socket.close()

    def _send_all(self, data: memoryview, deadline: float) -> None:
        while data:
            try:
                data = data[self._socket.send(data[:_PIECE_BYTES]) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:  # a broken pipe, a reset, or closed here
                raise RankGone(f"{self.peer} is gone: {error.strerror}") from None

    def _receive_exactly(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view, min(len(view), _PIECE_BYTES))
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            except OSError as error:
                raise RankGone(f"{self.peer} is gone: {error.strerror}") from None
            if not count:
                raise RankGone(f"{self.peer} is gone")
            view = view[count:]
        return data

    def _wait(self, event: int, deadline: float | None) -> None:
        poll = select.poll()
        try:
            poll.register(self._socket, event)
        except ValueError:
            raise RankGone(f"the channel to {self.peer} is closed") from None
        if not poll.poll(None if deadline is None else max(0.0, deadline - MONOTONIC.now()) * 1000):
            raise RankTimeout(f"{self.peer} did not answer in time")
