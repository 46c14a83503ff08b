"""Frames as no peer in order would send them: valid messages with one thing wrong, damaged bytes, and garbage."""

import contextlib
import random
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from pdkv.connectors.p2p.wire import CHANNEL
from pdkv.connectors.peer import auth as peer_auth
from pdkv.sampling.params import SamplingParams
from pdkv.wire.frames import decode_frame
from pdkv.wire.kv import EngineCard, KVHandoff, KVLayout
from pdkv.wire.messages import (
    PROTOCOL,
    Abort,
    Allocated,
    AskReport,
    Beat,
    BlockRemoved,
    BlockStored,
    CacheCleared,
    Continue,
    Disconnect,
    EngineToRouter,
    Failed,
    Finished,
    HandedOff,
    Hello,
    KVEvents,
    KVReady,
    KVTicket,
    Loaded,
    Peers,
    PromptLogprobs,
    Ready,
    Release,
    Resync,
    RouterToEngine,
    Submit,
    TokenLogprob,
    Tokens,
)
from pdkv.wire.reports import BlockCounts, LoadReport, SourceCounts

FRAMES_PER_CONNECTION = 50
MESSAGES_PER_NAME = 12
ANSWER_S = 60.0
"""An engine that lives answers a Hello within this, however busy it is."""

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_size=8, block_size=16, dtype="float32", dtype_bytes=4)
CARD = EngineCard(
    engine="fuzz-0", epoch="f0", role="any", pid=1, connector="memory", kind="pull", content_addressed=False,
    orders=["prefill_first"], model="m", layout=LAYOUT, hash_block_size=16, num_blocks=8, max_model_len=128,
    max_num_seqs=4, rank_blobs=[b"blob"], rank_pids=[1],
)  # fmt: skip
HANDOFF = KVHandoff("q", 0, "t", "fuzz-0", "f0", 3, b"\x90")
PARAMS = SamplingParams(
    temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, logit_bias={7: 1.0}, seed=1, max_tokens=3,
    stop=("x",), stop_token_ids=(2,), logprobs=2, prompt_logprobs=1,
)  # fmt: skip

TO_ENGINE: Sequence[RouterToEngine] = (
    Submit(request_id="q", transfer_id="t", attempt=0, prompt_token_ids=[5, 6, 7], params=PARAMS, timeout_s=2.0),
    Submit(request_id="p", transfer_id="t", attempt=0, prompt_token_ids=[5, 6, 7, 8] * 8, params=PARAMS, timeout_s=2.0,
           until="first_token", kv="handoff"),
    Submit(request_id="d", transfer_id="t", attempt=1, prompt_token_ids=[5, 6, 7], params=PARAMS, timeout_s=2.0,
           kv="await_peer", handoff=HANDOFF, conditional=True, ticket=b"ticket", cache_salt="s", priority=3),
    Abort("q", 0), KVTicket("p", 0, b"ticket"), Continue("d", 1, [9]), HANDOFF, KVReady("d", 1, ok=False, code="x"),
    Release("t", 0), Peers([CARD]), Resync(), Hello("fuzz", "e", PROTOCOL), AskReport(1),
)  # fmt: skip

TO_ROUTER: Sequence[EngineToRouter] = (
    Tokens("q", 0, 0, [5], [TokenLogprob(5, -0.5, 1, ((5, -0.5),))],
           PromptLogprobs.of([None, TokenLogprob(1, -1.0, 2)]), SourceCounts(3)),
    Finished("q", 0, "stop", SourceCounts(3), 2), HandedOff("q", 0, SourceCounts(3), HANDOFF),
    Failed("q", 0, "internal_error", "text", retryable=True), Allocated("q", 0, 0, 3, b"ticket"),
    Loaded("q", 0, ok=True, num_bytes=5, seconds=0.1), KVReady("q", 0, ok=True), Release("t", 0),
    KVEvents(1, [CacheCleared(), BlockStored([b"k" * 16], None), BlockRemoved([b"k" * 16])]),
    LoadReport(1, 2, BlockCounts(10, 4, 3, 2, 1, 0)), Ready(CARD, PROTOCOL), Beat("f0", 0.1), Disconnect("fuzz"),
)  # fmt: skip

GREETINGS: Sequence[Any] = (
    peer_auth.Hello(
        peer_auth.VERSION, CHANNEL, b"n" * 32, peer_auth.Party("p", "1", 0), peer_auth.Party("d", "1", 0), 5.0
    ),
    peer_auth.Challenge(b"n" * 32, b"p" * 32), peer_auth.Answer(b"p" * 32),
)  # fmt: skip

HOSTILE: Sequence[Any] = (
    -1, -5, 0, 1, 127, 128, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63),
    0.0, -1.0, 1e308, float("nan"), float("inf"), -float("inf"),
    "", "x", "\U0010ffff" * 70, "x" * 5000, b"", b"\xff" * 5000, None, True, False,
    [], {}, [[]], [None], {"type": "Submit"}, {"": {"": {}}}, [-1], [2**31], [2**63] * 3, [0] * 5000, list(range(300)),
)  # fmt: skip


class Mutator:
    """Draws frames from a seed."""

    def __init__(self, messages: Sequence[RouterToEngine | EngineToRouter], seed: int) -> None:
        self._rng = random.Random(seed)
        self._messages = messages
        self._num_drawn = 0

    def frame(self, number: int, *, whole: bool = False) -> bytes:
        """One hostile frame. `whole`: only its messages are, since one that cannot be read is a connection's last."""
        rng = self._rng
        document: Any = {"number": number, "messages": [self._message() for _ in range(rng.randint(1, 4))]}
        if whole:
            return msgspec.msgpack.encode(document)
        if rng.random() < 0.2:
            document = self._mutated(document)
        data = msgspec.msgpack.encode(document)
        return self._damaged(data) if rng.random() < 0.5 else data

    def greeting(self) -> bytes:
        """What a stranger may say to a rank's link port instead of a greeting."""
        rng = self._rng
        value = msgspec.to_builtins(rng.choice(GREETINGS), builtin_types=(bytes,))
        body = msgspec.msgpack.encode(self._mutated(value) if rng.random() < 0.8 else value)
        data = struct.pack("<H", len(body) & 0xFFFF) + body
        return self._damaged(data) if rng.random() < 0.5 else data

    def _message(self) -> Any:
        rng = self._rng
        self._num_drawn += 1
        names = f"-{self._num_drawn // MESSAGES_PER_NAME}"  # an id that has ended is dropped for ever
        message = _renamed(msgspec.to_builtins(rng.choice(self._messages), builtin_types=(bytes,)), names)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            message = self._mutated(message)
        return message

    def _mutated(self, value: Any) -> Any:
        """The value with one place of it changed: replaced, left out, doubled, or of another message."""
        rng = self._rng
        if isinstance(value, dict) and value and rng.random() < 0.9:
            key = rng.choice(list(value))
            if rng.random() < 0.1:
                return {k: v for k, v in value.items() if k != key}
            return {**value, key: self._mutated(value[key])}
        if isinstance(value, list) and value and rng.random() < 0.8:
            i = rng.randrange(len(value))
            if rng.random() < 0.2:
                return value * rng.randint(2, 50)
            return [*value[:i], self._mutated(value[i]), *value[i + 1 :]]
        return rng.choice(HOSTILE)

    def _damaged(self, data: bytes) -> bytes:
        rng = self._rng
        bad = bytearray(data)
        match rng.randrange(6):
            case 0:
                for _ in range(rng.randint(1, 8)):
                    bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
            case 1:
                del bad[rng.randrange(len(bad)) :]
            case 2:
                bad += rng.randbytes(rng.randint(1, 64))
            case 3:
                i = rng.randrange(len(bad))
                bad[i : i + rng.randint(1, 16)] = rng.randbytes(rng.randint(0, 16))
            case 4:
                bad = bytearray(rng.choice((b"\x91", b"\x81\xa1a", b"\xdd\xff\xff\xff\xff")) * rng.randint(1, 2000))
            case _:
                bad = bytearray(rng.randbytes(rng.randint(0, 200)))
        return bytes(bad)


def _renamed(value: Any, suffix: str) -> Any:
    """The message with other ids of requests and transfers."""
    if isinstance(value, dict):
        return {k: v + suffix if k in ("request_id", "transfer_id") else _renamed(v, suffix) for k, v in value.items()}
    return value


def attack_engine(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, num_frames: int, seed: int) -> None:
    """Send so many frames to an engine, on ever new connections; most of them say Hello first.

    Raises:
        AssertionError: the engine does not answer any more.
    """
    mutator, rng = Mutator(TO_ENGINE, seed), random.Random(seed)
    sent = 0
    while sent < num_frames:
        with _connect(context, endpoint) as socket:
            number = 0
            if rng.random() < 0.9:
                _say_hello(socket, f"fuzz-{seed}", f"{sent}")
                number = 1
            whole = rng.random() < 0.8
            for _ in range(min(FRAMES_PER_CONNECTION if whole else 3, num_frames - sent)):
                data = mutator.frame(number, whole=whole)
                socket.send_multipart([data] if whole or rng.random() < 0.9 else [data, data])
                sent += 1
                number += 1
                if number % 5 == 0:  # let it step
                    while socket.poll(1):
                        socket.recv_multipart()
        with _connect(context, endpoint) as socket:  # behind all that: what is in order is answered
            _say_hello(socket, f"fuzz-{seed}", f"{sent} checked")


def attack_door(address: tuple[str, int], num_greetings: int, seed: int) -> None:
    """Say so many wrong things to a rank's link port, each on a connection of its own."""
    mutator = Mutator((), seed)
    for _ in range(num_greetings):
        with socket.create_connection(address, timeout=ANSWER_S) as stranger:
            # Ends with a reset: else so many connections would use up the ports of the host.
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(ConnectionError):  # refused in the middle, which is right
                stranger.sendall(mutator.greeting())


def _connect(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.DEALER)
    socket.linger = -1  # what was sent arrives
    socket.connect(endpoint)
    return socket


def _say_hello(socket: "zmq.Socket[bytes]", router_id: str, epoch: str) -> None:
    socket.send(
        msgspec.msgpack.encode({"number": 0, "messages": [msgspec.to_builtins(Hello(router_id, epoch, PROTOCOL))]})
    )
    assert socket.poll(int(ANSWER_S * 1000)), f"no answer to the Hello of {router_id}"
    first = decode_frame(socket.recv()).messages[0]
    assert isinstance(first, Ready), first
