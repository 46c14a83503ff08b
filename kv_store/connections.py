"""Sockets to a store's server: every wait ends at a deadline, bytes are read into their destination, and lost
connections are replaced.
"""

import itertools
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.errors import StoreReadOnly, StoreTimeout, StoreUnavailable
from pdkv.kv_store.base import PART_BYTES, Buffer

T = TypeVar("T")
C = TypeVar("C", bound="Channel")

_LINE_BUFFER_BYTES = 16 * 1024  # what is read ahead of a value is copied once more: small beside a value
_SKIP_BYTES = 1 << 20
_RECORD_BYTES = 16 * 1024  # of TLS, at most
_MAX_BUFFERS_PER_CALL = 512  # of sendmsg; the kernel takes 1024


class Deadline:
    """A deadline shared by all waits of one call."""

    def __init__(self, seconds: float, what: str, clock: Clock = MONOTONIC) -> None:
        self._clock = clock
        self._end = clock.now() + seconds
        self._message = f"{what}: no answer within {seconds:g} s"

    def remaining(self) -> float:
        """Seconds left, more than 0.

        Raises:
            StoreTimeout: no time is left.
        """
        left = self._end - self._clock.now()
        if left <= 0:
            raise StoreTimeout(self._message)
        return left

    def wait(self, condition: threading.Condition) -> None:
        """Wait until the (held) condition is notified. Raises as `remaining` if no time is left."""
        self.remaining()
        self._clock.wait(condition, self._end)


class Channel:
    """One connected socket. Not thread-safe; after an error it cannot be used.

    All methods raise StoreTimeout at the deadline and StoreUnavailable when the connection is gone.
    """

    def __init__(self, sock: socket.socket, what: str, *, owner: object = None, quick_ack: bool = False) -> None:
        """`what` names the server in messages; `owner` is kept alive as long as the channel.

        `quick_ack`: for a TCP server that leaves Nagle's algorithm on; it would wait 40 ms for a delayed one.
        """
        self.deadline = Deadline(0, what)
        self._sock = sock
        self._what = what
        self._owner = owner
        self._quick_ack = quick_ack
        self._ahead = memoryview(bytearray(_LINE_BUFFER_BYTES))
        self._start = self._stop = 0  # what was read ahead: _ahead[_start:_stop]

    def send(self, buffers: Sequence[bytes | Buffer]) -> None:
        """Send buffers one after the other, without joining them."""
        pending = [memoryview(buffer) for buffer in buffers if len(buffer)]
        if isinstance(self._sock, ssl.SSLSocket):
            self._send_records(pending)
            return
        first = 0
        while first < len(pending):
            sent = self._wait(lambda: self._sock.sendmsg(pending[first : first + _MAX_BUFFERS_PER_CALL]))  # noqa: B023
            while first < len(pending) and sent >= len(pending[first]):
                sent -= len(pending[first])
                first += 1
            if sent:
                pending[first] = pending[first][sent:]

    def _send_records(self, pending: Sequence[Buffer]) -> None:
        """With TLS there is no `sendmsg`, and each call makes a record: what is short is joined first."""
        for is_short, run in itertools.groupby(pending, lambda buffer: len(buffer) < _RECORD_BYTES):
            for data in [memoryview(b"".join(run))] if is_short else run:
                while len(data):
                    data = data[self._wait(lambda: self._sock.send(data)) :]  # noqa: B023

    def read_line(self) -> bytes:
        """The next line, without its CR LF."""
        while True:
            line, newline, _ = bytes(self._ahead[self._start : self._stop]).partition(b"\n")
            if newline:
                self._start += len(line) + 1
                return line.rstrip(b"\r")
            if len(line) == _LINE_BUFFER_BYTES:
                raise StoreUnavailable(f"{self._what}: its answer is not a line")
            self._read_ahead()

    def read_exactly(self, size: int) -> bytes:
        """The next `size` bytes."""
        buffer = bytearray(size)
        self.read_into(memoryview(buffer))
        return bytes(buffer)

    def read_into(self, out: Buffer, arrived: Callable[[int], None] = lambda stop: None) -> None:
        """Fill `out` with the next bytes, which come from the socket without a copy except for those already read
        ahead.

        `arrived(stop)` is called after at most PART_BYTES each.
        """
        done = min(self._stop - self._start, len(out))
        out[:done] = self._ahead[self._start : self._start + done]
        self._start += done
        while done < len(out):
            done += self._receive(out[done : done + PART_BYTES])
            arrived(done)

    def skip(self, size: int) -> None:
        """Discard the next `size` bytes."""
        ahead = min(self._stop - self._start, size)
        self._start += ahead
        size -= ahead
        scratch = memoryview(bytearray(min(size, _SKIP_BYTES)))
        while size:
            size -= self._receive(scratch[:size])

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._sock.close()

    def interrupt(self) -> None:
        """End the connection from another thread: a waiting thread gets StoreUnavailable."""
        try:
            # Not that of SSLSocket, which would have its reader go on as if there were no TLS.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            return  # it is closed or lost already

    def _read_ahead(self) -> None:
        if self._start:
            left = self._stop - self._start
            self._ahead[:left] = self._ahead[self._start : self._stop]
            self._start, self._stop = 0, left
        self._stop += self._receive(self._ahead[self._stop :])

    def _receive(self, out: Buffer) -> int:
        received = self._wait(lambda: self._sock.recv_into(out))
        if received == 0:
            raise StoreUnavailable(f"{self._what} closed the connection")
        if self._quick_ack:  # the kernel falls back by itself
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return received

    def _wait(self, call: Callable[[], int]) -> int:
        self._sock.settimeout(self.deadline.remaining())
        try:
            return call()
        except TimeoutError:
            self.deadline.remaining()  # raises
            raise StoreTimeout(f"{self._what} did not answer") from None
        except OSError as error:
            raise StoreUnavailable(f"{self._what}: {error}") from error


class ConnectionPool(Generic[C]):
    """Channels to one server: as many as there are concurrent calls."""

    def __init__(self, connect: Callable[[Deadline], C], what: str) -> None:
        """`connect` opens a channel until the deadline; it raises StoreTimeout or StoreUnavailable."""
        self._connect = connect
        self._what = what
        self._lock = threading.Lock()
        self._idle: list[C] = []
        self._busy: set[C] = set()
        self._closed = False
        self._num_hang_ups = 0

    def run(self, operation: Callable[[C], T], deadline: Deadline) -> T:
        """Run an idempotent operation on a channel.

        A connection that was lost while idle, or that leads to a server no longer the master, is replaced once without
        an error, unless this side hung up. The other idle connections are then probably lost, too, and are closed.

        Raises:
            StoreTimeout: it is not done by the deadline.
            StoreUnavailable: no connection, a lost one, or the pool is closed.
            StoreReadOnly: a new connection does not allow the operation, either.
        """
        number = self._num_hang_ups
        if (channel := self._take_idle(number)) is not None:
            try:
                return self._run_on(channel, operation, deadline, number)
            except (StoreUnavailable, StoreReadOnly):
                self._check_open(number)
        return self._run_on(self._connect(deadline), operation, deadline, number)

    def close(self) -> None:
        """Close all channels; running calls raise StoreUnavailable. Idempotent."""
        with self._lock:
            self._closed = True
        self.hang_up()

    def hang_up(self) -> None:
        """Close all channels; running calls raise StoreUnavailable, later ones connect again."""
        with self._lock:
            self._num_hang_ups += 1
            busy = list(self._busy)
        self._drop_idle()  # first: a call whose channel has ended does not try one of them
        for channel in busy:
            channel.interrupt()

    def _take_idle(self, number: int) -> C | None:
        with self._lock:
            self._check_open(number)
            return self._idle.pop() if self._idle else None

    def _check_open(self, number: int) -> None:
        """Check that it is open. `number`: of hang-ups when the call began."""
        if self._closed or number != self._num_hang_ups:
            why = "the store is closed" if self._closed else "the call was ended"
            raise StoreUnavailable(f"{self._what}: {why}")

    def _run_on(self, channel: C, operation: Callable[[C], T], deadline: Deadline, number: int) -> T:
        with self._lock:
            self._busy.add(channel)
        channel.deadline = deadline
        usable = False
        try:
            self._check_open(number)  # from now on a hang-up finds the channel
            result = operation(channel)
            usable = True
            return result
        finally:
            with self._lock:
                self._busy.remove(channel)
                usable = usable and not self._closed
                if usable:
                    self._idle.append(channel)
            if not usable:
                channel.close()
                self._drop_idle()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()
