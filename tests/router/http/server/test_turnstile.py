"""Requests that come at the same moment begin in some turns of the event loop, and /health does not wait for them."""

import asyncio
import socket

import uvloop
from coroutines import run
from http_server import get, post, serving
from starlette.types import Receive, Scope, Send

from pdkv.router.http.server.turnstile import STARTS_PER_TURN, Turnstile, client_of

event_loop = uvloop.new_event_loop  # the router's kind


async def turn() -> None:
    """The next turn of the loop."""
    await asyncio.sleep(0)


async def test_so_many_begin_in_a_turn_and_in_order() -> None:
    begun: list[int] = []
    turnstile = Turnstile(per_turn=3)
    for i in range(8):
        turnstile.enter(lambda i=i: begun.append(i))
    assert (begun, turnstile.num_waiting) == ([0, 1, 2], 5)
    await turn()
    turnstile.enter(lambda: begun.append(8))
    assert (begun, turnstile.num_waiting) == ([0, 1, 2, 3, 4, 5], 3)
    await turn()
    assert begun == list(range(9))
    turnstile.enter(lambda: begun.append(9))
    assert turnstile.num_waiting == 1  # this turn has had its three
    await turn()
    assert begun == list(range(10))


def test_one_key_is_one_client_however_it_is_spelled() -> None:
    spelled = (b"Bearer pdk_1", b"bEARER pdk_1", b"bearer   pdk_1 ")
    assert {client_of([(b"authorization", value)], ("::1", 9)) for value in spelled} == {b"pdk_1"}
    assert client_of([(b"authorization", b" ")], ("::1", 9)) == b"::1"
    assert client_of([], None) == b""


async def test_clients_take_turns() -> None:
    begun: list[str] = []
    turnstile = Turnstile(per_turn=2)
    for client, count in (("crowd", 7), ("one", 1), ("two", 2)):
        for i in range(count):
            turnstile.enter(lambda name=f"{client}-{i}": begun.append(name), client.encode())
    for _ in range(4):
        await turn()
    assert begun == [
        "crowd-0",
        "crowd-1",
        "crowd-2",
        "one-0",
        "two-0",
        "crowd-3",
        "two-1",
        *map("crowd-{}".format, (4, 5, 6)),
    ]


async def test_what_begins_may_let_more_begin() -> None:
    begun: list[int] = []
    turnstile = Turnstile(per_turn=2)

    def start(i: int) -> None:
        begun.append(i)
        if i < 5:
            turnstile.enter(lambda: start(i + 1))

    start(0)
    assert begun == [0, 1, 2]
    await turn()
    assert begun == [0, 1, 2, 3, 4]
    await turn()
    assert begun == [0, 1, 2, 3, 4, 5]


async def test_an_idle_turnstile_does_not_keep_the_loop_awake() -> None:
    turnstile = Turnstile(per_turn=2)
    turnstile.enter(lambda: None)
    await turn()
    assert not turnstile._is_due


class _Begins:
    """An application that notes in which order requests begin."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def test_health_does_not_wait_for_a_crowd() -> None:
    """It was read with a hundred others, and began behind them."""

    async def main() -> list[str]:
        app, crowd = _Begins(), 100
        async with serving(app) as server:
            clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(crowd + 1)]
            while server.room.num_open < crowd + 1:
                await turn()
            for number, client in enumerate(clients):  # without an await: they are all there when the loop looks
                client.sendall(post(f"/{number}", b"{}") if number < crowd else get("/health"))
            while len(app.paths) < crowd + 1:
                await turn()
            for client in clients:
                client.close()
        return app.paths

    paths = run(main())
    assert paths.index("/health") <= STARTS_PER_TURN
    assert [path for path in paths if path != "/health"] == [f"/{number}" for number in range(100)]


def test_pipelined_requests_pass_one_by_one() -> None:
    async def main() -> list[str]:
        app = _Begins()
        async with serving(app) as server:
            client = socket.create_connection(("127.0.0.1", server.port))
            client.sendall(b"".join(get(f"/{number}") for number in range(50)))
            while len(app.paths) < 50:
                await turn()
            client.close()
        return app.paths

    assert run(main()) == [f"/{number}" for number in range(50)]
