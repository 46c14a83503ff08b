"""A load against a server that says one word a token, in this process."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from pdkv.bench.report import Run
from pdkv.bench.serve import Pace, Target, send
from pdkv.bench.workload import Session

TOKEN = b'data: {"choices":[{"index":0,"text":"w","delta":{"content":"w"},"token_ids":[7]}],"usage":null}\n\n'
END = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'

AT_ONCE = Pace()


def run(
    sessions: Sequence[Session],
    *,
    pace: Pace = AT_ONCE,
    status: Callable[[dict[str, Any]], int] = lambda body: 200,
    **target: Any,
) -> tuple[Run, list[dict[str, Any]], int]:
    """The run, the bodies that the server got, and the most requests that it had at a time."""
    bodies: list[dict[str, Any]] = []
    handlers: list[asyncio.Task[None] | None] = []
    running = most = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            bodies.append(body)
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            code = status(body)
            if code == 0:
                await reader.read()  # silence
                return
            if code != 200:
                writer.write(b"HTTP/1.1 %d Bad\r\ncontent-length: 2\r\n\r\nno" % code)
                continue
            data = TOKEN * body["max_tokens"] + END % body["max_tokens"]
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))

    async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError):  # the client has closed the connection
            await answer(reader, writer)
        writer.close()
        await writer.wait_closed()

    async def main() -> Run:
        async with await asyncio.start_server(quiet, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            found = await send(Target(url, "m", **target), sessions, pace)
            await asyncio.gather(*filter(None, handlers))
            return found

    return asyncio.run(main()), bodies, most
