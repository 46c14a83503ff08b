"""The launcher as a client of the router's operators' socket: asked again, refused, or answered with nonsense."""

import asyncio
import urllib.parse

import pytest
from coroutines import clock
from still_launch import commanded, make_control

from pdkv.errors import ConfigError, StartupError
from pdkv.launch.config import LaunchConfig
from pdkv.launch.router_admin import RouterAdmin
from pdkv.launch.run_dir import ADMIN_SOCKET, RunDirectory
from pdkv.testing import VirtualLoop

event_loop = VirtualLoop


async def test_a_router_that_says_no_is_not_asked_again_and_one_that_says_nothing_is(run_dir: RunDirectory) -> None:
    control = make_control(run_dir, LaunchConfig())
    no = b'{"error":{"message":"never"}}'
    async with commanded(control, answer=b"HTTP/1.1 409 Conflict\r\ncontent-length: %d\r\n\r\n%b" % (len(no), no)):
        with pytest.raises(ConfigError, match="never"):
            await control.router.resume("decode-0")
    async with commanded(control, answer=b"HTTP/1.1 200"):
        with pytest.raises(StartupError, match="the router does not answer"):
            await clock().passing(RouterAdmin(run_dir.path).resume("decode-0"))


@pytest.mark.parametrize("name", ["", ".", "..", "../../x", "a/b"])
def test_a_name_that_no_engine_can_have_is_not_asked_for(run_dir: RunDirectory, name: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid engine name"):
        asyncio.run(RouterAdmin(run_dir.path).resume(name))


@pytest.mark.parametrize("verb", ["drain", "wait_ready"])
def test_a_router_that_is_asked_again_is_to_wait_for_what_is_left(run_dir: RunDirectory, verb: str) -> None:
    """One that has taken more time than there is in all is not one that does not answer."""
    asked: list[float] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(target).query)
        asked.append(float(query["wait_s"][0]))
        if len(asked) == 2:  # the first one died
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    async def main() -> None:
        router = RouterAdmin(run_dir.path)
        async with asyncio.timeout(30), await asyncio.start_unix_server(serve, str(run_dir.path / ADMIN_SOCKET)):
            await (router.drain("decode-0", 20.0) if verb == "drain" else router.wait_ready("decode-0", 1, 20.0))

    asyncio.run(main())
    first, second = asked
    assert second < first <= 20.0


def http(status: str, body: bytes, head: str = "content-length: {}") -> bytes:
    return f"HTTP/1.1 {status}\r\n{head.format(len(body))}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (http("500 Internal Server Error", b"Internal Server Error"), "status 500: b'Internal Server Error'"),
        (http("500 Internal Server Error", b'{"error":{"message":"internal error"}}'), "status 500: internal error"),
        (http("404 Not Found", b"Not Found"), "status 404: b'Not Found'"),
        (http("200 OK", b"[]"), r"status 200: b'\[\]'"),
        (http("409 Conflict", b'{"error":"no"}'), "status 409"),
        (http("200 OK", b"{}", "x: y"), "sent an invalid answer: b'HTTP/1.1 200 OK"),
        (http("200 OK", b"{}", "content-length: 99999999999"), "sent an invalid answer"),
        (http("fine", b"{}"), "sent an invalid answer"),
        (b"220 mail.example ESMTP\r\n\r\n", "sent an invalid answer: b'220 mail"),
        (b"x" * (17 << 20), "sent an invalid answer"),
    ],
    ids=range(10),
)
async def test_an_answer_that_is_none_is_a_failure_with_a_name(
    run_dir: RunDirectory, answer: bytes, message: str
) -> None:
    control = make_control(run_dir, LaunchConfig())
    async with commanded(control, answer=answer):
        with pytest.raises(StartupError, match=message):
            await control.router.resume("decode-0")
