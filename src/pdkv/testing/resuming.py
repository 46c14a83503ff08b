"""A client whose streams outlive their connections (docs/fronts.md)."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pdkv.base.clock import MONOTONIC
from pdkv.errors import EngineUnavailable, PdkvError, RequestFailed


class Streamed(NamedTuple):
    """An answer that has arrived."""

    events: list[dict[str, Any]]
    num_resumed: int  # how often it went on over another connection


class _Event(NamedTuple):
    id: str
    data: str


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
    last, num_resumed = "", -1
    while True:
        num_resumed += 1
        sent = {"x-pd-event-ids": "1", **(headers or {}), **({"last-event-id": last} if last else {})}
        try:
            async for event in _events(url, path, b"" if last else json.dumps({**body, "stream": True}).encode(), sent):
                if event.data == "[DONE]":
                    return Streamed(events, num_resumed)
                last = event.id
                events.append(json.loads(event.data))
                if "error" in events[-1]:
                    raise RequestFailed(event.data, request_id="")
                if heard is not None:
                    heard.set()
        except (OSError, EngineUnavailable) as error:
            if not last:
                raise RequestFailed(f"the stream broke before its first event: {error}", request_id="") from None
            await MONOTONIC.pause(0.05)
        if not last:
            raise RequestFailed("the stream ended before its first event", request_id="")


async def _events(url: str, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[_Event]:
    """The whole events that arrive before the connection's end; HTTP/1.0, so that nothing is between them.

    Raises:
        OSError, EngineUnavailable (503), or PdkvError for another status than 200.
    """
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        lines = [f"POST {path} HTTP/1.0", f"host: {parts.netloc}", "content-type: application/json"]
        lines += [f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        head = await reader.readuntil(b"\r\n\r\n")
        if (status := head.split(b" ")[1:2]) != [b"200"]:
            text = (head + await reader.read()).decode("utf-8", "replace")
            raise EngineUnavailable(text) if status == [b"503"] else PdkvError(text)
        fields: dict[str, str] = {}
        while line := await reader.readline():
            if line.strip():
                name, _, value = line.decode().rstrip("\n").partition(": ")
                fields[name] = value
            else:
                if "data" in fields:
                    yield _Event(fields.get("id", ""), fields["data"])
                fields = {}
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError(f"the connection ended: {error}") from None
    finally:
        writer.close()
