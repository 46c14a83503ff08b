"""The load generator times what a server sends, and calls a failure a failure."""

import asyncio
from collections.abc import Callable

import pytest

from benchmarks.client import Reply, complete
from benchmarks.load import percentile, rates, summarize

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


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy", "HTTP 503: busy"),
        (HEAD + chunk(TOKEN), "the connection ended early"),
        (HEAD + chunk(TOKEN) + chunk(b""), "without [DONE]"),
        (HEAD + chunk(TOKEN + b'data: {"error":{"message":"gone"}}\n\n') + chunk(b""), "gone"),
        (HEAD + chunk(TOKEN + USAGE % 1 + DONE) + chunk(b""), "1 tokens instead of 3"),
        (b"nonsense\r\n\r\n", "malformed"),
    ],
)
def test_what_is_not_a_whole_answer_is_an_error(sent: bytes, expected: str) -> None:
    reply = ask(lambda writer: writer.write(sent))
    assert reply.error is not None
    assert expected in reply.error


def test_nobody_there_is_an_error() -> None:
    reply = asyncio.run(complete("http://127.0.0.1:9", model="m", prompt=[1], max_tokens=1))
    assert reply.error is not None
    assert not reply.ok


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((47, 127.03, 14545, 2993, 66.17790), (0.37, 114.50, 23.56, 138.06, 24.49)),
        ((1000, 1247.16, 289255, 184429, 586.21850), (0.80, 231.93, 147.88, 379.81, 470.04)),
    ],
)
def test_rates_are_those_of_the_worked_examples(
    arguments: tuple[int, float, int, int, float], expected: tuple[float, ...]
) -> None:
    assert tuple(round(value, 2) for value in rates(*arguments)) == expected


def test_summary_counts_failures_and_leaves_them_out_of_the_latencies() -> None:
    good, bad = Reply(10.0), Reply(10.0)
    good.stamps, good.num_tokens = [10.5, 10.75, 11.0], 3
    bad.error = "broken"
    report = summarize([good, bad], 2.0, input_len=8)
    assert (report["ok"], report["failed"], report["first_error"]) == (1, 1, "broken")
    assert (report["output_tok_s"], report["input_tok_s"]) == (1.5, 4.0)
    assert report["ttft_ms"]["p50"] == 500.0
    assert report["itl_ms"]["p99"] == 250.0


def test_percentile_is_a_value_that_occurred() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 3.0
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.99) == 4.0
