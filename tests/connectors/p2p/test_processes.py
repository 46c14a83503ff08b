"""The p2p connector between processes that are killed, stopped and restarted."""

import base64
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import p2p_peer
import pytest
import torch
from nursery import Forked
from push_rig import WAIT_S, PushEngine, full_kv, make_layout, view
from traffic import ProcessHoldings, held_by_process, wait_until_true, wait_until_within

from pdkv.connectors.base import TransferKey
from pdkv.connectors.p2p.connector import P2PConnector
from pdkv.connectors.p2p.link import LinkEnd
from pdkv.connectors.peer.push_worker import RECEIVE_TIMEOUT_S
from pdkv.testing import VirtualClock
from pdkv.wire.kv import EngineCard

torch.set_num_threads(1)

NUM_BLOCKS = 512
PATIENT = {"timeout_s": "1000", "handshake_timeout_s": "60"}
"""Nothing fails by these but what a test's clock makes fail."""


class Peer(Forked):
    """An engine in a process of its own."""

    def __init__(self, name: str, *, epoch: str = "1", tp: int = 1, block_size: int = 16, **options: str) -> None:
        super().__init__(p2p_peer.__file__, [name, NUM_BLOCKS, {**PATIENT, **options}, epoch, tp, block_size])
        self.card = _decode_card(self.said)

    def become(self, epoch: str, tp: int, block_size: int) -> None:
        self.card = _decode_card(self.ask("become", epoch, tp, block_size))

    def meet(self, *cards: EngineCard) -> None:
        self.ask("meet", [base64.b64encode(msgspec.msgpack.encode(card)).decode() for card in cards])

    def want(self, name: str, blocks: list[int], num_tokens: int, start: int = 0) -> bytes:
        return base64.b64decode(self.ask("want", name, blocks, num_tokens, start))

    def give(self, name: str, blocks: list[int], num_tokens: int, ticket: bytes | None) -> None:
        assert ticket is not None
        self.tell("give", name, blocks, num_tokens, base64.b64encode(ticket).decode())

    def outcome(self, kind: str, name: str) -> str:
        code: str = self.ask("outcome", kind, name)[0]
        return code


def _decode_card(text: str) -> EngineCard:
    return msgspec.msgpack.decode(base64.b64decode(text), type=EngineCard)


@pytest.fixture(scope="module")
def any_peer() -> Iterator[Peer]:
    """A peer that takes any shape and is never killed."""
    peer = Peer("any")
    yield peer
    peer.close()


@pytest.fixture
def start_peer(keep: Callable[..., Any]) -> Callable[..., Peer]:
    return lambda *arguments, **options: keep(Peer(*arguments, **options))


@pytest.fixture
def make_engine(keep: Callable[..., Any]) -> Callable[..., PushEngine]:
    def make(name: str, tp: int = 1, block_size: int = 16, **options: Any) -> PushEngine:
        layout, options = make_layout(tp, block_size, **p2p_peer.WIDE), {**PATIENT, **options}
        return keep(PushEngine(P2PConnector, name, tp=tp, layout=layout, num_blocks=NUM_BLOCKS, **options))

    return make


@pytest.fixture
def amid(monkeypatch: pytest.MonkeyPatch) -> Callable[..., threading.Event]:
    """amid("send" or "receive", peer, number): a signal to the peer before the next piece that was accepted is moved.

    What sockets have taken of it by then is a part of it. Returns the event that this has happened.
    """

    def arrange(way: str, peer: Peer, number: int) -> threading.Event:
        real, has_happened = getattr(LinkEnd, f"{way}_piece"), threading.Event()

        def move(link: LinkEnd, *arguments: Any) -> Any:
            if not has_happened.is_set():
                peer.signal(number)
                has_happened.set()
            return real(link, *arguments)

        monkeypatch.setattr(LinkEnd, f"{way}_piece", move)
        return has_happened

    return arrange


def send(engine: PushEngine, peer: Peer, name: str, blocks: list[int], target: list[int], num_tokens: int) -> None:
    """Begin to push to a peer."""
    ticket = peer.want(name, target, num_tokens)
    engine.give(view(name, kv="handoff", num_tokens=num_tokens, ticket=ticket), blocks, num_tokens)


def move(engine: PushEngine, peer: Peer, name: str = "t") -> None:
    """Push 100 tokens to a peer, which looks at them."""
    seed = sum(name.encode())
    source, target = [9, 3, 1, 50, 51, 52, 53], [4, 6, 5, 60, 61, 62, 63]
    engine.fill(source, full_kv(100, engine.layout, seed))
    send(engine, peer, name, source, target, 100)
    assert peer.outcome("receiving", name) == ""
    assert engine.outcome("sending", TransferKey(name, 1)).code == ""
    peer.ask("check", target, 100, seed, 0)


@pytest.mark.parametrize(
    ("tp", "sizes"), [((1, 1), (16, 16)), ((2, 4), (32, 16)), ((4, 1), (16, 32))], ids=str
)  # test_p2p.py has all of them, within one process
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
    assert decode.outcome("receiving", "t") == ""
    assert prefill.outcome("sending", TransferKey("t", 1)).code == ""
    decode.ask("check", target, 150, 5, 32)


MANY = list(range(1, NUM_BLOCKS, 2))  # scattered: 32 MiB in buffers
LARGE = list(range(len(MANY)))  # as they lie: in messages that no socket takes at once
half_through = pytest.mark.parametrize("blocks", [MANY, LARGE], ids=["buffered", "direct"])


@half_through
def test_a_killed_receiver_fails_what_goes_to_it_and_nothing_else(
    start_peer: Callable[..., Peer], make_engine: Callable[..., PushEngine], amid: Any, blocks: list[int]
) -> None:
    """F5, F19: at once, not at the deadline."""
    prefill, dying, other = make_engine("p"), start_peer("d"), start_peer("e")
    prefill.meet(dying.card, other.card)
    move(prefill, dying)
    tickets = [dying.want(f"t{i}", blocks, 16 * len(blocks)) for i in range(3)]
    amid("send", dying, signal.SIGKILL)
    for i, ticket in enumerate(tickets):
        prefill.give(view(f"t{i}", kv="handoff", num_tokens=16 * len(blocks), ticket=ticket), blocks, 16 * len(blocks))
    assert [prefill.outcome("sending", TransferKey(f"t{i}", 1)).code for i in range(3)] == ["peer_gone"] * 3
    move(prefill, other)


@half_through
def test_a_killed_sender_fails_the_receive_and_leaves_the_blocks_alone(
    start_peer: Callable[..., Peer], make_engine: Callable[..., PushEngine], amid: Any, blocks: list[int]
) -> None:
    """F1, F19: at once, not at the deadline."""
    decode, prefill = make_engine("d"), start_peer("p")
    prefill.meet(decode.card)
    decode.meet(prefill.card)
    ticket = decode.want(view("t", kv="await_peer", num_tokens=16 * len(blocks)), blocks)
    amid("receive", prefill, signal.SIGKILL)
    prefill.give("t", blocks, 16 * len(blocks), ticket)
    assert decode.outcome("receiving", TransferKey("t", 1)).code == "peer_gone"
    before = decode.pools[0].clone()
    successor = start_peer("p", epoch="last")
    successor.meet(decode.card)
    decode.meet(successor.card)
    ticket = decode.want(view("u", kv="await_peer", num_tokens=40), [300, 302, 304])
    successor.ask("fill", [9, 3, 1], 40, 7)
    successor.give("u", [9, 3, 1], 40, ticket)
    assert decode.outcome("receiving", TransferKey("u", 1)).code == ""
    decode.check([300, 302, 304], full_kv(40, decode.layout, 7))
    assert torch.equal(decode.pools[0][blocks[:100]], before[blocks[:100]])


def test_a_stopped_receiver_is_a_timeout(
    start_peer: Callable[..., Peer], make_engine: Callable[..., PushEngine]
) -> None:
    """On a link that is there, and when one has to be made; when it goes on, it refuses what comes too late."""
    clock = VirtualClock()
    prefill, decode = make_engine("p", clock=clock), start_peer("d")
    prefill.meet(decode.card)
    move(prefill, decode)
    worker, tickets = prefill.workers[0], [decode.want(name, [0, 1, 2], 40) for name in ("on the link", "on a new one")]
    decode.signal(signal.SIGSTOP)
    for name, ticket in zip(("on the link", "on a new one"), tickets, strict=True):
        prefill.give(view(name, kv="handoff", num_tokens=40, ticket=ticket), [9, 3, 1], 40)
        wait_until_true(lambda: worker._busy, "it is on its way")
        clock.advance(worker.timeout_s)
        assert prefill.outcome("sending", TransferKey(name, 1)).code == "transfer_timeout"
    decode.signal(signal.SIGCONT)
    move(prefill, decode, "u")


def test_a_sender_that_is_stopped_in_the_middle_is_a_timeout(
    start_peer: Callable[..., Peer], make_engine: Callable[..., PushEngine], amid: Any
) -> None:
    """What was posted is torn down with its pair: when the sender goes on, nothing of it lands."""
    clock = VirtualClock()
    decode, prefill = make_engine("d", clock=clock), start_peer("p")
    prefill.meet(decode.card)
    decode.meet(prefill.card)
    ticket = decode.want(view("t", kv="await_peer", num_tokens=16 * len(MANY)), MANY)
    is_amid = amid("receive", prefill, signal.SIGSTOP)
    prefill.give("t", MANY, 16 * len(MANY), ticket)
    assert is_amid.wait(WAIT_S)
    clock.advance(RECEIVE_TIMEOUT_S)
    assert decode.outcome("receiving", TransferKey("t", 1)).code == "transfer_timeout"
    before = decode.pools[0].clone()
    prefill.signal(signal.SIGCONT)
    assert prefill.outcome("sending", "t") == "peer_gone"
    assert torch.equal(decode.pools[0], before)


@half_through
@pytest.mark.parametrize("stopped", ["sender", "receiver"])
def test_a_cancel_does_not_wait_for_a_peer_that_is_stopped(
    start_peer: Callable[..., Peer], make_engine: Callable[..., PushEngine], amid: Any, stopped: str, blocks: list[int]
) -> None:
    """F1: the deadline is far away, the blocks are back at once."""
    engine, peer = make_engine("e"), start_peer("f")
    engine.meet(peer.card)
    peer.meet(engine.card)
    is_amid = amid("send" if stopped == "receiver" else "receive", peer, signal.SIGSTOP)
    if stopped == "receiver":
        send(engine, peer, "t", blocks, blocks, 16 * len(blocks))
    else:
        ticket = engine.want(view("t", kv="await_peer", num_tokens=16 * len(blocks)), blocks)
        peer.give("t", blocks, 16 * len(blocks), ticket)
    assert is_amid.wait(WAIT_S)
    engine.cancel(TransferKey("t", 1), "send" if stopped == "receiver" else "receive")
    assert (
        engine.outcome("sending" if stopped == "receiver" else "receiving", TransferKey("t", 1)).code
        == "transfer_cancelled"
    )
    before = engine.pools[0].clone()
    peer.signal(signal.SIGCONT)
    if stopped == "sender":
        assert peer.outcome("sending", "t") == "peer_gone"
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
        decode.close()
        wait_until_true(lambda: not prefill.workers[0].lanes.num_lanes, "no lanes")
        held = held or [held_by_process()]
        wait_until_within(held[0])


def test_transfers_to_a_stopped_receiver_time_out_and_leave_no_thread(
    start_peer: Callable[..., Peer], make_engine: Callable[..., PushEngine], amid: Any
) -> None:
    """F24."""
    clock = VirtualClock()
    prefill, decode = make_engine("p", idle_s="0.1", clock=clock), start_peer("d")
    prefill.meet(decode.card)
    others = threading.enumerate()
    move(prefill, decode)
    tickets = [decode.want(f"t{i}", LARGE, 16 * len(LARGE)) for i in range(10)]
    is_amid = amid("send", decode, signal.SIGSTOP)
    for i, ticket in enumerate(tickets):
        prefill.give(view(f"t{i}", kv="handoff", num_tokens=16 * len(LARGE), ticket=ticket), LARGE, 16 * len(LARGE))
    assert is_amid.wait(WAIT_S)
    clock.advance(prefill.workers[0].timeout_s)
    assert {prefill.outcome("sending", TransferKey(f"t{i}", 1)).code for i in range(10)} == {"transfer_timeout"}
    wait_until_true(lambda: not set(threading.enumerate()) - set(others), "the lane's thread has ended")
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
        assert decode.outcome("receiving", f"t{i}") == ""
        assert prefill.outcome("sending", TransferKey(f"t{i}", 1)).code == ""
        decode.ask("check", [511 - i], 1 + i % 32, i, 0)
