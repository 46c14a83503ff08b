"""An HTTP server that does nothing but answer 200: what it takes is the machine's doing. Until its input ends.

python -m soak.bare_server    # says its port on 127.0.0.1
"""

import asyncio
import sys

_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class _Connection(asyncio.Protocol):
    """One after the other of a client's requests; they have no bodies."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        *requests, self._received = (self._received + data).split(b"\r\n\r\n")
        self._transport.write(_ANSWER * len(requests))


async def _main() -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", 0)
    async with server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main())
