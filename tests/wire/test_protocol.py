"""Peers of other versions: what is new is skipped and counted, what is too old is kept out; nobody dies of either."""

import asyncio
import logging

import msgspec
import pytest
from wire_rig import Context, Listener, connected, make_card, raw_peer, receive

from pdkv.router.engines.engine_client import EngineClient
from pdkv.wire.engine_server import EngineServer
from pdkv.wire.frames import BadMessage, decode_message, encode_message, encode_raw_frame
from pdkv.wire.messages import OLDEST_PROTOCOL, PROTOCOL, Abort, Hello, Ready, Tokens

NEW = msgspec.Raw(msgspec.msgpack.encode({"type": "OfALaterVersion", "request_id": "q0", "attempt": 0, "grammar": "x"}))


def test_peers_say_their_version_and_those_of_the_first_one_need_not() -> None:
    assert OLDEST_PROTOCOL <= PROTOCOL
    hello = msgspec.msgpack.decode(msgspec.msgpack.encode(Hello("r", "e")))
    assert hello == {"type": "Hello", "router_id": "r", "epoch": "e"}
    assert decode_message(msgspec.msgpack.encode(hello)) == Hello("r", "e", protocol=1)
    assert decode_message(encode_message(Ready(make_card(), protocol=7))) == Ready(make_card(), protocol=7)


def test_a_message_of_an_unknown_type_is_nobody_s_and_a_new_field_is_not_seen() -> None:
    bad = decode_message(NEW)
    assert isinstance(bad, BadMessage)
    assert bad.key is None
    assert "OfALaterVersion" in bad.reason
    assert decode_message(msgspec.msgpack.encode({"type": "Abort", "request_id": "q", "attempt": 1, "why": "x"})) == (
        Abort("q", 1)
    )


def test_an_engine_skips_what_it_does_not_know(server: EngineServer, context: Context) -> None:
    peer = raw_peer(context, server.endpoint)
    peer.send(encode_raw_frame(0, [encode_message(Hello("r", "e")), NEW, encode_message(Abort("q1", 0))]))
    received = [message for _, message in receive(server, 2)]
    assert received[1:] == [Abort("q1", 0)]
    assert server.num_dropped == 1
    server.acknowledge()
    peer.send(encode_raw_frame(1, [encode_message(Abort("q2", 0))]))
    assert [message for _, message in receive(server, 1)] == [Abort("q2", 0)]
    peer.close()


def test_a_router_skips_what_it_does_not_know(server: EngineServer, context: Context) -> None:
    async def body(client: EngineClient, listener: Listener) -> None:
        (peer,) = server._routers.values()
        server._send(peer, [NEW, encode_message(Tokens("q0", 0, 0, [1]))])
        await listener.until(lambda: bool(listener.frames))
        assert [list(frame) for frame in listener.frames] == [[Tokens("q0", 0, 0, [1])]]
        assert client.num_dropped == 1
        assert listener.downs == []

    connected(server, context, body)


def test_an_engine_keeps_a_router_out_that_is_too_old(
    server: EngineServer, context: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pdkv.wire.engine_server.OLDEST_PROTOCOL", 2)
    old, new = raw_peer(context, server.endpoint), raw_peer(context, server.endpoint)
    old.send(encode_raw_frame(0, [encode_message(Hello("old", "e"))]))
    while not server.num_dropped:
        assert server.poll(30.0)
        assert server.receive() == []
    assert "router old is refused: it speaks protocol 1, and this engine 2 to" in caplog.text
    new.send(encode_raw_frame(0, [encode_message(Hello("new", "e", protocol=2))]))
    assert [router for router, _ in receive(server, 1)] == ["new"]
    old.close()
    new.close()


def test_a_router_keeps_an_engine_out_that_is_too_old(
    server: EngineServer, context: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pdkv.router.engines.engine_client.OLDEST_PROTOCOL", PROTOCOL + 1)

    async def main() -> None:
        client, listener = EngineClient("decode-0", server.endpoint, router_id="r", context=context), Listener()
        client.connect(listener)
        try:
            await asyncio.to_thread(receive, server, 1)
            async with asyncio.timeout(30):
                while not client.num_dropped:
                    await asyncio.sleep(0)
            assert not listener.cards
        finally:
            client.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert "decode-0 stays out: it speaks protocol" in caplog.text
