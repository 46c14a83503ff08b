"""A connection's TLS handshake, with limits, in front of the HTTP protocol."""

import asyncio
from typing import cast

from pdkv.base.options import MAX_SECONDS
from pdkv.router.http.server.certificates import Tls
from pdkv.router.http.server.connections import Connections
from pdkv.router.http.server.protocol import LimitedProtocol


class TlsGate(asyncio.Protocol):
    """A connection until its handshake is done; then it belongs to `http`.

    It counts as an idle connection from the start, so it may be closed to make room. uvicorn's own TLS does not count
    connections before their handshake, and waits a minute for it.
    """

    def __init__(self, http: LimitedProtocol, tls: Tls, room: Connections, timeout_s: float) -> None:
        """`timeout_s`: how long a handshake may take."""
        self._http = http
        self._tls = tls
        self._room = room
        self._timeout_s = timeout_s
        self._early: list[bytes] = []  # arrived before TLS could read it, or with the end of the handshake

    num_unsent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, if there is room."""
        self._raw = cast(asyncio.Transport, transport)
        self._room.opened(self)
        if not self._room.admit():
            self.evict()
            return
        self._room.idle(self)
        self._raw.pause_reading()  # input is for TLS; uvloop reads once all the same
        self._task = asyncio.get_running_loop().create_task(self._shake_hands())

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.lost(self)

    def evict(self) -> None:
        """Close now; there is nothing to answer."""
        self._room.lost(self)
        self._raw.abort()

    shutdown = evict

    async def _shake_hands(self) -> None:
        loop = asyncio.get_running_loop()
        client = self._raw.get_extra_info("peername")
        if self._raw.is_closing():
            return
        if self._early:
            loop.call_soon(self._feed, self._early)
            self._early = []
        try:
            transport = await loop.start_tls(
                self._raw, self, self._tls.context, server_side=True, ssl_handshake_timeout=self._timeout_s,
                ssl_shutdown_timeout=MAX_SECONDS,  # `LimitedProtocol` sees to it that clients go
            )  # fmt: skip
        except OSError as error:  # ssl.SSLError is one, and so is a time-out
            self._tls.failed(client, error)
            self.evict()
            return
        self._room.lost(self)
        if transport is None or self._raw.is_closing():
            return  # evicted, or its client has left
        self._http.underlying = self._raw
        transport.set_protocol(self._http)
        self._http.connection_made(transport)
        for data in self._early:
            self._http.data_received(data)

    def _feed(self, early: list[bytes]) -> None:
        """Give TLS, which has just taken over the connection, the earlier input."""
        tls = cast(asyncio.BufferedProtocol, self._raw.get_protocol())
        for data in early:
            rest = memoryview(data)
            while rest:
                buffer = memoryview(tls.get_buffer(len(rest)))
                size = min(len(buffer), len(rest))
                buffer[:size] = rest[:size]
                tls.buffer_updated(size)
                rest = rest[size:]
