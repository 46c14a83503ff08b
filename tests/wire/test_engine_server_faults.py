"""What a lying, damaged or newer peer sends costs what it is about; who sent it hears of it, and the wire goes on."""

import asyncio
import logging
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import zmq
from wire_rig import TIMEOUT_S, Context, Frame, connected, encode_frame, make_card, raw_peer, receive, tokens

from pdkv.errors import InvalidRequest, MalformedMessage, UnsendableMessage
from pdkv.sampling.params import SamplingParams
from pdkv.wire import engine_server as transport
from pdkv.wire.engine_server import EngineServer, RouterJoined, RouterLeft
from pdkv.wire.frames import FRAME_BYTES, decode_frame
from pdkv.wire.messages import (
    PROTOCOL,
    Abort,
    BlockStored,
    Continue,
    Disconnect,
    Failed,
    Hello,
    KVEvents,
    PromptLogprobs,
    Ready,
    Release,
    Submit,
    TokenLogprob,
    Tokens,
)

SUBMIT = Submit(request_id="q", transfer_id="t", attempt=0, prompt_token_ids=[1], params=SamplingParams(seed=1))


def raw_frame(number: int, *messages: object) -> bytes:
    return msgspec.msgpack.encode({"number": number, "messages": list(messages)})


def heard(peer: "zmq.Socket[bytes]") -> list[object]:
    """The messages of the next frame that has any."""
    while True:
        messages = decode_frame(peer.recv()).messages
        if messages:
            return list(messages)


def test_a_bad_message_fails_its_own_request_and_the_rest_of_its_frame_is_handled(
    server: EngineServer, context: Context
) -> None:
    """Finding 6: `choice=-5` ended the engine."""
    peer = raw_peer(context, server.endpoint)
    peer.send(encode_frame(Frame(0, [Hello("r", "e1", PROTOCOL)])))
    receive(server, 1)
    assert isinstance(heard(peer)[0], Ready)
    bad = msgspec.to_builtins(SUBMIT) | {"choice": -5}
    nobodys = {"type": "Release", "transfer_id": "t", "attempt": -1}
    peer.send(raw_frame(1, msgspec.to_builtins(Abort("a", 0)), bad, nobodys, msgspec.to_builtins(Abort("b", 0))))
    assert receive(server, 3) == [("r", Abort("a", 0)), ("r", Abort("q", 0)), ("r", Abort("b", 0))]
    (failed,) = heard(peer)
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.code, failed.param, failed.retryable) == (
        "q", InvalidRequest.code, "choice", False,
    )  # fmt: skip
    assert server.num_dropped == 2
    peer.close()


def test_a_router_that_reads_no_more_takes_no_memory_and_is_sent_away(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody reads was kept for ever. Others are served meanwhile, and it may come again when it reads."""
    monkeypatch.setattr(transport, "MAX_UNREAD_FRAMES", 100)
    endpoint = f"ipc://{tmp_path}/e"
    server = EngineServer(endpoint, make_card())
    deaf, other = (raw_peer(context, endpoint) for _ in range(2))
    deaf.rcvhwm = 1  # else its own end would take them all
    deaf.disconnect(endpoint)
    deaf.connect(endpoint)
    for name, peer in (("deaf", deaf), ("other", other)):
        peer.send(encode_frame(Frame(0, [Hello(name, "e1", PROTOCOL)])))
        receive(server, 1)
    long = Tokens("q", 0, 0, list(range(20_000)))
    num_sent = 0
    while ("deaf", RouterLeft("e1")) not in server.receive():
        server.send("deaf", [long])
        num_sent += 1
        assert num_sent < 1000, "nothing bounds what waits for it"
    server.send("deaf", [long])  # to nobody
    server.send("other", [tokens(1)])
    assert isinstance(heard(other)[0], Ready)
    assert heard(other) == [tokens(1)]
    frames = []
    while not any(isinstance(message, Disconnect) for frame in frames[-1:] for message in frame.messages):
        if deaf.poll(1):
            frames.append(decode_frame(deaf.recv()))
        server.receive()
    assert [frame.number for frame in frames] == list(range(len(frames))), "each is there, the farewell the last"
    deaf.send(encode_frame(Frame(0, [Hello("deaf", "e2", PROTOCOL)])))
    assert ("deaf", RouterJoined("e2")) in receive(server, 1)
    assert isinstance(heard(deaf)[0], Ready)
    for peer in (deaf, other):
        peer.close()
    server.close()


@pytest.mark.parametrize("broken", [b"\xc1", raw_frame(7)], ids=["no frame", "a gap"])
def test_a_router_whose_frame_is_lost_is_sent_away_and_told_which_one(
    server: EngineServer, context: Context, broken: bytes
) -> None:
    peer = raw_peer(context, server.endpoint)
    peer.send(encode_frame(Frame(0, [Hello("r", "e1", PROTOCOL)])))
    receive(server, 1)
    server.acknowledge()
    peer.send(encode_frame(Frame(1, [Abort("a", 0)])))
    peer.send(broken)
    peer.send(encode_frame(Frame(3, [Abort("b", 0)])))
    assert receive(server, 1) == [("r", Abort("a", 0))]
    while server.num_dropped + server.num_gaps < 2:
        assert server.poll(TIMEOUT_S)
        assert server.receive() == []
    server.acknowledge()
    assert server.receive() == [("r", RouterLeft("e1"))]
    frame = decode_frame(peer.recv())
    while not any(isinstance(message, Disconnect) for message in frame.messages):
        frame = decode_frame(peer.recv())
    assert (frame.handled, frame.begun) == (2, 3)
    peer.close()


async def test_a_client_that_is_sent_away_comes_again(server: EngineServer, context: Context) -> None:
    async with connected(server, context) as (client, listener):
        client._next_sent += 1  # a frame is lost
        client.send(Abort("q", 0))
        while server.num_gaps < 1:
            await asyncio.to_thread(server.poll, TIMEOUT_S)
            assert server.receive() == []
        server.acknowledge()
        await listener.until(lambda: bool(listener.downs))
        assert "came instead of" in listener.downs[0]
        received = await asyncio.to_thread(receive, server, 2)
        assert [type(event) for _, event in received] == [RouterLeft, RouterJoined]
        await listener.until(lambda: len(listener.cards) == 2)
        client.send(Abort("q", 1))
        assert await asyncio.to_thread(receive, server, 1) == [("r", Abort("q", 1))]


async def test_requests_whose_message_was_being_handled_are_named_when_the_connection_ends(
    server: EngineServer, context: Context
) -> None:
    async with connected(server, context) as (client, listener):
        server.acknowledge()
        client.send(Continue("handled", 0, [1]))
        assert await asyncio.to_thread(receive, server, 1)
        server.acknowledge()
        client.send(Continue("begun", 2, [1]))
        assert await asyncio.to_thread(receive, server, 1)
        server.send("r", [tokens(0)])  # what is begun has been told before
        await listener.until(lambda: bool(listener.frames))
        client.send(Continue("waiting", 0, [1]))
        await asyncio.sleep(0)
        server._socket.close(linger=0)
        await listener.until(lambda: bool(listener.downs))
        assert listener.suspects == [{("begun", 2)}]


async def test_a_bad_message_of_an_engine_fails_its_own_request(server: EngineServer, context: Context) -> None:
    async with connected(server, context) as (client, listener):
        peer = server._routers["r"]
        bad = msgspec.to_builtins(tokens(1)) | {"position": -4}
        nobodys = {"type": "KVEvents", "number": -1, "events": []}
        data = raw_frame(peer.next_sent, msgspec.to_builtins(tokens(0)), bad, nobodys, msgspec.to_builtins(tokens(2)))
        server._socket.send_multipart((peer.identity, data))
        peer.next_sent += 1
        await listener.until(lambda: bool(listener.frames))
        first, failed, last = listener.frames[0]
        assert (first, last) == (tokens(0), tokens(2))
        assert isinstance(failed, Failed)
        assert (failed.request_id, failed.code, failed.retryable) == ("q1", MalformedMessage.code, True)
        assert client.num_dropped == 2
        assert await asyncio.to_thread(receive, server, 1) == [("r", Abort("q1", 0))]
        assert listener.downs == []


async def test_messages_beyond_one_frame_arrive_whole_and_in_order_in_both_directions(
    server: EngineServer, context: Context
) -> None:
    keys = [bytes([i % 256]) * 16 for i in range(200_000)]
    events = KVEvents(1, [BlockStored(keys[i : i + 50_000], None) for i in range(0, len(keys), 50_000)])
    long = [Continue(f"q{i}", 0, [2**20] * (FRAME_BYTES // 10)) for i in range(12)]
    async with connected(server, context) as (client, listener):
        for message in long:
            client.send(message)
        assert await asyncio.to_thread(receive, server, 12) == [("r", message) for message in long]
        assert client._next_sent > 6
        assert server._routers["r"].next_received == client._next_sent
        server.send("r", [events, *map(tokens, range(3)), events, tokens(3)])
        await listener.until(lambda: sum(map(len, listener.frames)) == 6)
        assert [m for frame in listener.frames for m in frame] == [events, *map(tokens, range(3)), events, tokens(3)]
        assert len(listener.frames) > 1
        assert listener.downs == []


async def test_what_is_too_long_for_a_frame_fails_its_request_instead(
    server: EngineServer, context: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pdkv.wire.frames.MAX_MESSAGE_BYTES", 10_000)
    caplog.set_level(logging.CRITICAL)
    async with connected(server, context) as (client, listener):
        logprobs = PromptLogprobs.of([TokenLogprob(1, -1.0, 1)] * 2000)
        server.send("r", [tokens(0), Tokens("long", 3, 0, [1], prompt_logprobs=logprobs), tokens(1)])
        await listener.until(lambda: bool(listener.frames))
        first, failed, last = listener.frames[0]
        assert (first, last) == (tokens(0), tokens(1))
        assert isinstance(failed, Failed)
        assert (failed.request_id, failed.attempt, failed.code) == ("long", 3, UnsendableMessage.code)
        assert server.receive() == [("r", Abort("long", 3))]
        with pytest.raises(UnsendableMessage, match="Continue has"):
            client.send(Continue("q", 0, [2**20] * 3000))
        client.send(Release("t", 0))
        assert await asyncio.to_thread(receive, server, 1) == [("r", Release("t", 0))]


def test_one_connection_is_one_router_and_their_number_is_bounded(
    server: EngineServer, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that said Hello under ever new names made the engine report to all of them."""
    monkeypatch.setattr(transport, "MAX_ROUTERS", 2)
    peer, other, third = (raw_peer(context, server.endpoint) for _ in range(3))
    for i in range(5):
        peer.send(encode_frame(Frame(i, [Hello(f"r{i}", "e", PROTOCOL)])))
    received = receive(server, 9)
    assert [name for name, event in received if isinstance(event, RouterLeft)] == ["r0", "r1", "r2", "r3"]
    assert list(server._routers) == ["r4"]
    other.send(encode_frame(Frame(0, [Hello("other", "e", PROTOCOL)])))
    assert receive(server, 1) == [("other", RouterJoined("e"))]
    third.send(encode_frame(Frame(0, [Hello("third", "e", PROTOCOL)])))
    while server.num_dropped < 1:
        assert server.poll(TIMEOUT_S)
        assert server.receive() == []
    other.close()
    while "third" not in server._routers:  # ZeroMQ sees the other's end a little later
        third.send(encode_frame(Frame(0, [Hello("third", "e", PROTOCOL)])))
        assert server.poll(TIMEOUT_S)
        server.receive()
    for socket in (peer, third):
        socket.close()


async def check_beats(server: EngineServer, context: Context) -> None:
    """They come while the loop is at a long step, and say for how long."""
    async with connected(server, context) as (client, listener):
        server.poll(0.0)  # from now on the caller is busy
        await listener.until(lambda: any(beat.busy_s > 0 for beat in listener.beats))
        thread = asyncio.create_task(asyncio.to_thread(server.poll, TIMEOUT_S))
        num = len(listener.beats)
        await listener.until(lambda: any(beat.busy_s == 0 for beat in listener.beats[num:]))
        client.send(Abort("q", 0))
        assert await thread
        assert all(beat.epoch == server.card.epoch for beat in listener.beats)


async def test_beats_come_while_the_loop_is_at_a_long_step_and_say_how_long(
    server: EngineServer, context: Context
) -> None:
    await check_beats(server, context)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
async def test_beats_of_an_engine_on_another_host_come_by_a_port_of_its_own(address: str, context: Context) -> None:
    with closing(EngineServer(f"tcp://{address}:0", make_card())) as server:
        assert server.card.beats.startswith(f"tcp://{address}:")
        await check_beats(server, context)
