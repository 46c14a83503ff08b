"""Peers of later versions: what is new is skipped and counted."""

import tracemalloc

import msgspec
from wire_rig import Context, connected, make_card, raw_peer, receive

from pdkv.wire.engine_server import EngineServer
from pdkv.wire.frames import BadMessage, decode_message, encode_message, encode_raw_frame
from pdkv.wire.messages import PROTOCOL, Abort, Hello, Ready, Tokens

NEW = msgspec.Raw(msgspec.msgpack.encode({"type": "OfALaterVersion", "request_id": "q0", "attempt": 0, "grammar": "x"}))


def test_peers_say_their_version_and_those_of_the_first_one_need_not() -> None:
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


def test_a_type_that_is_no_name_is_not_built() -> None:
    """A million empty lists are a megabyte on the wire and 64 of memory."""
    lists = b"\xdd" + (1_000_000).to_bytes(4, "big") + b"\x90" * 1_000_000
    message = b"\x83" + b"".join(map(msgspec.msgpack.encode, ("request_id", "q", "attempt", 1, "type"))) + lists
    tracemalloc.start()
    try:
        bad = decode_message(message)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(bad, BadMessage)
    assert (bad.key, bad.param) == (("q", 1), "type")
    assert most < len(message)


def test_an_engine_skips_what_it_does_not_know(server: EngineServer, context: Context) -> None:
    peer = raw_peer(context, server.endpoint)
    peer.send(encode_raw_frame(0, [encode_message(Hello("r", "e", PROTOCOL)), NEW, encode_message(Abort("q1", 0))]))
    received = [message for _, message in receive(server, 2)]
    assert received[1:] == [Abort("q1", 0)]
    assert server.num_dropped == 1
    server.acknowledge()
    peer.send(encode_raw_frame(1, [encode_message(Abort("q2", 0))]))
    assert [message for _, message in receive(server, 1)] == [Abort("q2", 0)]
    peer.close()


async def test_a_router_skips_what_it_does_not_know(server: EngineServer, context: Context) -> None:
    async with connected(server, context) as (client, listener):
        (peer,) = server._routers.values()
        server._send(peer, [NEW, encode_message(Tokens("q0", 0, 0, [1]))])
        await listener.until(lambda: bool(listener.frames))
        assert [list(frame) for frame in listener.frames] == [[Tokens("q0", 0, 0, [1])]]
        assert client.num_dropped == 1
        assert listener.downs == []
