"""A client inside the process: sees every single write of an ASGI application, and can go away at any moment."""

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message


class Exchange:
    """One request to an application and what came back so far."""

    def __init__(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        path, _, query = path.partition("?")
        self.status = 0
        self.headers: dict[str, str] = {}
        self.writes: list[bytes] = []
        self.complete = False
        self.changed = asyncio.Event()
        self._gone = asyncio.Event()
        self._to_send: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self.scope: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
        }

    @property
    def body(self) -> bytes:
        return b"".join(self.writes)

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """Data of the server-sent events; "[DONE]" as it is."""
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == "", "the stream ends with a whole event"
        assert all(part.startswith("data: ") for part in parts)
        return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]

    def disconnect(self) -> None:
        """The client goes away."""
        self._gone.set()

    async def wait_for_writes(self, number: int) -> None:
        """Until this many parts of the body were sent."""
        while len(self.writes) < number:
            self.changed.clear()
            await self.changed.wait()

    async def receive(self) -> Message:
        if self._to_send:
            return self._to_send.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            assert not self.status, "a response begins once"
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            return
        assert not self.complete, "nothing is sent behind the end"
        if message.get("body"):
            self.writes.append(message["body"])
        self.complete = not message.get("more_body", False)
        self.changed.set()


def begin(
    app: ASGIApp, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[Exchange, "asyncio.Task[None]"]:
    """Start a request: the exchange to watch, and the task that serves it."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    exchange = Exchange(method, path, data, {"content-type": "application/json", **(headers or {})})
    return exchange, asyncio.ensure_future(app(exchange.scope, exchange.receive, exchange.send))


async def call(
    app: ASGIApp, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> Exchange:
    """A whole request."""
    exchange, task = begin(app, method, path, body, headers)
    await task
    return exchange
