"""A transport for uvicorn: calls after `close` have no effect, and a response's head leaves with what follows it."""

import asyncio
from collections.abc import Callable
from typing import Any

_CONTINUE = b"HTTP/1.1 100 Continue"


class ResponseTransport(asyncio.Transport):
    """Passes everything on until it is closed; the connection itself may go on for a while.

    uvicorn writes a response's head and its body separately. Each write is a system call that wakes the client, on a
    busy machine instead of this process. So the head waits for the next write, at most for one turn of the event loop.
    """

    def __init__(self, connection: asyncio.Transport, on_close: Callable[[], None]) -> None:
        super().__init__()
        self._connection = connection
        self._on_close = on_close
        self._awaits_head = False
        self._head: bytes | bytearray | memoryview | None = None
        self.closed = False

    def begin_response(self) -> None:
        """Announce that the next write is a response's head, or asks the client to send its body."""
        self._awaits_head = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._connection.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self.closed or self._connection.is_closing()

    def close(self) -> None:
        if not self.closed:
            self._send_head()
            self.closed = True
            self._on_close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_closing():
            return
        if self._head is not None:
            data, self._head = b"".join((self._head, data)), None
        elif self._awaits_head and bytes(data[: len(_CONTINUE)]) != _CONTINUE:
            self._awaits_head, self._head = False, data
            asyncio.get_running_loop().call_soon(self._send_head)
            return
        self._connection.write(data)

    def _send_head(self) -> None:
        if self._head is not None and not self.is_closing():
            self._connection.write(self._head)
        self._head = None

    def pause_reading(self) -> None:
        if not self.is_closing():
            self._connection.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_closing():
            self._connection.resume_reading()
