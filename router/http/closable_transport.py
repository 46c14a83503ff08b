"""A connection as uvicorn sees it: what is done after `close` has no effect."""

import asyncio
from collections.abc import Callable
from typing import Any


class ClosableTransport(asyncio.Transport):
    """Passes everything on until it is closed; the connection itself may go on for a while."""

    def __init__(self, connection: asyncio.Transport, on_close: Callable[[], None]) -> None:
        super().__init__()
        self._connection = connection
        self._on_close = on_close
        self.closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._connection.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self.closed or self._connection.is_closing()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._on_close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_closing():
            self._connection.write(data)

    def pause_reading(self) -> None:
        if not self.is_closing():
            self._connection.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_closing():
            self._connection.resume_reading()
