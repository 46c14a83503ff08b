"""Strangers at an engine's TCP ports: none gets in, none costs more than a little, and no router is disturbed."""

import asyncio
import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator, Sequence

import pytest
import zmq
from no_threads import no_threads
from traffic import wait_until_true
from wire_rig import KEY, TIMEOUT_S, Context, Frame, Listener, connected, encode_frame, make_card, receive, tokens

from pdkv.errors import StartupError
from pdkv.host.strangers import MAX_STRANGERS, MAX_STRANGERS_PER_SOURCE
from pdkv.router.engines.engine_client import EngineClient
from pdkv.wire.doorkeeper import MAX_HANDSHAKE_BYTES, Doorkeeper
from pdkv.wire.engine_server import EngineServer, RouterJoined
from pdkv.wire.messages import PROTOCOL, Abort, Hello

GREETING = b"\xff" + b"\0" * 8 + b"\x7f\3\0" + b"CURVE".ljust(20, b"\0") + b"\0" * 32

Address = tuple[str, int]


def doorkeeper_of(server: EngineServer) -> Doorkeeper:
    assert server._doorkeeper is not None
    return server._doorkeeper


def addresses_of(server: EngineServer) -> Sequence[Address]:
    """Of the control plane, and of the beats."""
    return [("127.0.0.1", int(endpoint.rpartition(":")[2])) for endpoint in (server.endpoint, server.card.beats)]


@contextlib.contextmanager
def strangers(address: Address, number: int, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """So many connections that say nothing."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(address, TIMEOUT_S, source_address=(source, 0)))
            for _ in range(number)
        ]


def is_ended(connection: socket.socket) -> bool:
    """Whether it was closed by the other side; what that said before is read."""
    found = select.poll()  # whatever number its descriptor has: a process of many tests has many
    found.register(connection, select.POLLIN)
    while found.poll(0):
        try:
            if not connection.recv(4096):
                return True
        except ConnectionResetError:
            return True
    return False


def num_open(connections: Sequence[socket.socket]) -> int:
    return sum(not is_ended(connection) for connection in connections)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def check_served(server: EngineServer, client: EngineClient, listener: Listener) -> None:
    """Both ways, and beats."""
    client.send(Abort("q", 1))
    assert await asyncio.to_thread(receive, server, 1) == [("r", Abort("q", 1))]
    num_frames, num_beats = len(listener.frames), len(listener.beats)
    server.send("r", [tokens(1)])
    await listener.until(lambda: len(listener.frames) > num_frames and len(listener.beats) > num_beats)


async def test_the_engines_public_key_alone_lets_nobody_in(keyed_server: EngineServer, context: Context) -> None:
    """It is public: whoever has learnt it must still be a router."""
    async with connected(keyed_server, context, KEY) as (client, listener):
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        stranger.curve_serverkey = KEY._engines.public
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.connect(keyed_server.endpoint)
        with contextlib.suppress(zmq.Again):  # it was refused already
            hello = encode_frame(Frame(0, [Hello("r", "another", PROTOCOL)]))  # the name of the one that is served
            stranger.send(hello, zmq.NOBLOCK)
        await asyncio.to_thread(wait_until_true, lambda: doorkeeper_of(keyed_server).num_refused > 0, "it is refused")
        await check_served(keyed_server, client, listener)
        stranger.close()


@pytest.mark.parametrize("door", [0, 1], ids=["control plane", "beats"])
async def test_a_crowd_makes_room_by_itself_and_routers_stay(
    keyed_server: EngineServer, context: Context, door: int
) -> None:
    """The oldest of a crowd go: so many of one address stay, and so many of all; who is in is in."""
    address = addresses_of(keyed_server)[door]
    keeper = doorkeeper_of(keyed_server)
    async with connected(keyed_server, context, KEY) as (client, listener):
        await listener.until(lambda: bool(listener.beats))
        before = num_descriptors()
        with strangers(address, 2 * MAX_STRANGERS_PER_SOURCE) as first, strangers(address, 300, "127.0.0.2") as second:
            wait_until_true(lambda: keeper.num_refused >= 492 - MAX_STRANGERS, "they make room")
            wait_until_true(lambda: num_open(first + second) <= MAX_STRANGERS, "they are gone")
            assert num_open(second) == MAX_STRANGERS_PER_SOURCE
            assert num_open(first) == MAX_STRANGERS - MAX_STRANGERS_PER_SOURCE
            assert num_open(first[: 2 * MAX_STRANGERS_PER_SOURCE - 32] + second[:-MAX_STRANGERS_PER_SOURCE]) == 0
            await check_served(keyed_server, client, listener)
            late = EngineClient("decode-0", keyed_server.endpoint, router_id="late", context=context, key=KEY)
            heard = Listener()
            late.connect(heard)
            assert [name for name, _ in await asyncio.to_thread(receive, keyed_server, 1)] == ["late"]
            await heard.until(lambda: bool(heard.cards) and bool(heard.beats))
            late.close()
        wait_until_true(lambda: len(keeper._unproven) == 0, "those that left are forgotten")
        wait_until_true(lambda: num_descriptors() <= before, "descriptors are given back")
        await check_served(keyed_server, client, listener)


@pytest.mark.parametrize("door", [0, 1], ids=["control plane", "beats"])
@pytest.mark.parametrize("announced", [60 << 20, 1 << 62])
def test_who_is_not_in_yet_may_say_no_more_than_a_handshake(
    keyed_server: EngineServer, door: int, announced: int
) -> None:
    """ZeroMQ would keep a message of 64 MiB from anybody, and half a minute long."""
    with socket.create_connection(addresses_of(keyed_server)[door], TIMEOUT_S) as stranger:
        stranger.sendall(GREETING)
        assert stranger.recv(64)
        with contextlib.suppress(OSError):
            stranger.sendall(b"\x06" + struct.pack(">Q", announced) + b"x" * 2 * MAX_HANDSHAKE_BYTES)
        wait_until_true(lambda: is_ended(stranger), "it is sent away")


async def test_a_recorded_handshake_opens_nothing(keyed_server: EngineServer, context: Context) -> None:
    """All that a router said, once more: the engine takes part in no conversation that it had before."""
    host, port = addresses_of(keyed_server)[0]
    with Recorder((host, port)) as recorder:
        async with connected(keyed_server, context, KEY) as (client, listener):
            router = EngineClient("decode-0", recorder.endpoint, router_id="s", context=context, key=KEY)
            heard = Listener()
            router.connect(heard)
            assert isinstance((await asyncio.to_thread(receive, keyed_server, 1))[0][1], RouterJoined)
            await heard.until(lambda: bool(heard.cards))
            said = recorder.stop()
            assert len(said) > 600
            await heard.until(lambda: bool(heard.downs))
            router.close()
            for pause in (len(said), 10, 64, 64 + 202):  # at once; as ZeroMQ says it, step by step
                with socket.create_connection((host, port), TIMEOUT_S) as replay:
                    replay.sendall(said[:pause])
                    select.select([replay], [], [], TIMEOUT_S)  # its answer, or the end
                    with contextlib.suppress(OSError):
                        replay.sendall(said[pause:])
                        replay.shutdown(socket.SHUT_WR)
                    wait_until_true(lambda r=replay: is_ended(r), "it is sent away")  # type: ignore[misc]
            await check_served(keyed_server, client, listener)
    assert keyed_server.num_dropped == 0


def test_a_descriptor_that_is_anothers_by_now_is_left_alone(keyed_server: EngineServer) -> None:
    """ZeroMQ may have closed it, and the process has opened something else, when its number is read."""
    keeper = doorkeeper_of(keyed_server)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as elsewhere,
        open(os.devnull, "rb") as file,
    ):
        mine, theirs = socket.socketpair()
        with mine, theirs:
            for fd in (elsewhere.fileno(), mine.fileno(), file.fileno(), theirs.fileno() + 1000):
                keeper._take_in(fd)
    assert len(keeper._unproven) == keeper.num_refused == 0


def test_an_error_that_comes_again_and_again_fills_no_log_and_keeps_no_processor_busy(
    keyed_server: EngineServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it keep the engine from its end."""
    keeper = doorkeeper_of(keyed_server)
    num_turns = 0

    def turn() -> None:
        nonlocal num_turns
        num_turns += 1
        raise RuntimeError("no turn succeeds any more")

    monkeypatch.setattr(keeper, "_turn", turn)
    monkeypatch.setattr("pdkv.wire.doorkeeper._PAUSE_S", 600.0)
    keeper._refused("nobody", "its line is the only one for a while")
    with strangers(addresses_of(keyed_server)[0], 1):  # the turn before ends
        wait_until_true(lambda: num_turns > 0, "an error")
        keyed_server.close()
    assert num_turns == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_engine_that_is_besieged_ends_as_any_other() -> None:
    """Without a thread or a descriptor left, whatever strangers do meanwhile; also one that cannot listen."""
    threads, descriptors = threading.active_count(), num_descriptors()
    server = EngineServer("tcp://127.0.0.1:0", make_card(), key=KEY)
    door = addresses_of(server)[0]
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), strangers(door, 20):
                pass

    crowd = threading.Thread(target=come_and_go)
    crowd.start()
    try:
        with pytest.raises(Exception, match="cannot listen on"):
            EngineServer(server.endpoint, make_card(), key=KEY)
        wait_until_true(lambda: bool(doorkeeper_of(server)._unproven), "some are there")
    finally:
        server.close()
        stop.set()
        crowd.join()
    wait_until_true(lambda: (threading.active_count(), num_descriptors()) <= (threads, descriptors), "nothing is left")


class Recorder:
    """Passes one connection on to an engine, and keeps what its router says."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._said = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Recorder":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> bytes:
        """End the connection; what was said."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        return self._said

    def _run(self) -> None:
        router, _ = self._listener.accept()
        with router, socket.create_connection(self._target) as engine:
            while True:
                for readable in select.select([router, engine, self._listener], [], [])[0]:
                    if readable is self._listener:
                        return
                    data = readable.recv(1 << 16)
                    if readable is router:
                        self._said += data
                    (engine if readable is router else router).sendall(data)


@pytest.mark.parametrize("but", [0, 1])
def test_an_engine_for_which_there_are_no_threads_leaves_nothing(but: int) -> None:
    """ZeroMQ's context waited for its sockets for ever."""
    before = threading.active_count(), num_descriptors()
    with no_threads(but), pytest.raises(StartupError, match=r"decode-0 cannot listen on .*: no thread for "):
        EngineServer("tcp://127.0.0.1:0", make_card(), key=KEY)
    assert (threading.active_count(), num_descriptors()) == before
