"""A client whose streams outlive their connections (docs/fronts.md)."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from itertools import count
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pdkv.base.clock import MONOTONIC
from pdkv.errors import EngineUnavailable, PdkvError, RequestFailed

MAX_EVENT_BYTES = 16 << 20


class Streamed(NamedTuple):
    """An answer that has arrived."""

    events: list[dict[str, Any]]
    num_resumed: int  # how often it went on over another connection


async def read_stream(
    url: str,
    path: str,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    heard: asyncio.Event | None = None,
) -> Streamed:
    """All events of a streamed answer, which goes on over another connection when one breaks. `heard` is set with the
    first event. The caller bounds the time, as by `asyncio.timeout`.

    Raises:
        RequestFailed: it ended with an error, or broke before its first event.
    """
    events: list[dict[str, Any]] = []
    asked, sent = json.dumps({**body, "stream": True}), {"x-pd-event-ids": "1", **(headers or {})}
    for num_resumed in count():
        try:
            async for name, data in _events(url, path, asked.encode(), sent):
                if data == "[DONE]":
                    return Streamed(events, num_resumed)
                asked, sent["last-event-id"] = "", name
                events.append(json.loads(data))
                if "error" in events[-1]:
                    raise RequestFailed(data, request_id="")
                if heard is not None:
                    heard.set()
        except (OSError, EOFError, EngineUnavailable) as error:
            if not events:
                raise RequestFailed(f"the stream broke before its first event: {error}", request_id="") from None
            await MONOTONIC.pause(0.05)
    raise AssertionError


async def _events(url: str, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[tuple[str, str]]:
    """Id and data of each whole event until the connection ends; HTTP/1.0, so that nothing is between them.

    Raises:
        OSError or EOFError at that end, EngineUnavailable (503), or PdkvError for another status than 200.
    """
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=MAX_EVENT_BYTES)
    try:
        lines = [f"POST {path} HTTP/1.0", f"host: {parts.netloc}", "content-type: application/json"]
        lines += [f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        head = await reader.readuntil(b"\r\n\r\n")
        if (status := head.split(b" ")[1:2]) != [b"200"]:
            text = (head + await reader.read()).decode("utf-8", "replace")
            raise EngineUnavailable(text) if status == [b"503"] else PdkvError(text)
        while True:
            data, _, name = (await reader.readuntil(b"\n\n")).decode().rstrip("\n").partition("\nid: ")
            if data.startswith("data: "):
                yield name, data.removeprefix("data: ")
    finally:
        writer.close()
