"""Engines of the versions that there have been, as bytes: what one of version 2 says is read, 1 is refused."""

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest
import zmq
from wire_rig import TIMEOUT_S, Context, Listener, raw_peer, receive

from pdkv.router.engines.engine_client import EngineClient
from pdkv.wire.engine_server import EngineServer
from pdkv.wire.frames import decode_frame, encode_message, encode_raw_frame
from pdkv.wire.kv import EngineCard, KVGroup, KVHandoff, KVLayout
from pdkv.wire.messages import (
    PROTOCOL,
    Allocated,
    Beat,
    BlockRemoved,
    BlockStored,
    CacheCleared,
    Disconnect,
    EngineToRouter,
    Failed,
    Finished,
    HandedOff,
    Hello,
    KVEvents,
    KVReady,
    Loaded,
    PromptLogprobs,
    Ready,
    Release,
    TokenLogprob,
    Tokens,
    Trial,
)
from pdkv.wire.reports import BlockCounts, ConnectorStats, LoadReport, SourceCounts, TierHeld
from pdkv.wire.tiers import CacheAnswer, TierAnswer, TierEvents, TierPart

GROUPS = (KVGroup((0, 2)), KVGroup((1,), 64))
LAYOUT = KVLayout(1, 1, 8, 16, "float32", 4, 2, GROUPS, ((0.5, 1.0),) * 3, "cachegen-8", 1, "none")
LOGPROB = TokenLogprob(7, -0.5, 1, ((7, -0.5), (9, -1.5)))
SOURCES = SourceCounts(1, 2, 3, 4, 5)
STATS = ConnectorStats(*range(1, 13), 0.5, 1, 2, {"d": "tcp"}, TierHeld(1, 2, 3, 4, {5: 6}), 0.5, 0.25, 2.0, 1.0, 3)

SAID: list[EngineToRouter] = [
    Ready(
        EngineCard(
            engine="p", epoch="e", role="prefill", pid=7, connector="nixl", kind="pull", content_addressed=False,
            orders=["prefill_first"], model="m", layout=LAYOUT, hash_block_size=16, num_blocks=8, max_model_len=128,
            max_num_seqs=4, tp=2, pp=1, rank_blobs=[b"a", b"b"], rank_pids=[7, 8], beats="tcp://h:2",
            max_num_batched_tokens=512, version="0.1.0", wire_versions={"nixl": 3}, kv_checksum="sample", lends=True,
        ),
        protocol=2,
    ),
    Tokens("q", 1, 0, [7, 8], [LOGPROB, LOGPROB], PromptLogprobs.of([None, LOGPROB]), SOURCES),
    Finished("q", 1, "stop", SOURCES, 2, 0.25, 1.5),
    HandedOff("q", 1, SOURCES, KVHandoff("q", 1, "t", "p", "e", 33, b"\x00\xff", lent=True), 0.25, 1.5),
    Failed("q", 1, "timeout", "it took too long", retryable=True, param="timeout_s"),
    Allocated("q", 1, 16, 33, b"ticket"),
    Loaded("q", 1, ok=False, code="peer_gone", num_bytes=5, seconds=0.5),
    KVReady("q", 1, ok=True, code="peer_gone", ticket=2),
    Release("t", 1, lent=True),
    Trial("q", 1, begins=True),
    KVEvents(3, [CacheCleared(), BlockStored([b"k"], b"j"), BlockRemoved([b"i"])], more=True),
    TierEvents("disk", True, 16, [b"k"], [b"j"], [TierPart("0-host", 9)], 4096, "host"),
    CacheAnswer("o", [TierAnswer("0-host", 32, 2, "store_full", "it is full")], ["pool", "0-host"]),
    LoadReport(
        1, 2, BlockCounts(21, 1, 2, 3, 4, 11), SOURCES, 3, 4, 5, 6, 0.5, 7, 8, 9, 10, {"nixl": STATS}, "no peer", 11
    ),
    Disconnect("a frame is missing"),
    Beat("e", 0.5, 0.25),
]  # fmt: skip
"""What the engine of version 2 said, one message a frame."""


def recorded(protocol: int) -> list[bytes]:
    """Frames as they were sent: of version 1 a router's Hello and an engine's Ready, of version 2 what SAID has."""
    lines = (Path(__file__).parent / "recorded" / f"protocol_{protocol}.txt").read_text().splitlines()
    return [bytes.fromhex(line) for line in lines]


def test_all_that_an_engine_of_version_2_says_is_read() -> None:
    frames = [decode_frame(data) for data in recorded(2)]
    assert [message for frame in frames for message in frame.messages] == SAID


def test_a_router_of_version_1_is_refused_with_both_numbers(
    server: EngineServer, context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = raw_peer(context, server.endpoint), raw_peer(context, server.endpoint)
    old.send(recorded(1)[0])
    while not server.num_dropped:
        assert server.poll(TIMEOUT_S)
        assert server.receive() == []
    assert f"router r is refused: it speaks protocol 1, but this engine {PROTOCOL}" in caplog.text
    new.send(encode_raw_frame(0, [encode_message(Hello("new", "e", protocol=2))]))
    assert [router for router, _ in receive(server, 1)] == ["new"]
    old.close()
    new.close()


@pytest.mark.parametrize("card", ["as it was", "unreadable"])
def test_an_engine_of_version_1_is_refused_with_both_numbers(
    context: Context, tmp_path: Path, card: str, caplog: pytest.LogCaptureFixture
) -> None:
    ready = recorded(1)[1]
    if card == "unreadable":
        frame = msgspec.msgpack.decode(ready)
        frame["messages"][0]["card"] = {"name": "decode-0"}
        frame["messages"] *= 3  # which is one line of the log all the same
        ready = msgspec.msgpack.encode(frame)
    engine = context.socket(zmq.ROUTER)
    engine.rcvtimeo = int(TIMEOUT_S * 1000)
    engine.bind(f"ipc://{tmp_path}/old")

    async def main() -> None:
        client, listener = EngineClient("decode-0", f"ipc://{tmp_path}/old", router_id="r", context=context), Listener()
        client.connect(listener)
        try:
            identity, _ = await asyncio.to_thread(engine.recv_multipart)
            engine.send_multipart((identity, ready))
            async with asyncio.timeout(TIMEOUT_S):
                while not client.num_dropped:
                    await asyncio.sleep(0)
            assert not listener.cards
        finally:
            client.close()
            engine.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert caplog.text.count(f"decode-0 is refused: it speaks protocol 1, and this router {PROTOCOL}") == 1
