"""Both ends of the wire between router and engine, over real sockets, for tests of either."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import NamedTuple, TypeAlias

import zmq

from pdkv.router.engines.engine_client import EngineClient
from pdkv.wire.cluster_key import ClusterKey
from pdkv.wire.engine_server import EngineServer, Received, RouterJoined
from pdkv.wire.frames import AnyMessage, encode_message, encode_raw_frame
from pdkv.wire.kv import EngineCard, KVLayout
from pdkv.wire.messages import Beat, Tokens
from pdkv.wire.types import RequestKey

TIMEOUT_S = 30.0
KEY = ClusterKey(b"k" * 32)

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"


class Frame(NamedTuple):
    """What one end of the wire sends, as a test writes it."""

    number: int
    messages: list[AnyMessage]


def encode_frame(frame: Frame) -> bytes:
    return encode_raw_frame(frame.number, [encode_message(message) for message in frame.messages])


def make_card(engine: str = "decode-0", epoch: str = "e0") -> EngineCard:
    return EngineCard(
        engine=engine,
        epoch=epoch,
        role="decode",
        pid=os.getpid(),
        connector="memory",
        kind="pull",
        content_addressed=False,
        orders=["prefill_first"],
        model="m",
        layout=KVLayout(num_layers=1, num_kv_heads=1, head_size=8, block_size=16, dtype="float32", dtype_bytes=4),
        hash_block_size=16,
        num_blocks=8,
        max_model_len=128,
        max_num_seqs=4,
    )


class Listener:
    """Records what a client says, and lets a test wait for it."""

    def __init__(self) -> None:
        self.cards: list[EngineCard] = []
        self.downs: list[str] = []
        self.suspects: list[set[RequestKey]] = []
        self.beats: list[Beat] = []
        self.frames: list[Sequence[object]] = []
        self.changed = asyncio.Event()

    def engine_up(self, name: str, card: EngineCard) -> None:
        self.cards.append(card)
        self.changed.set()

    def engine_down(self, name: str, reason: str, suspects: Collection[RequestKey] = ()) -> None:
        self.downs.append(reason)
        self.suspects.append(set(suspects))
        self.changed.set()

    def engine_messages(self, name: str, messages: Sequence[object]) -> None:
        if isinstance(messages[0], Beat):
            self.beats.append(messages[0])
        else:
            self.frames.append(messages)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def receive(server: EngineServer, num: int) -> list[tuple[str, Received]]:
    """At least `num` messages and events."""
    received: list[tuple[str, Received]] = []
    while len(received) < num:
        assert server.poll(TIMEOUT_S), f"only {received} came"
        received.extend(server.receive())
    return received


@contextlib.asynccontextmanager
async def connected(
    server: EngineServer, context: Context, key: ClusterKey | None = None
) -> AsyncIterator[tuple[EngineClient, Listener]]:
    """A client that is up, and what it says; the server's side of the handshake is read."""
    client, listener = EngineClient("decode-0", server.endpoint, router_id="r", context=context, key=key), Listener()
    client.connect(listener)
    try:
        (joined,) = await asyncio.to_thread(receive, server, 1)
        assert joined[0] == "r"
        assert isinstance(joined[1], RouterJoined)
        await listener.until(lambda: bool(listener.cards))
        yield client, listener
    finally:
        client.close()


def raw_peer(context: Context, endpoint: str) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvtimeo = socket.sndtimeo = int(TIMEOUT_S * 1000)
    socket.connect(endpoint)
    return socket


def tokens(i: int) -> Tokens:
    return Tokens(f"q{i}", 0, i, [i])
