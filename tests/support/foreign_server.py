"""A server of another engine that does what a test says."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]

MODELS = b'{"data": [{"id": "m", "max_model_len": 64}]}'
HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"


def event(token_ids: list[int], reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": "", "token_ids": token_ids, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


class Server:
    """Answers pages as it is told, and requests by `answer`."""

    def __init__(self) -> None:
        self.pages = {b"/health": b"", b"/v1/models": MODELS}
        self.heads: list[bytes] = []
        self.bodies: list[dict[str, object]] = []
        self.open: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self.is_mute = False

    async def answer(self, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + event([1, 2]) + event([3], "stop") + b"data: [DONE]\n\n")

    async def start(self, port: int = 0) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        return int(self._server.sockets[0].getsockname()[1])

    async def die(self) -> None:
        self._server.close()
        for writer, task in list(self.open.items()):
            writer.transport.abort()
            task.cancel()
        while self.open:
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open[writer] = asyncio.current_task()  # type: ignore[assignment]
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while self.is_mute:
                await asyncio.Event().wait()
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1]
            if path in self.pages:
                writer.write(HEAD + self.pages[path])
            elif path == b"/v1/completions":
                self.heads.append(head.lower())
                length = int(self.heads[-1].split(b"content-length:")[1].split()[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                await self.answer(writer)
            await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        del self.open[writer]
