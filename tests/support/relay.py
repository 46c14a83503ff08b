"""A relay between a peer that dials and one that listens: it flips a bit of what it passes on, or cuts it off."""

import contextlib
import secrets
import selectors
import socket
import threading
from typing import Literal

Address = tuple[str, int] | str
"""Of TCP, or the path of a unix socket, an abstract one with its leading zero."""

Meddling = Literal["flip", "cut"]

_CHUNK_BYTES = 1 << 16


class Relay:
    """Listens in the place of `target`, and passes on both ways what comes, on one thread. A context manager."""

    def __init__(self, target: Address) -> None:
        self.num_done = 0  # bits flipped, and connections cut
        self._family = socket.AF_UNIX if isinstance(target, str) else socket.AF_INET
        self._target = target
        self._listener = socket.socket(self._family)
        self._listener.bind(f"\0relay-{secrets.token_hex(8)}" if isinstance(target, str) else ("127.0.0.1", 0))
        self._listener.listen(64)
        self.address: Address = self._listener.getsockname()
        if isinstance(self.address, bytes):
            self.address = self.address.decode()
        self._lock = threading.Lock()
        self._meddling: Meddling | None = None
        self._position = 0  # of what is to happen, in bits of what the dialer says from now on
        self._others: dict[socket.socket, socket.socket] = {}
        self._dialers: set[socket.socket] = set()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="relay")

    def __enter__(self) -> "Relay":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wake.close()
        self._thread.join()
        for connection in (*self._others, self._listener, self._woken):
            connection.close()

    def arm(self, meddling: Meddling, position: int) -> None:
        """Flip the bit at a position of what the dialer says from now on, or end the connection there."""
        with self._lock:
            self._meddling, self._position = meddling, position

    def disarm(self) -> None:
        """Pass on everything as it is."""
        with self._lock:
            self._meddling = None

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for listening in (self._listener, self._woken):
                selector.register(listening, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    if connection is self._woken:
                        return
                    if connection is self._listener:
                        self._accept(selector)
                    elif connection in self._others and not self._pass_on(connection):
                        self._end(selector, connection)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        dialer, _ = self._listener.accept()
        listener = socket.socket(self._family)
        try:
            listener.connect(self._target)
        except OSError:
            dialer.close()
            listener.close()
            return
        self._dialers.add(dialer)
        for one, other in ((dialer, listener), (listener, dialer)):
            self._others[one] = other
            selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, connection: socket.socket) -> bool:
        """False: it has ended, or has to."""
        try:
            data = connection.recv(_CHUNK_BYTES)
            data, goes_on = self._meddle(data) if connection in self._dialers else (data, True)
            self._others[connection].sendall(data)
        except OSError:
            return False
        return goes_on and bool(data)

    def _meddle(self, data: bytes) -> tuple[bytes, bool]:
        """What is passed on of it, and whether the connection goes on."""
        with self._lock:
            byte, bit = divmod(self._position, 8)
            self._position -= 8 * len(data)
            if self._meddling is None or byte >= len(data):
                return data, True
            meddling, self._meddling = self._meddling, None
            self.num_done += 1
        if meddling == "cut":
            return data[:byte], False
        return data[:byte] + bytes([data[byte] ^ (1 << bit)]) + data[byte + 1 :], True

    def _end(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        for part in (connection, self._others[connection]):
            selector.unregister(part)
            del self._others[part]
            self._dialers.discard(part)
            with contextlib.suppress(OSError):
                part.shutdown(socket.SHUT_RDWR)
            part.close()
