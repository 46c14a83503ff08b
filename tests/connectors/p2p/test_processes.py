"""The p2p connector between processes that are killed, stopped and restarted."""

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import p2p_peer
import pytest
import torch
from push_rig import WAIT_S, PushEngine, full_kv, make_layout, view
from traffic import ProcessHoldings, held_by_process, stop_process, wait_until_true, wait_until_within

from pdkv.connectors.p2p.connector import P2PConnector
from pdkv.wire.messages import EngineCard

torch.set_num_threads(1)

NUM_BLOCKS = 512
TIMEOUTS = {"timeout_s": "3", "handshake_timeout_s": "3"}


class Peer:
    """An engine in a process of its own."""

    def __init__(self, name: str, *, epoch: str = "1", tp: int = 1, block_size: int = 16, **options: str) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable, "-P", p2p_peer.__file__, name, epoch, str(tp), str(block_size), str(NUM_BLOCKS),
                json.dumps(options),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, "PYTHONPATH": str(Path(p2p_peer.__file__).parent)},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.card = _decode_card(self.process.stdout.readline())

    def __call__(self, command: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        return json.loads(self.process.stdout.readline())

    def become(self, epoch: str, tp: int, block_size: int) -> None:
        self.card = _decode_card(self("become", epoch, tp, block_size))

    def meet(self, *cards: EngineCard) -> None:
        self("meet", [base64.b64encode(msgspec.msgpack.encode(card)).decode() for card in cards])

    def want(self, name: str, blocks: list[int], num_tokens: int, start: int = 0) -> bytes:
        return base64.b64decode(self("want", name, blocks, num_tokens, start))

    def give(self, name: str, blocks: list[int], num_tokens: int, ticket: bytes, *, last: bool = True) -> None:
        self("give", name, blocks, num_tokens, base64.b64encode(ticket).decode(), last)

    def signal(self, number: int) -> None:
        if number == signal.SIGSTOP:
            stop_process(self.process.pid)
        else:
            self.process.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
        self.process.communicate(timeout=WAIT_S)


def _decode_card(text: str) -> EngineCard:
    return msgspec.msgpack.decode(base64.b64decode(text), type=EngineCard)


@pytest.fixture(scope="module")
def any_peer() -> Iterator[Peer]:
    """A peer that takes any shape and is never killed."""
    peer = Peer("any")
    yield peer
    peer.end()


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(*arguments: Any, **options: Any) -> Peer:
        peers.append(Peer(*arguments, **options))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()


@pytest.fixture
def make_engine() -> Iterator[Callable[..., PushEngine]]:
    made: list[PushEngine] = []

    def make(name: str, tp: int = 1, block_size: int = 16, **options: Any) -> PushEngine:
        layout = make_layout(tp, block_size, **p2p_peer.WIDE)
        made.append(PushEngine(P2PConnector, name, tp=tp, layout=layout, num_blocks=NUM_BLOCKS, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def send(engine: PushEngine, peer: Peer, name: str, blocks: list[int], target: list[int], num_tokens: int) -> None:
    """Begin to push to a peer."""
    ticket = peer.want(name, target, num_tokens)
    engine.give(view(name, kv="handoff", num_tokens=num_tokens, ticket=ticket), blocks, num_tokens)


def begin_to_push(engine: PushEngine, peer: Peer, num: int, blocks: list[int]) -> None:
    """t0, t1, … to a peer, which is stopped amid them: it never has them all."""
    tickets = [peer.want(f"t{i}", blocks, 16 * len(blocks)) for i in range(num)]
    for i, ticket in enumerate(tickets):
        engine.give(view(f"t{i}", kv="handoff", num_tokens=16 * len(blocks), ticket=ticket), blocks, 16 * len(blocks))
        if i == 0:
            peer.signal(signal.SIGSTOP)


def move(engine: PushEngine, peer: Peer, name: str = "t") -> None:
    """Push 100 tokens to a peer, which looks at them."""
    seed = sum(name.encode())
    source, target = [9, 3, 1, 50, 51, 52, 53], [4, 6, 5, 60, 61, 62, 63]
    engine.fill(source, full_kv(100, engine.layout, seed))
    send(engine, peer, name, source, target, 100)
    assert peer("outcome", "receiving", name)[0] == ""
    assert engine.outcome("sending", (name, 1)).code == ""
    peer("check", target, 100, seed, 0)


@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1)], ids=str)
def test_bytes_between_processes(
    any_peer: Peer, make_engine: Callable[..., PushEngine], tp: tuple[int, int], sizes: tuple[int, int]
) -> None:
    """F20."""
    prefill, decode = make_engine("p", tp[0], sizes[0]), any_peer
    decode.become(f"{tp} {sizes}", tp[1], sizes[1])
    prefill.meet(decode.card)
    kv = full_kv(150, prefill.layout, seed=5)
    source, target = [i * 7 % 64 for i in range(3, 13)], [i * 11 % 64 for i in range(5, 15)]
    prefill.fill(source, kv)
    ticket = decode.want("t", target, 150, 32)
    request = view("t", kv="handoff", num_tokens=150, ticket=ticket)
    prefill.give(request, source, 96, last=False)
    prefill.give(request, source, 150)
    assert decode("outcome", "receiving", "t")[0] == ""
    assert prefill.outcome("sending", ("t", 1)).code == ""
    decode("check", target, 150, 5, 32)


MANY = list(range(1, NUM_BLOCKS, 2))  # scattered: 32 MiB in buffers
LARGE = list(range(len(MANY)))  # as they lie: in messages that no socket takes at once
PAIRS = [block for block in range(NUM_BLOCKS) if block % 4 < 2]  # as they lie, too: in many messages
half_through = pytest.mark.parametrize("blocks", [MANY, LARGE], ids=["buffered", "direct"])


@half_through
def test_a_killed_receiver_fails_what_goes_to_it_and_nothing_else(
    start_peer: Callable[..., Peer], make_engine: Callable[..., PushEngine], blocks: list[int]
) -> None:
    """F5, F19: at once, not at the deadline."""
    prefill, dying, other = make_engine("p", timeout_s="1000"), start_peer("d", timeout_s="1000"), start_peer("e")
    prefill.meet(dying.card, other.card)
    move(prefill, dying)
    begin_to_push(prefill, dying, 20, blocks)
    dying.signal(signal.SIGKILL)
    codes = {prefill.outcome("sending", (f"t{i}", 1)).code for i in range(20)}
    assert codes <= {"", "peer_gone"}
    assert "peer_gone" in codes
    move(prefill, other)


@half_through
def test_a_killed_sender_fails_the_receive_and_leaves_the_blocks_alone(
    start_peer: Callable[..., Peer], make_engine: Callable[..., PushEngine], blocks: list[int]
) -> None:
    """F1, F19: at once, not at the deadline."""
    decode = make_engine("d", timeout_s="1000")
    for epoch in range(10):  # until one dies in the middle of a piece
        prefill = start_peer("p", epoch=str(epoch), timeout_s="1000")
        prefill.meet(decode.card)
        decode.meet(prefill.card)
        names = [f"t{epoch}.{i}" for i in range(20)]
        tickets = [decode.want(view(name, kv="await_peer", num_tokens=16 * len(blocks)), blocks) for name in names]
        for name, ticket in zip(names, tickets, strict=True):
            assert ticket is not None
            prefill.give(name, blocks, 16 * len(blocks), ticket)
        prefill.signal(signal.SIGKILL)
        prefill.process.wait(WAIT_S)
        failed = wait_for_a_failure(decode)
        decode.meet()
        for name in names:
            for worker in decode.workers:
                worker.drop((name, 1), "receive")
        decode.unread.clear()
        if failed:
            break
    assert failed == "peer_gone"
    before = decode.pools[0].clone()
    successor = start_peer("p", epoch="last")
    successor.meet(decode.card)
    decode.meet(successor.card)
    ticket = decode.want(view("u", kv="await_peer", num_tokens=40), [300, 302, 304])
    assert ticket is not None
    successor("fill", [9, 3, 1], 40, 7)
    successor.give("u", [9, 3, 1], 40, ticket)
    assert decode.outcome("receiving", ("u", 1)).code == ""
    decode.check([300, 302, 304], full_kv(40, decode.layout, 7))
    assert torch.equal(decode.pools[0][blocks[:100]], before[blocks[:100]])


def wait_for_a_failure(engine: PushEngine) -> str:
    """The code of the first receive that fails, empty if all are through or none was under way."""
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        for outcomes in engine.unread.values():
            if outcomes[0].code:
                return outcomes[0].code
        engine.woken.acquire(timeout=0.02)
    return ""


def test_a_stopped_receiver_is_a_timeout(
    start_peer: Callable[..., Peer], make_engine: Callable[..., PushEngine]
) -> None:
    """On a link that is there, and when one has to be made; when it goes on, it refuses what comes too late."""
    prefill, decode = make_engine("p", **TIMEOUTS), start_peer("d", **TIMEOUTS)
    prefill.meet(decode.card)
    move(prefill, decode)
    tickets = [decode.want(name, [0, 1, 2], 40) for name in ("on the link", "on a new one")]
    decode.signal(signal.SIGSTOP)
    for name, ticket in zip(("on the link", "on a new one"), tickets, strict=True):
        prefill.give(view(name, kv="handoff", num_tokens=40, ticket=ticket), [9, 3, 1], 40)
        assert prefill.outcome("sending", (name, 1)).code == "transfer_timeout"
    decode.signal(signal.SIGCONT)
    move(prefill, decode, "u")


def test_a_sender_that_is_stopped_in_the_middle_is_a_timeout(
    start_peer: Callable[..., Peer], make_engine: Callable[..., PushEngine]
) -> None:
    """What was posted is torn down with its pair: when the sender goes on, nothing of it lands."""
    decode, prefill = make_engine("d", timeout_s="0.5"), start_peer("p", timeout_s="20")
    prefill.meet(decode.card)
    decode.meet(prefill.card)
    for attempt in range(20):  # until one is stopped in the middle
        name = f"t{attempt}"
        ticket = decode.want(view(name, kv="await_peer", num_tokens=16 * len(MANY)), MANY)
        assert ticket is not None
        prefill.give(name, MANY, 16 * len(MANY), ticket)
        prefill.signal(signal.SIGSTOP)
        code = wait_for_a_failure(decode)
        if not code:
            decode.cancel((name, 1), "receive") if not decode.unread else None
        before = decode.pools[0].clone()
        prefill.signal(signal.SIGCONT)
        assert prefill("outcome", "sending", name)[0] in ("", "peer_gone", "transfer_timeout", "kv_not_found")
        assert torch.equal(decode.pools[0], before)
        decode.unread.clear()
        if code:
            break
    assert code == "transfer_timeout"


@half_through
@pytest.mark.parametrize("stopped", ["sender", "receiver"])
def test_a_cancel_does_not_wait_for_a_peer_that_is_stopped(
    start_peer: Callable[..., Peer], make_engine: Callable[..., PushEngine], stopped: str, blocks: list[int]
) -> None:
    """F1: the deadline is far away, the blocks are back at once."""
    engine, peer = make_engine("e", timeout_s="1000"), start_peer("f", timeout_s="1000")
    engine.meet(peer.card)
    peer.meet(engine.card)
    name, kind = "t", "sending" if stopped == "receiver" else "receiving"
    if stopped == "receiver":
        send(engine, peer, name, blocks, blocks, 16 * len(blocks))
    else:
        ticket = engine.want(view(name, kv="await_peer", num_tokens=16 * len(blocks)), blocks)
        assert ticket is not None
        peer.give(name, blocks, 16 * len(blocks), ticket)
    peer.signal(signal.SIGSTOP)
    engine.cancel((name, 1), "send" if stopped == "receiver" else "receive")
    assert engine.outcome(kind, (name, 1)).code in ("", "transfer_cancelled")
    before = engine.pools[0].clone()
    peer.signal(signal.SIGCONT)
    if stopped == "sender":
        assert peer("outcome", "sending", name)[0] in ("", "peer_gone", "kv_not_found")
        assert torch.equal(engine.pools[0], before)
        return
    move(engine, peer, "u")


def test_a_restarted_receiver_gets_a_new_group_and_the_old_one_leaves_nothing(
    start_peer: Callable[..., Peer], make_engine: Callable[..., PushEngine]
) -> None:
    """F5, F24."""
    prefill, other = make_engine("p", idle_s="0.2"), start_peer("e")
    held: list[ProcessHoldings] = []
    for epoch in "123":
        decode = start_peer("d", epoch=epoch)
        prefill.meet(decode.card, other.card)
        move(prefill, decode, f"t{epoch}")
        decode.signal(signal.SIGKILL)
        move(prefill, other, f"u{epoch}")
        decode.end()
        wait_until_true(lambda: not prefill.workers[0].lanes.num_lanes, "no lanes")
        held = held or [held_by_process()]
        wait_until_within(held[0])


def test_transfers_to_a_stopped_receiver_time_out_and_leave_no_thread(
    start_peer: Callable[..., Peer], make_engine: Callable[..., PushEngine]
) -> None:
    """F24."""
    prefill, decode = make_engine("p", timeout_s="2", idle_s="0.1"), start_peer("d")
    prefill.meet(decode.card)
    others = threading.enumerate()
    move(prefill, decode)
    begin_to_push(prefill, decode, 10, PAIRS)
    assert "transfer_timeout" in {prefill.outcome("sending", (f"t{i}", 1)).code for i in range(10)}
    wait_until_true(lambda: not set(threading.enumerate()) - set(others), "the lane's thread has ended", 10.0)
    decode.signal(signal.SIGCONT)


def test_a_hundred_transfers_between_two_processes(
    start_peer: Callable[..., Peer], make_engine: Callable[..., PushEngine]
) -> None:
    prefill, decode = make_engine("p", 2), start_peer("d", tp=1, block_size=32)
    prefill.meet(decode.card)
    for i in range(100):
        prefill.fill([2 * i, 2 * i + 1], full_kv(1 + i % 32, prefill.layout, seed=i))
        send(prefill, decode, f"t{i}", [2 * i, 2 * i + 1], [511 - i], 1 + i % 32)
    for i in range(100):
        assert decode("outcome", "receiving", f"t{i}")[0] == ""
        assert prefill.outcome("sending", (f"t{i}", 1)).code == ""
        decode("check", [511 - i], 1 + i % 32, i, 0)
