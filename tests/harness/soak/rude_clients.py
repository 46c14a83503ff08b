"""Clients that hold connections: that never read what they asked for, are slow, or send 100,000 messages; and for
comparison those that ask the same and read it. In a process of their own, until its input ends.

python -m soak.rude_clients HOST PORT polite|rude
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache

from pdkv.host.sockets import raise_open_files_limit

ASKS_TOKENS = 600
"""Of one stream that nobody reads: with its logprobs a megabyte, more than the kernel keeps for a small window."""

_SMALL_WINDOW = 4096
_PERIOD_S = 1.0
_CHAT = "/v1/chat/completions"


def request(path: str, body: object) -> bytes:
    """An honest POST."""
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: soak\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


@cache
def many_messages() -> bytes:
    """A conversation of 100,000."""
    return request(_CHAT, {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}] * 100_000})


BIG_STREAM = {"max_tokens": ASKS_TOKENS, "ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 20}


class RudeClients:
    """All of one router. `counts` says what they did and saw."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self.counts: Counter[str] = Counter()

    async def never_reads(self, number: int, hold_s: float) -> None:
        """Ask for a large stream and read none of it; after `hold_s` the same with a new connection."""
        while True:
            with self._connected(small_window=True) as connection:
                await self._send(connection, self._big_stream(number))
                self.counts["streams that nobody reads"] += 1
                await asyncio.sleep(hold_s)

    async def reads(self, number: int) -> None:
        """The same stream, read at once to its end, again and again: what its tokens cost the engines."""
        while True:
            with self._connected() as connection:
                await self._send(connection, self._big_stream(number))
                tail = b""
                while piece := await asyncio.get_running_loop().sock_recv(connection, 1 << 16):
                    tail = (tail + piece)[-64:]
                    if b"data: [DONE]" in tail:
                        break
                self.counts["streams that somebody reads"] += 1

    def _big_stream(self, number: int) -> bytes:
        return request(_CHAT, {**BIG_STREAM, "messages": [{"role": "user", "content": f"number {number}"}]})

    async def drips(self, data: bytes, kind: str) -> None:
        """Send a byte a second; begin again when the server has had enough."""
        while True:
            with contextlib.suppress(OSError), self._connected() as connection:
                await self._connect(connection)
                self.counts[f"slow: {kind}"] += 1
                for at in range(len(data)):
                    await asyncio.get_running_loop().sock_sendall(connection, data[at : at + 1])
                    if await self._ended(connection, kind):
                        break

    async def idles(self) -> None:
        """Be answered once, and keep the connection."""
        while True:
            with contextlib.suppress(OSError), self._connected() as connection:
                await self._send(connection, b"GET /ping HTTP/1.1\r\nhost: soak\r\n\r\n")
                self.counts["slow: idle"] += 1
                while not await self._ended(connection, "idle"):
                    pass

    async def reads_slowly(self) -> None:
        """Ask for the whole description many times over, and read a little of it each second."""
        while True:
            with contextlib.suppress(OSError), self._connected(small_window=True) as connection:
                await self._send(connection, b"GET /openapi.json HTTP/1.1\r\nhost: soak\r\n\r\n" * 20)
                self.counts["slow: reading"] += 1
                while await asyncio.get_running_loop().sock_recv(connection, 256):
                    await asyncio.sleep(_PERIOD_S)

    async def sends_many_messages(self) -> None:
        """A conversation of 100,000 messages a second."""
        while True:
            with self._connected() as connection:
                await self._send(connection, many_messages())
                reply = await asyncio.get_running_loop().sock_recv(connection, 4096)
                self.counts[f"100,000 messages: {reply[9:12].decode()}"] += 1
            await asyncio.sleep(_PERIOD_S)

    async def slow(self, number: int) -> None:
        """One of the slow ones."""
        await asyncio.sleep(number % 100 * _PERIOD_S / 100)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: soak\r\n"
        match number % 4:
            case 0:
                await self.drips(head + b"x: " + b"y" * 1000, "headers")
            case 1:
                await self.drips(head + b"content-length: 4000\r\n\r\n" + b" " * 4000, "body")
            case 2:
                await self.idles()
            case _:
                await self.reads_slowly()

    @contextlib.contextmanager
    def _connected(self, *, small_window: bool = False) -> Iterator[socket.socket]:
        connection = socket.socket()
        try:
            if small_window:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_WINDOW)
            connection.setblocking(False)
            yield connection
        finally:
            connection.close()

    async def _connect(self, connection: socket.socket) -> None:
        await asyncio.get_running_loop().sock_connect(connection, self._address)

    async def _send(self, connection: socket.socket, data: bytes) -> None:
        await self._connect(connection)
        await asyncio.get_running_loop().sock_sendall(connection, data)

    async def _ended(self, connection: socket.socket, kind: str) -> bool:
        """Whether the server ended it within a second."""
        try:
            async with asyncio.timeout(_PERIOD_S):
                while reply := await asyncio.get_running_loop().sock_recv(connection, 4096):
                    if reply.startswith(b"HTTP/1.1 "):
                        self.counts[f"slow: {kind}: {reply[9:12].decode()}"] += 1
                return True
        except TimeoutError:
            return False


NUM_SLOW = 1000
NUM_BIG_STREAMS = 100
HOLD_S = 15.0


async def _main(host: str, port: int, kind: str) -> None:
    """Be polite or rude until the input ends; print what was done as a JSON line."""
    clients = RudeClients(host, port)
    if kind == "polite":
        work = [clients.reads(number) for number in range(NUM_BIG_STREAMS)]
    else:
        work = [clients.never_reads(number, HOLD_S) for number in range(NUM_BIG_STREAMS)]
        work += [clients.slow(number) for number in range(NUM_SLOW)]
        work.append(clients.sends_many_messages())
    tasks = [asyncio.create_task(one) for one in work]
    await asyncio.to_thread(sys.stdin.read)
    broken = [repr(task.exception()) for task in tasks if task.done() and not task.cancelled()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps({"counts": clients.counts, "broken": broken[:10]}))


if __name__ == "__main__":
    raise_open_files_limit()
    os.nice(10)  # real clients have machines of their own
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
