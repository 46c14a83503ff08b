"""Engines that join and leave a running router: what admits them, and what keeps them out."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import zmq
from dispatch_rig import collect
from relay import Relay
from scripted_engine import expected_output, make_request
from standing_engine import ADDRESS, free_endpoint, standing
from traffic import wait_until_true
from wire_rig import KEY, Context

from pdkv.errors import ConfigError
from pdkv.launch.announcer import Announcer
from pdkv.router.engines.engine_client import EngineClient
from pdkv.router.generations import join_door, membership
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.router.generations.join_door import JoinDoor
from pdkv.router.generations.membership import Door, Membership
from pdkv.router.generations.operations import Operations
from pdkv.wire.cluster_key import ClusterKey
from pdkv.wire.joining import Join, encode
from pdkv.wire.messages import PROTOCOL


class Router:
    """A dispatcher without engines of its own, and the door at which others join."""

    def __init__(self, context: Context, endpoint: str = "") -> None:
        def connect(endpoint: str, door: Door) -> EngineClient:
            return EngineClient(endpoint, endpoint, router_id=f"r-{endpoint}", context=context, key=KEY, door=door)

        self.dispatcher = Dispatcher(await_all=False)
        self.dispatcher.fleet.awaits_others = True
        self.dispatcher.pools.add("next", ["next"], Dispatcher(await_all=False))
        self.dispatcher.pools.at("next").changes.on_notify = self.dispatcher.changes.notify
        self.members = Membership(self.dispatcher, Operations(self.dispatcher, connect), connect, 5.0)  # type: ignore[arg-type]
        self.door = JoinDoor(endpoint or free_endpoint(), KEY, self.members, context)

    def table(self) -> dict[str, tuple[Any, ...]]:
        """The members."""
        return {e["name"]: (e["state"], e["endpoint"], e["source"]) for e in self.dispatcher.topology()["engines"]}

    async def until(self, state: dict[str, tuple[Any, ...]]) -> None:
        assert await self.dispatcher.changes.wait_for(lambda: self.table() == state, 30.0), self.table()

    def close(self) -> None:
        self.door.close()
        self.members.close()
        self.dispatcher.close()


@contextlib.asynccontextmanager
async def routing(endpoint: str = "") -> AsyncIterator[Router]:
    context: Context = zmq.Context()
    router = Router(context, endpoint)
    router.dispatcher.connect()
    router.door.start()
    try:
        yield router
    finally:
        router.close()
        context.term()  # which hangs if a socket is left


class Starter:
    """What `pd engine --join` does beside its engine."""

    def __init__(self, door: str, name: str, endpoint: str, key: ClusterKey = KEY, pool: str = "") -> None:
        self.stopped, self.hurried = asyncio.Event(), asyncio.Event()
        announcer = Announcer(door, name, endpoint, key, pool)
        self.task = asyncio.create_task(announcer.run(self.stopped, self.hurried, 5.0))

    async def leave(self) -> None:
        self.stopped.set()
        await self.task


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    most = before + 1  # the loop's first use opens one
    wait_until_true(lambda: len(os.listdir("/proc/self/fd")) <= most, "descriptors are given back")


async def test_an_engine_joins_leaves_and_joins_a_router_s_successor() -> None:
    door = free_endpoint()
    with standing("decode-b") as endpoint:
        async with routing(door) as router:
            starter = Starter(router.door.endpoint, "decode-b", endpoint)
            await router.until({"decode-b": ("ready", endpoint, "join")})
            assert router.members.describe() == []
        async with routing(door) as router:
            await router.until({"decode-b": ("ready", endpoint, "join")})
            await starter.leave()
            assert router.table() == {}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("name", r"at tcp://\S+ is named decode-b, as the one at tcp://\S+ \(join\): each needs a name of its own"),
        ("model", "decode-c has model other, but the deployment started with model m|has model m, decode-c has other"),
        ("address", "another starter, which is still connected, has announced tcp://"),
        ("other", r"engine decode-b answers at tcp://\S+, where join expected decode-c"),
        ("pool", r"there is no pool 'nxt'(?s:.*)next"),
        ("pool's model", "d has model m, but|has model other, decode-c has m"),
        ("host name", "the address of one host was expected, such as tcp://10.0.0.2:7000, got 'tcp://localhost:7000'"),
    ],
)
async def test_what_may_not_join_is_told_why(case: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    with standing("decode-b") as endpoint, contextlib.ExitStack() as stack:
        async with routing() as router:
            first = Starter(router.door.endpoint, "decode-b", endpoint)
            before = {"decode-b": ("ready", endpoint, "join")}
            await router.until(before)
            name, pool = "decode-c", ""
            match case:
                case "name":
                    name, endpoint = "decode-b", stack.enter_context(standing("decode-b", epoch="e1"))
                case "model":
                    endpoint = stack.enter_context(standing("decode-c", model="other"))
                case "address":
                    name = "decode-b"
                case "other":  # an address that leads to that engine: the connection that it has must not end
                    host, _, port = endpoint.removeprefix("tcp://").partition(":")
                    relay = stack.enter_context(Relay((host, int(port))))
                    endpoint = "tcp://{}:{}".format(*relay.address)
                case "pool":
                    pool, endpoint = "nxt", stack.enter_context(standing("decode-c"))
                case "pool's model":  # the first of a pool decides what it is
                    router.members.propose("file", {stack.enter_context(standing("n", model="other")): "@next"})
                    await router.dispatcher.changes.wait_for(lambda: len(router.table()) == 2, 30.0)
                    before = router.table()
                    pool, endpoint = "next", stack.enter_context(standing("decode-c"))
                case "host name":
                    endpoint = "tcp://localhost:7000"
            with pytest.raises(ConfigError, match=message):
                await Starter(router.door.endpoint, name, endpoint, pool=pool).task
            assert router.table() == before
            assert router.dispatcher.fleet.engines["decode-b"].num_deaths == 0
            assert not first.task.done()
            await first.leave()
    assert caplog.text


async def test_an_engine_that_is_not_let_in_yet_tries_again(caplog: pytest.LogCaptureFixture) -> None:
    """It ended after three connections that ended in their handshakes, as where nothing is behind a balancer."""
    host, _, port = (door := free_endpoint()).removeprefix("tcp://").partition(":")
    closes = await asyncio.start_server(lambda _, writer: (times.append(1), writer.close()), host, int(port))
    times: list[int] = []
    with standing("decode-b") as endpoint:
        starter = Starter(door, "decode-b", endpoint)
        while len(times) < 5:
            await asyncio.sleep(0.01)
        closes.close()
        async with routing(door) as router:
            await router.until({"decode-b": ("ready", endpoint, "join")})
            await starter.leave()
    assert caplog.text.count("with the same --cluster-key-file? It tries again.") == 1


@pytest.mark.parametrize("what", ["own key", "other program", "no key"])
async def test_what_never_lets_an_engine_in_ends_it_at_once(what: str) -> None:
    key = ClusterKey(b"o" * 32)
    async with routing() as router, contextlib.AsyncExitStack() as stack:
        door, context = router.door.endpoint, zmq.Context()
        if what == "own key":  # which another program may have read, but not the router's
            key._routers = KEY._routers
        elif what == "other program":
            host, _, port = (door := free_endpoint()).removeprefix("tcp://").partition(":")
            say = b"HTTP/1.1 400 Bad Request\r\n\r\n"
            serving = await asyncio.start_server(lambda _, to: (to.write(say), to.close()), host, int(port))
            await stack.enter_async_context(serving)
        else:
            plain = context.socket(zmq.ROUTER)
            plain.bind(door := free_endpoint())
        with pytest.raises(ConfigError, match=f"{door} does not admit this engine: .* --cluster-key-file"):
            await Starter(door, "decode-b", free_endpoint(), key).task
        context.destroy(linger=0)


async def test_another_program_at_a_routers_address_ends_no_member(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a proxy that answers for a router which starts again: its successor gets the engine."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("pdkv.launch.announcer.AGAIN_S", 0.1)
    host, _, port = (door := free_endpoint()).removeprefix("tcp://").partition(":")
    times: list[int] = []

    def answer(_: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        times.append(1)
        to.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
        to.close()

    with standing("decode-b") as endpoint:
        async with routing(door) as router:
            starter = Starter(door, "decode-b", endpoint)
            await router.until({"decode-b": ("ready", endpoint, "join")})
            while "has taken decode-b in" not in caplog.text:
                await asyncio.sleep(0.01)
        async with await asyncio.start_server(answer, host, int(port)):
            while len(times) < 3:
                await asyncio.sleep(0.01)
        async with routing(door) as router:
            await router.until({"decode-b": ("ready", endpoint, "join")})
            await starter.leave()


async def test_unequal_protocols_are_refused_with_both_numbers() -> None:
    async with routing() as router:
        starter = Starter(router.door.endpoint, "decode-b", free_endpoint())
        starter.task.cancel()
        announcer = Announcer(router.door.endpoint, "decode-b", free_endpoint(), KEY)
        announcer._join = Join("decode-b", free_endpoint(), PROTOCOL + 1, "s")
        with pytest.raises(ConfigError, match=f"it speaks protocol {PROTOCOL + 1}, and this router {PROTOCOL}"):
            await announcer.run(asyncio.Event(), asyncio.Event(), 1.0)


async def test_an_engine_that_flaps_leaves_nothing_behind() -> None:
    with standing("decode-b") as endpoint:
        async with routing() as router:
            starter = Starter(router.door.endpoint, "decode-b", endpoint)
            await router.until({"decode-b": ("ready", endpoint, "join")})
            members = {"decode-b": ("ready", endpoint, "join+file")}
            num_open = len(os.listdir("/proc/self/fd"))
            for _ in range(50):
                router.members.propose("file", {endpoint: ""})
                assert router.table() == members
                router.members.propose("file", {})
            router.members.propose("file", {})
            await starter.leave()
            for _ in range(50):
                router.members.propose("file", {endpoint: "decode-b"})
                await router.until({"decode-b": ("ready", endpoint, "file")})
                router.members.propose("file", {})
                await router.until({})
            while len(os.listdir("/proc/self/fd")) >= num_open:  # ZeroMQ's thread closes the last ones
                await asyncio.sleep(0.01)
            assert router.members.describe() == []


def reasons(router: Router) -> dict[str, str]:
    """Of each endpoint whose engine is not admitted."""
    return {member["endpoint"]: member["reason"] for member in router.members.describe()}


async def test_a_name_moves_to_another_address() -> None:
    """When its engine leaves, and when it is gone."""
    with contextlib.ExitStack() as old, standing("decode-b", epoch="e1") as second, standing("c") as third:
        first = old.enter_context(standing("decode-b"))
        async with routing() as router:
            router.members.propose("file", {first: "decode-b"})
            await router.until({"decode-b": ("ready", first, "file")})
            router.members.propose("file", {second: "decode-b"})
            await router.until({"decode-b": ("ready", second, "file")})
            router.members.propose("file", {second: "decode-b", first: "", third: "x"})
            while "it does not answer" in (refused := reasons(router)).values():
                await asyncio.sleep(0.01)
            assert "each needs a name of its own" in refused[first]
            assert refused[third] == f"engine c answers at {third}, where file expected x"
            router.members.propose("file", {first: ""})
            await router.until({"decode-b": ("ready", first, "file")})
            old.close()
            assert await router.dispatcher.changes.wait_for(lambda: router.table()["decode-b"][0] == "dead", 30.0)
            router.members.propose("file", {first: "", second: ""})
            await router.until({"decode-b": ("ready", second, "file")})


async def test_an_address_that_has_another_engine_now_is_that_one() -> None:
    with standing("decode-b") as endpoint:
        async with routing() as router:
            router.members.propose("dns", {endpoint: ""})
            await router.until({"decode-b": ("ready", endpoint, "dns")})
    with contextlib.ExitStack() as old:
        old.enter_context(standing("decode-b", endpoint))
        async with routing() as router:
            router.members.propose("dns", {endpoint: ""})
            await router.until({"decode-b": ("ready", endpoint, "dns")})
            old.close()
            with standing("decode-c", endpoint):
                await router.until({"decode-c": ("ready", endpoint, "dns")})


async def test_engines_of_pools_stay_among_themselves() -> None:
    """With names that are unique in all; an engine that comes again with another pool leaves its old one."""
    with standing("a") as own, standing("b", model="other") as other, standing("a", model="other") as twin:
        async with routing() as router:
            router.members.propose("file", {own: "a"})
            await router.until({"a": ("ready", own, "file")})
            router.members.propose("file", {own: "a", other: "@next", twin: "@next"})
            both = {"a": ("ready", own, "file"), "b": ("ready", other, "file")}
            await router.until(both)
            next_pool = router.dispatcher.pools.at("next")
            request = make_request(20, max_tokens=5)
            for dispatcher, name in ((router.dispatcher, "a"), (next_pool, "b")):
                generation = dispatcher.start(request)
                assert (await collect(generation))[0] == expected_output(request)
                assert (generation.prefill_engine, generation.decode_engine) == (name, name)
            told = router.dispatcher.topology()
            assert {e["name"]: e["pool"] for e in told["engines"]} == {"a": "", "b": "next"}
            assert [pool["identity"] for pool in told["pools"]] == ["other"], "of its first card"
            with pytest.raises(ConfigError, match="sources name several pools for the engine at"):
                router.members.propose("dns", {other: ""})
            assert router.table() == both
            router.members.propose("file", {own: "a", other: "b", twin: "@next"})  # refused where it is to be now
            await router.until({"a": ("ready", own, "file")})
            router.members.propose("file", {other: "@next", twin: "@next"})  # its name is free
            await router.until({"a": ("ready", twin, "file"), "b": ("ready", other, "file")})


async def test_dead_and_hanging_hosts_and_too_many_do_no_harm() -> None:
    with standing("decode-b") as endpoint, socket.create_server((ADDRESS, 0)) as hanging:
        async with routing() as router:
            others = {f"tcp://{ADDRESS}:{hanging.getsockname()[1]}": "", f"tcp://{ADDRESS}:1": ""}
            router.members.propose("dns", {**others, endpoint: ""})
            await router.until({"decode-b": ("ready", endpoint, "dns")})
            assert [p["reason"] for p in router.members.describe()] == ["it does not answer"] * 2
            many = {f"tcp://10.0.{i // 250}.{i % 250}:7000": "" for i in range(membership.MAX_PROPOSALS + 1)}
            with pytest.raises(ConfigError, match="1028 engines are proposed, and at most 1024 were expected"):
                router.members.propose("file", many)
            assert len(router.members.describe()) == 2


async def test_an_engine_whose_starter_is_gone_too_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_door, "SWEEP_S", 0.05)
    async with routing() as router:
        with standing("decode-b") as endpoint:
            starter = Starter(router.door.endpoint, "decode-b", endpoint)
            await router.until({"decode-b": ("ready", endpoint, "join")})
        await router.until({"decode-b": ("dead", endpoint, "join")})
        starter.task.cancel()
        await router.until({})


class Load:
    """So many clients at a time, each with one request after the other, until the end of the block."""

    def __init__(self, router: Router) -> None:
        self._dispatcher, self._is_over, self.num_right = router.dispatcher, False, 0

    async def _ask(self, number: int) -> None:
        while not self._is_over:
            request = make_request(20 + number, max_tokens=20)
            tokens, last = await collect(self._dispatcher.start(request))
            assert tokens == expected_output(request)
            assert last.finish_reason is not None
            self.num_right += 1

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Load"]:
        clients = [asyncio.create_task(self._ask(number)) for number in range(4)]
        try:
            yield self
        finally:
            self._is_over = True
            await asyncio.gather(*clients)

    async def more(self, count: int = 8) -> None:
        """So many more answers."""
        wanted = self.num_right + count
        assert await self._dispatcher.changes.wait_for(lambda: self.num_right >= wanted, 30.0)


async def test_no_request_is_lost_when_engines_come_go_move_and_change() -> None:
    with contextlib.ExitStack() as rest:
        start = rest.enter_context
        prefill, first = start(standing("p-0", role="prefill")), start(standing("d-0", role="decode"))
        async with routing() as router:
            now = {prefill: "p-0", first: "d-0"}
            router.members.propose("file", now)
            await router.dispatcher.changes.wait_for(lambda: router.dispatcher.listener.ready, 30.0)
            async with Load(router).running() as load:
                await load.more()
                second = start(standing("d-1", role="decode", version="9.9"))  # of another version
                starter = Starter(router.door.endpoint, "d-1", second)
                await router.dispatcher.changes.wait_for(lambda: router.members.is_up(second), 30.0)
                await load.more()
                router.members.propose("file", {prefill: "p-0"})  # d-0 leaves
                assert await router.dispatcher.changes.wait_for(lambda: not router.members.name_at(first), 30.0)
                await load.more()
                third = start(standing("d-0", role="decode", epoch="e1"))  # and is back, at another address
                router.members.propose("file", {prefill: "p-0", third: "d-0"})
                await load.more()
                await starter.leave()
                for epoch in range(2):  # and is killed, beside one that takes over
                    with standing("d-2", role="decode", epoch=f"e{epoch}") as fourth:
                        router.members.propose("file", {prefill: "p-0", third: "d-0", fourth: "d-2"})
                        assert await router.dispatcher.changes.wait_for(lambda: router.members.is_up(fourth), 30.0)
                        await load.more()
                    await load.more()
                moved = start(standing("d-0", role="decode", epoch="e2"))  # the only one moves
                router.members.propose("file", {prefill: "p-0", moved: "d-0"})
                assert await router.dispatcher.changes.wait_for(lambda: router.members.is_up(moved), 30.0)
                await load.more()
            assert set(router.table()) == {"p-0", "d-0"}
            assert not router.dispatcher.counters.failed
            assert router.dispatcher.num_running == 0


async def test_noise_with_the_key_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with routing() as router:
        context: Context = zmq.Context()
        peer = context.socket(zmq.DEALER)
        KEY.swapped().present(peer)
        peer.connect(router.door.endpoint)
        for data in (b"\xff" * 100, encode(Join("a/b", "tcp://1.2.3.4:7000", PROTOCOL, "s")), b"", b"\x80"):
            peer.send(data)
        answers = [await asyncio.to_thread(peer.recv) for _ in range(4)]
        assert [b"refused" in answer for answer in answers] == [True, True, False, True]
        assert router.members.describe() == []
        peer.close(linger=0)
        context.term()
