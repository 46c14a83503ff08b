"""The wire between real sockets: handshake, order, malformed frames, death, return, and a router's new epoch."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from no_descriptors import no_descriptors
from traffic import stop_process
from wire_rig import TIMEOUT_S, Context, Frame, Listener, connected, encode_frame, make_card, raw_peer, receive, tokens

from pdkv.errors import StartupError
from pdkv.router.engines import engine_client, health
from pdkv.router.engines.engine_client import EngineClient
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.wire.engine_server import EngineServer, RouterJoined, RouterLeft
from pdkv.wire.frames import PIECE_BYTES, decode_frame, encode_message, encode_raw_frame, split
from pdkv.wire.messages import PROTOCOL, Abort, Disconnect, Hello, Release, Resync, TokenLogprob, Tokens

NO_TEXT = encode_frame(Frame(0, [Abort("q", 0)])).replace(b"messages", b"messag\xff\xfe")
"""A frame whose text is no UTF-8: its error is not msgspec's own."""


async def test_handshake_and_messages_in_both_directions_keep_their_order(
    server: EngineServer, context: Context
) -> None:
    async with connected(server, context) as (client, listener):
        assert listener.cards == [server.card]
        for i in range(300):
            client.send(Abort(f"q{i}", i))
        got = await asyncio.to_thread(receive, server, 300)
        assert got == [("r", Abort(f"q{i}", i)) for i in range(300)]
        for i in range(500):
            server.send("r", [tokens(i), tokens(i)])
        await listener.until(lambda: len(listener.frames) == 500)
        assert listener.frames == [[tokens(i), tokens(i)] for i in range(500)]
        assert server.num_gaps == server.num_dropped == client.num_dropped == 0


async def test_what_a_router_sends_last_arrives_before_it_is_gone(server: EngineServer, context: Context) -> None:
    """Finding 8 of the router's review: what was queued at a stop was discarded."""
    async with connected(server, context) as (client, _):
        client.send(Abort("q", 0))
        client.close()
        assert await asyncio.to_thread(receive, server, 1) == [("r", Abort("q", 0))]


async def test_many_frames_under_a_busy_sender_do_not_lose_the_wake_up(server: EngineServer, context: Context) -> None:
    """Sends and receives interleave, so that the edge of ZeroMQ's descriptor may be swallowed by a send."""
    async with connected(server, context) as (client, listener):

        def echo() -> None:
            num = 0
            while num < 2000:
                assert server.poll(TIMEOUT_S)
                for router_id, message in server.receive():
                    assert isinstance(message, Abort)
                    server.send(router_id, [tokens(message.attempt)])
                    num += 1

        thread = threading.Thread(target=echo)
        thread.start()
        for i in range(2000):
            client.send(Abort("q", i))
            if i % 7 == 0:
                await asyncio.sleep(0)
        await listener.until(lambda: len(listener.frames) == 2000)
        await asyncio.to_thread(thread.join)


async def test_malformed_frames_and_strangers_are_counted_and_end_nothing(
    server: EngineServer, context: Context
) -> None:
    async with connected(server, context) as (client, _):
        stranger = raw_peer(context, server.endpoint)
        junk = [
            b"",
            b"\x80\x04junk",
            NO_TEXT,
            b"\x91" * 100_000,
            msgspec.msgpack.encode({"number": 0, "messages": [{"type": "NoSuchMessage"}]}),
        ]
        for data in junk:
            stranger.send(data)
        stranger.send_multipart([b"a", b"b", b"c"])
        stranger.send(encode_frame(Frame(0, [Abort("q", 0)])))  # well-formed, but it never said Hello
        while server.num_dropped < 7:
            assert server.poll(TIMEOUT_S)
            assert server.receive() == []
        stranger.close()
        client.send(Abort("q", 1))
        assert await asyncio.to_thread(receive, server, 1) == [("r", Abort("q", 1))]


def test_new_epoch_of_a_router_replaces_its_predecessor_only(server: EngineServer, context: Context) -> None:
    first, second, other = (raw_peer(context, server.endpoint) for _ in range(3))
    first.send(encode_frame(Frame(0, [Hello("r", "e1", PROTOCOL)])))
    assert receive(server, 1) == [("r", RouterJoined("e1"))]
    other.send(encode_frame(Frame(0, [Hello("s", "e1", PROTOCOL)])))
    assert receive(server, 1) == [("s", RouterJoined("e1"))]
    second.send(encode_frame(Frame(0, [Hello("r", "e2", PROTOCOL), Resync()])))
    assert receive(server, 2) == [("r", RouterJoined("e2")), ("r", Resync())]
    while Disconnect("another router now has the id r") not in decode_frame(first.recv()).messages:
        pass  # without it one that lives would wait for answers for ever
    first.send(encode_frame(Frame(1, [Abort("old", 0)])))  # the predecessor speaks no more
    other.send(encode_frame(Frame(1, [Abort("other", 0)])))
    received = receive(server, 1)
    while server.num_dropped < 1:
        assert server.poll(TIMEOUT_S)
        received += server.receive()
    assert received == [("s", Abort("other", 0))]
    for socket in (first, second, other):
        socket.close()


async def test_gap_in_the_frames_of_an_engine_is_its_failure_and_resets_the_connection(
    server: EngineServer, context: Context
) -> None:
    async with connected(server, context) as (_, listener):
        peer = server._routers["r"]
        server.send("r", [tokens(0)])
        peer.next_sent += 1  # one frame is lost
        server.send("r", [tokens(1)])
        await listener.until(lambda: bool(listener.downs))
        assert listener.frames == [[tokens(0)]]
        (again,) = await asyncio.to_thread(receive, server, 1)
        assert isinstance(again[1], RouterJoined)
        assert again[1].epoch != peer.epoch
        await listener.until(lambda: len(listener.cards) == 2)
        server.send("r", [tokens(2)])
        await listener.until(lambda: len(listener.frames) == 2)


@pytest.mark.parametrize("data", [b"junk", NO_TEXT], ids=["junk", "no UTF-8"])
async def test_malformed_frame_of_an_engine_is_counted_and_leaves_a_gap(
    server: EngineServer, context: Context, data: bytes
) -> None:
    async with connected(server, context) as (client, listener):
        peer = server._routers["r"]
        server._socket.send_multipart((peer.identity, data))
        peer.next_sent += 1
        server.send("r", [tokens(0)])
        await listener.until(lambda: bool(listener.downs))
        assert client.num_dropped == 1
        assert listener.frames == []


async def test_exception_of_the_listener_does_not_stop_the_frames_behind_it(
    server: EngineServer, context: Context
) -> None:
    async with connected(server, context) as (_, listener):
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, details: errors.append(details["exception"]))
        deliver = listener.engine_messages

        def fail_once(name: str, messages: Sequence[object]) -> None:
            listener.engine_messages = deliver  # type: ignore[method-assign]
            raise RuntimeError("a bug in the listener")

        listener.engine_messages = fail_once  # type: ignore[method-assign]
        server.send("r", [tokens(0)])
        server.send("r", [tokens(1)])
        await listener.until(lambda: listener.frames == [[tokens(1)]])
        assert [str(e) for e in errors] == ["a bug in the listener"]


async def test_listener_may_close_the_client_in_a_callback(server: EngineServer, context: Context) -> None:
    async with connected(server, context) as (client, listener):
        closed = asyncio.Event()

        def close(name: str, messages: Sequence[object]) -> None:
            client.close()
            closed.set()

        listener.engine_messages = close  # type: ignore[method-assign]
        server.send("r", [tokens(0)])
        server.send("r", [tokens(1)])
        async with asyncio.timeout(TIMEOUT_S):
            await closed.wait()
        assert listener.frames == []  # nothing is delivered behind the close


def test_server_hears_that_a_router_is_gone_and_sends_to_nobody(server: EngineServer, context: Context) -> None:
    peer = raw_peer(context, server.endpoint)
    peer.send(encode_frame(Frame(0, [Hello("r", "e1", PROTOCOL)])))
    assert receive(server, 1) == [("r", RouterJoined("e1"))]
    peer.close()
    while not server._events:  # the socket's end is seen by ZeroMQ's own thread, some time later
        server.send("r", [tokens(0)])
    assert server.receive() == [("r", RouterLeft("e1"))]
    server.send("r", [tokens(1)])
    server.send("nobody", [tokens(1)])
    assert server.receive() == []


def test_poll_wakes_for_an_extra_descriptor_and_after_a_timeout(server: EngineServer) -> None:
    read_fd, write_fd = os.pipe()
    assert not server.poll(0.0, read_fd)
    os.write(write_fd, b"x")
    assert server.poll(None, read_fd)
    assert not server.poll(0.001)
    os.close(read_fd)
    os.close(write_fd)


def test_poll_for_longer_than_its_socket_can_count_still_wakes(server: EngineServer) -> None:
    fd = os.eventfd(1)
    for timeout_s in (1e9, math.inf):
        assert server.poll(timeout_s, fd)
    os.close(fd)


def test_two_engines_on_one_endpoint_and_bad_endpoints_are_start_up_errors(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="decode-0 cannot listen on ipc:///nowhere"):
        EngineServer("ipc:///nowhere/at/all", make_card())
    server = EngineServer("tcp://127.0.0.1:0", make_card())
    with pytest.raises(StartupError, match="in use"):
        EngineServer(server.endpoint, make_card())
    server.close()
    server.close()


def test_no_descriptor_for_a_socket_is_a_start_up_error(tmp_path: Path) -> None:
    """It was a traceback in the log of an engine that started while it could open nothing. Found by a soak."""
    endpoint = f"ipc://{tmp_path}/engine"
    with (
        no_descriptors(),
        pytest.raises(StartupError, match=f"decode-0 cannot create a socket for .*{endpoint}.* open files"),
    ):
        EngineServer(endpoint, make_card())
    EngineServer(endpoint, make_card()).close()


ENGINE_PROGRAM = """
import sys
import msgspec
from pdkv.wire.kv import EngineCard
from pdkv.wire.messages import Release, Tokens
from pdkv.wire.engine_server import EngineServer

card = msgspec.msgpack.decode(bytes.fromhex(sys.argv[2]), type=EngineCard)
server = EngineServer(sys.argv[1], card)
print(server.endpoint, flush=True)
while True:
    server.poll(None)
    for router_id, message in server.receive():
        if isinstance(message, Release):
            server.send(router_id, [Tokens(message.transfer_id, 0, 0, [1])])
"""


async def test_death_by_sigkill_is_seen_at_once_and_the_next_incarnation_starts_clean(
    tmp_path: Path, context: Context
) -> None:
    endpoint = f"ipc://{tmp_path}/e"

    def start(epoch: str) -> "subprocess.Popen[bytes]":
        card = msgspec.msgpack.encode(make_card(epoch=epoch)).hex()
        return subprocess.Popen([sys.executable, "-c", ENGINE_PROGRAM, endpoint, card])

    client, listener = EngineClient("decode-0", endpoint, router_id="r", context=context), Listener()
    client.connect(listener)  # before there is anything to connect to
    engine = start("e0")
    try:
        await listener.until(lambda: len(listener.cards) == 1)
        client.send(Release("t0", 0))
        await listener.until(lambda: len(listener.frames) == 1)
        engine.kill()
        client.send(Release("lost", 0))
        await listener.until(lambda: bool(listener.downs))
        assert client.card is None
        await asyncio.to_thread(engine.wait)
        engine = start("e1")
        await listener.until(lambda: len(listener.cards) == 2)
        client.send(Release("t1", 0))
        await listener.until(lambda: listener.frames[-1] == [Tokens("t1", 0, 0, [1])])
        assert [c.epoch for c in listener.cards] == ["e0", "e1"]
        assert "lost" not in [m.request_id for frame in listener.frames[1:] for m in frame]  # type: ignore[attr-defined]
    finally:
        client.close()
        engine.kill()
        await asyncio.to_thread(engine.wait)


async def test_a_remote_engine_that_is_stopped_is_gone_after_its_heartbeat(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(engine_client, "HEARTBEAT_TIMEOUT_S", 2.0)
    card = msgspec.msgpack.encode(make_card()).hex()
    listener = Listener()
    arguments = [sys.executable, "-c", ENGINE_PROGRAM, "tcp://127.0.0.1:0", card]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as engine, ExitStack() as stack:
        stack.callback(engine.kill)
        assert engine.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            endpoint = (await asyncio.to_thread(engine.stdout.readline)).strip()
        client = EngineClient("decode-0", endpoint, router_id="r", context=context)
        stack.callback(client.close)
        client.connect(listener)
        await listener.until(lambda: bool(listener.cards))
        num_downs = len(listener.downs)
        stop_process(engine.pid)
        await listener.until(lambda: len(listener.downs) > num_downs)
        num_cards = len(listener.cards)
        engine.send_signal(signal.SIGCONT)
        await listener.until(lambda: len(listener.cards) > num_cards)


async def test_a_remote_engine_that_is_stopped_is_a_suspect_long_before_it_is_gone(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "IDLE_SILENT_TICKS", health.SILENT_TICKS)
    card = msgspec.msgpack.encode(make_card()).hex()
    dispatcher = Dispatcher()
    arguments = [sys.executable, "-c", ENGINE_PROGRAM, "tcp://127.0.0.1:0", card]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as engine, ExitStack() as stack:
        stack.callback(engine.kill)
        stack.callback(dispatcher.close)
        assert engine.stdout is not None
        endpoint = (await asyncio.to_thread(engine.stdout.readline)).strip()
        client = EngineClient("decode-0", endpoint, router_id="r", context=context)
        dispatcher.add_backend(client, "decode")
        dispatcher.connect()
        state = dispatcher.fleet.engines["decode-0"]
        await until(lambda: state.health.beats)  # the first one came
        stop_process(engine.pid)
        await until(lambda: state.is_silent)
        assert state.life == "ready"
        engine.send_signal(signal.SIGCONT)
        await until(lambda: not state.suspicion)


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop go on until it holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each time that a client's callback runs, the bytes that it says to have handled."""
    seen: list[int] = []
    drain, receive_one = EngineClient._drain, EngineClient._receive

    def counting_drain(self: EngineClient) -> None:
        seen.append(0)
        drain(self)

    def counting_receive(self: EngineClient) -> int:
        received = receive_one(self)
        seen[-1] += received
        return received

    monkeypatch.setattr(EngineClient, "_drain", counting_drain)
    monkeypatch.setattr(EngineClient, "_receive", counting_receive)
    return seen


def with_logprobs(i: int) -> Tokens:
    top = tuple((token, -1.5) for token in range(20))
    return Tokens(f"q{i}", 0, i, [i], [TokenLogprob(i, -0.5, 1, top)])


async def test_a_long_frame_is_decoded_and_delivered_in_pieces(
    server: EngineServer, context: Context, turns: list[int]
) -> None:
    """A frame of tokens with 20 alternatives each took 100 ms in one callback."""
    messages = [with_logprobs(i) for i in range(3000)]
    size = len(encode_raw_frame(0, [encode_message(message) for message in messages]))
    async with connected(server, context) as (_, listener):
        server.send("r", messages)
        server.send("r", [tokens(1)])
        await listener.until(lambda: listener.frames[-1:] == [[tokens(1)]])
        assert [message for frame in listener.frames[:-1] for message in frame] == messages
        assert size / (2 * PIECE_BYTES) < len(listener.frames) < size / PIECE_BYTES + 4
        assert max(turns) <= 2 * PIECE_BYTES
        assert sum(turns) > 0.9 * size  # a piece may have a part of a message more than it says
        assert listener.downs == []


async def test_many_frames_that_wait_are_not_handled_in_one_turn(
    server: EngineServer, context: Context, turns: list[int]
) -> None:
    async with connected(server, context) as (_, listener):
        frame = [tokens(i) for i in range(100)]
        for _ in range(500):
            server.send("r", frame)
        await listener.until(lambda: len(listener.frames) == 500)
        assert listener.frames == [frame] * 500
        assert max(turns) <= 2 * PIECE_BYTES


async def test_a_bad_message_in_a_long_frame_is_dropped_alone(server: EngineServer, context: Context) -> None:
    bad = msgspec.Raw(b"\xa1x")
    async with connected(server, context) as (client, listener):
        encoded = [encode_message(tokens(i)) for i in range(3000)]
        encoded[1500] = bad
        socket = server._socket
        (peer,) = server._peers.values()
        socket.send_multipart([peer.identity, encode_raw_frame(peer.next_sent, encoded)])
        peer.next_sent += 1
        await listener.until(lambda: sum(map(len, listener.frames)) == 2999)
        got = [message for frame in listener.frames for message in frame]
        assert got == [tokens(i) for i in range(3000) if i != 1500]
        assert client.num_dropped == 1


async def test_what_an_engine_said_last_is_heard_before_its_death(
    server: EngineServer, context: Context, turns: list[int]
) -> None:
    """However much it is: it takes several turns."""
    messages = [with_logprobs(i) for i in range(2500)]
    assert len(list(split(map(encode_message, messages)))) == 1, "one frame: it is here as a whole, or not"
    async with connected(server, context) as (_, listener):
        server.send("r", messages)
        await listener.until(lambda: bool(listener.frames))
        server.close()  # while the loop stands still
        assert sum(map(len, listener.frames)) < len(messages), "there is more to be delivered"
        await listener.until(lambda: bool(listener.downs))
        assert [message for frame in listener.frames for message in frame] == messages
        assert max(turns) <= 2 * PIECE_BYTES
