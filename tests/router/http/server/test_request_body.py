"""Bodies on real connections: they wait for room unread, in order, as long as they may."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from coroutines import clock
from fake_dispatcher import FakeDispatcher, say
from http_server import Client, Serving, connected, post, serving
from small_app import MODEL, ids, make_app

from pdkv.config import HttpLimits
from pdkv.router.http.app import body_budget
from pdkv.router.http.server import request_body
from pdkv.router.http.server.budget import SMALL_BYTES, ByteBudget, Held
from pdkv.testing import VirtualUvloop

event_loop = VirtualUvloop

COMPLETIONS = "/v1/completions"
PROMPT = b'{"model": "%s", "prompt": "x"}' % MODEL.encode()
LARGE = 1 << 20
LIMITS = HttpLimits(max_body_bytes=LARGE, max_body_memory=4 * LARGE)
PATIENT = HttpLimits(max_body_bytes=LARGE, max_body_memory=4 * LARGE, body_timeout_s=1e6)
FULL = LARGE * 3 // 2
"""What large requests may have of that: less than room for the exempt one, for what is unread, and for small ones."""

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


def budget(limits: HttpLimits = LIMITS) -> ByteBudget:
    return body_budget(limits)


async def crowd(bodies: ByteBudget) -> tuple[Held, Held]:
    """Others have what large requests may have, and one is the exempt one."""
    full, exempt = Held(), Held()
    await bodies.wait(full, FULL)
    await bodies.wait(exempt, LARGE // 2)
    assert exempt.is_exempt
    return full, exempt


async def waiting(bodies: ByteBudget, number: int) -> None:
    while bodies.num_waiting != number:
        await asyncio.sleep(0)


async def test_more_large_bodies_than_there_is_room_for_are_all_served() -> None:
    """Announced or in chunks; and what they hold together stays within the bound."""
    limits = HttpLimits()
    bodies, worst = budget(limits), 0
    body = PROMPT.ljust(limits.max_body_bytes)
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)

    async def ask(server: Serving, request: bytes) -> int:
        nonlocal worst
        async with connected(server.port) as client:
            await client.send(request)
            reply = asyncio.ensure_future(client.reply())
            while not reply.done():
                worst = max(worst, bodies.held)
                await asyncio.sleep(0)
            return reply.result().status

    app = make_app(FakeDispatcher(say(ids("ab"))), limits=limits, bodies=bodies)
    async with serving(app, limits, bodies=bodies) as server:
        requests = [post(COMPLETIONS, body), chunked] * 8
        assert await asyncio.gather(*(ask(server, request) for request in requests)) == [200] * 16
    assert 8 << 20 < worst <= limits.max_body_memory, worst


async def test_small_bodies_are_served_while_large_ones_wait() -> None:
    bodies = budget()
    held = await crowd(bodies)
    app = make_app(FakeDispatcher(say(ids("ab"))), limits=LIMITS, bodies=bodies)
    async with serving(app, LIMITS, bodies=bodies) as server, connected(server.port) as large:
        await large.send(post(COMPLETIONS, PROMPT.ljust(LARGE)))
        await waiting(bodies, 1)
        async with connected(server.port) as small:
            await small.send(post(COMPLETIONS, PROMPT.ljust(SMALL_BYTES)))
            assert (await small.reply()).status == 200
        assert bodies.num_waiting == 1
        for other in held:
            bodies.give(other)
        assert (await large.reply()).status == 200


async def test_nothing_is_read_of_what_waits() -> None:
    """Not even what the server itself would read ahead."""
    bodies = budget()
    held = await crowd(bodies)
    app = make_app(FakeDispatcher(say(ids("ab"))), limits=LIMITS, bodies=bodies)
    async with serving(app, LIMITS, bodies=bodies) as server, connected(server.port) as client:
        body = PROMPT.ljust(LARGE)
        await client.send(HEAD + b"content-length: %d\r\n\r\n" % LARGE)
        await waiting(bodies, 1)
        sending = asyncio.ensure_future(client.send(body))
        async with connected(server.port) as other:  # whose answer takes the loop through several rounds
            for _ in range(20):
                await other.send(post(COMPLETIONS, PROMPT))
                assert (await other.reply()).status == 200
        [connection] = [c for c in server.state.connections if c.cycle is not None and c.cycle.more_body]
        assert connection.cycle.body == b""
        assert bodies.held == FULL + LARGE // 2
        for each in held:
            bodies.give(each)
        assert (await client.reply()).status == 200
        await sending


async def test_a_client_that_leaves_while_its_body_waits_leaves_the_queue() -> None:
    """Although nothing is read from it, so that the event loop cannot see it."""
    bodies = budget()
    held = await crowd(bodies)
    app = make_app(FakeDispatcher(say(ids("ab"))), limits=PATIENT, bodies=bodies)
    async with serving(app, PATIENT, bodies=bodies) as server:
        async with connected(server.port) as client:
            await client.send(post(COMPLETIONS, PROMPT.ljust(LARGE))[:50_000])  # its end is not behind too much
            await waiting(bodies, 1)
        await clock().passing(waiting(bodies, 0))
        while server.state.connections or server.state.tasks:
            await asyncio.sleep(0)
        for other in held:
            bodies.give(other)


@pytest.mark.parametrize(
    ("timeout_s", "header", "status", "code"),
    [(20.0, "x: y", 503, "server_busy"), (60.0, "x-pd-timeout-s: 20", 504, "timeout")],
)
async def test_the_wait_for_room_has_an_end(timeout_s: float, header: str, status: int, code: str) -> None:
    limits = HttpLimits(max_body_bytes=LARGE, max_body_memory=4 * LARGE, body_timeout_s=timeout_s)
    bodies = budget()
    held = await crowd(bodies)
    app = make_app(FakeDispatcher(), limits=limits, bodies=bodies)
    async with serving(app, limits, bodies=bodies) as server, connected(server.port) as client:
        await client.send(post(COMPLETIONS, PROMPT.ljust(LARGE), header))
        await waiting(bodies, 1)
        reply = await clock().passing(client.reply())
        assert (reply.status, reply.error()["code"]) == (status, code)
        assert "no room for the body" in reply.error()["message"]
        assert await client.at_end()
        for other in held:
            bodies.give(other)


BEGINNING = 20_000


async def begin_exempt(server: Serving, bodies: ByteBudget, client: Client) -> None:
    """The beginning of the body that may be above the bound."""
    size = bodies.held
    await client.send(post(COMPLETIONS, PROMPT.ljust(LARGE))[:BEGINNING])
    while bodies.held < size + BEGINNING // 2:
        await asyncio.sleep(0)


@asynccontextmanager
async def one_waits_for_another() -> AsyncIterator[tuple[Client, Client]]:
    """A client that has begun a body, and one for whose body there is no room meanwhile."""
    bodies = budget()
    full = Held()
    await bodies.wait(full, FULL - 1)
    app = make_app(FakeDispatcher(say(ids("ab"))), limits=LIMITS, bodies=bodies)
    async with (
        serving(app, LIMITS, bodies=bodies) as server,
        connected(server.port) as slow,
        connected(server.port) as other,
    ):
        await begin_exempt(server, bodies, slow)
        await other.send(post(COMPLETIONS, PROMPT.ljust(LARGE)))
        await waiting(bodies, 1)
        yield slow, other
        bodies.give(full)


async def test_who_keeps_others_waiting_and_does_not_send_is_408() -> None:
    """Long before its own time is over."""
    async with one_waits_for_another() as (slow, other):
        reply = await clock().passing(slow.reply())
        assert (reply.status, "while others waited" in reply.error()["message"]) == (408, True)
        assert (await other.reply()).status == 200


async def test_the_pace_may_be_looked_at_in_the_turn_in_which_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both timers are due at once where the event loop was held up."""
    errors: list[dict[str, object]] = []
    check = request_body.BodyReader._check_pace

    def late(self: request_body.BodyReader) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        if self._budget.num_waiting:
            self._timeout.reschedule(loop.time())
            loop.call_soon(check, self)

    monkeypatch.setattr(request_body.BodyReader, "_check_pace", late)
    async with one_waits_for_another() as (slow, other):
        assert (await clock().passing(slow.reply())).status == 408
        assert (await other.reply()).status == 200
    assert errors == []


async def test_who_keeps_nobody_waiting_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = 0

    def counted(self: request_body.BodyReader) -> None:
        nonlocal checks
        checks += 1
        check(self)

    check = request_body.BodyReader._check_pace
    monkeypatch.setattr(request_body.BodyReader, "_check_pace", counted)
    bodies = budget()
    full = Held()
    await bodies.wait(full, FULL - 1)
    app = make_app(FakeDispatcher(say(ids("ab"))), limits=PATIENT, bodies=bodies)
    async with serving(app, PATIENT, bodies=bodies) as server, connected(server.port) as slow:
        await begin_exempt(server, bodies, slow)
        while checks < 10:
            clock().advance(1.0)
            await asyncio.sleep(0)
        await slow.send(post(COMPLETIONS, PROMPT.ljust(LARGE))[BEGINNING:])
        assert (await slow.reply()).status == 200
        bodies.give(full)
