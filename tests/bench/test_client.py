"""The client times what a server sends, and calls a failure a failure."""

import asyncio
from collections.abc import Callable

import pytest

from benchmarks.load import complete
from pdkv.bench import client
from pdkv.bench.client import Client, Reply
from pdkv.errors import ConfigError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\n'
DONE = b"data: [DONE]\n\n"

Script = Callable[[asyncio.StreamWriter], None]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def ask(script: Script, max_tokens: int = 3) -> Reply:
    """What the client makes of a server that says what `script` writes, and closes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        script(writer)
        writer.close()
        await writer.wait_closed()

    async def main() -> Reply:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await complete(f"http://127.0.0.1:{port}", model="m", prompt=[1], max_tokens=max_tokens)

    return asyncio.run(main())


def test_every_event_with_a_choice_is_stamped_wherever_the_stream_is_cut() -> None:
    def script(writer: asyncio.StreamWriter) -> None:
        stream = TOKEN * 3 + USAGE % 3 + DONE
        writer.write(HEAD)
        for start in range(0, len(stream), 7):
            writer.write(chunk(stream[start : start + 7]))
        writer.write(chunk(b""))

    reply = ask(script)
    assert reply.error is None
    assert (len(reply.stamps), reply.num_tokens, len(reply.gaps)) == (3, 3, 2)
    assert reply.ttft > 0
    assert reply.tpot >= 0


@pytest.mark.parametrize("cut", [1, 5, 1000])
def test_streams_in_other_hands_are_read_too(cut: int) -> None:
    """With CRLF, fields before the data, no space behind the colon, an error of null and no last empty line."""
    token = b'id: 7\r\nevent: m\r\ndata:{"choices":[{"text":"a"}],"error":null}\r\n\r\n'
    stream = token * 3 + b"data:[DONE]\r\n"

    def script(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for start in range(0, len(stream), cut):
            writer.write(chunk(stream[start : start + cut]))
        writer.write(chunk(b""))

    reply = ask(script)
    assert (reply.error, len(reply.stamps), reply.num_tokens, reply.has_usage) == (None, 3, 3, False)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy", "HTTP 503: busy"),
        (HEAD + chunk(TOKEN), "the connection ended early"),
        (HEAD + chunk(TOKEN) + chunk(b""), "without [DONE]"),
        (HEAD + chunk(TOKEN + b'data: {"error":{"message":"gone"}}\n\n') + chunk(b""), "gone"),
        (HEAD + chunk(TOKEN + USAGE % 1 + DONE) + chunk(b""), "1 tokens instead of 3"),
        (b"nonsense\r\n\r\n", "malformed"),
        (HEAD + chunk(b"data: " + b"x" * (17 << 20)), "an event of more than 16 MiB"),
        (HEAD + chunk(TOKEN + USAGE.replace(b"%d", b'"3"')), "numbers of tokens were expected"),
        (HEAD + chunk(b'data: {"choices":[{"text":5}]}\n\n'), "a text was expected"),
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 4\r\n\r\n\x1b[2J", r"HTTP 500: \x1b[2J"),
        (HEAD + chunk(b"data: [1]\n\n"), "malformed event"),
        (HEAD + chunk(b'data: {"choices":[5]}\n\n'), "malformed event"),
    ],
)
def test_what_is_not_a_whole_answer_is_an_error(sent: bytes, expected: str) -> None:
    reply = ask(lambda writer: writer.write(sent))
    assert reply.error is not None
    assert expected in reply.error


def test_a_stream_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_EVENTS", 5)
    reply = ask(lambda writer: writer.write(HEAD + chunk(TOKEN * 6)))
    assert reply.error == "more than 5 events, or an event of more than 16 MiB"


def test_nobody_there_is_an_error() -> None:
    reply = asyncio.run(complete("http://127.0.0.1:9", model="m", prompt=[1], max_tokens=1))
    assert reply.error is not None
    assert not reply.ok


CHAT = b'data: {"choices":[{"index":0,"delta":%b,"finish_reason":null}],"usage":null}\n\n'


def test_what_opens_a_chat_stream_is_no_token_and_what_is_kept_is_text_and_ids() -> None:
    async def main() -> Reply:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            events = [b'{"role":"assistant","content":""}', b'{"content":"a"}', b'{"content":"b"}']
            writer.write(HEAD + chunk(b": ping\n\n" + b"".join(CHAT % event for event in events) + USAGE % 2 + DONE))
            writer.write(chunk(b""))
            writer.close()
            await writer.wait_closed()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            with Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/") as client:
                return await client.stream("/v1/chat/completions", b"{}", Reply(keep_text=True))

    reply = asyncio.run(main())
    assert reply.error is None
    assert (len(reply.stamps), reply.num_tokens, "".join(reply.text)) == (2, 2, "ab")


@pytest.mark.parametrize("closes", [False, True], ids=["kept", "closed-while-idle"])
def test_an_idle_connection_is_used_again_and_replaced_if_the_server_has_closed_it(closes: bool) -> None:
    handlers: list[asyncio.Task[None] | None] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        for _ in range(1 if closes else 9):
            if not await reader.read(1 << 16):
                break
            writer.write(HEAD + chunk(TOKEN + USAGE % 1 + DONE) + chunk(b""))
        writer.close()
        await writer.wait_closed()

    async def main() -> list[Reply]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            with Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
                replies = [await client.stream("/v1/completions", b"{}", Reply()) for _ in range(3)]
            await asyncio.gather(*filter(None, handlers))
            return replies

    assert [reply.error for reply in asyncio.run(main())] == [None] * 3
    assert len(handlers) == (3 if closes else 1)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "http://a:port"])
def test_what_is_no_servers_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="a server's URL such as"):
        Client(url)
