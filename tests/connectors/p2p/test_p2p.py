"""The p2p connector between engines of any shape: the right bytes at the right place, or a typed error."""

import contextlib
import itertools
import os
import queue
import random
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
from push_rig import WAIT_S, PushEngine, full_kv, make_layout, view
from traffic import held_by_process, wait_until_true, wait_until_within

from pdkv.connectors.base import TransferKey
from pdkv.connectors.p2p import outbound
from pdkv.connectors.p2p import pieces as p2p_pieces
from pdkv.connectors.p2p.connector import P2PConnector
from pdkv.connectors.p2p.pieces import PiecePool
from pdkv.connectors.p2p.sockets import listen
from pdkv.connectors.p2p.wire import FRAMES_VERSION, Address, Control, Welcome
from pdkv.connectors.p2p.worker import REGISTRATION_S
from pdkv.connectors.peer.auth import Party
from pdkv.connectors.peer.push_worker import RECEIVE_TIMEOUT_S
from pdkv.connectors.registry import plan_connector
from pdkv.connectors.transfer.block_runs import pack_blocks
from pdkv.errors import ConfigError, StaleEpoch
from pdkv.host.strangers import MAX_STRANGERS
from pdkv.testing import VirtualClock

torch.set_num_threads(1)

Engines = Callable[..., PushEngine]


@pytest.fixture
def make_engine(keep: Callable[..., Any]) -> Engines:
    return lambda name, **arguments: keep(PushEngine(P2PConnector, name, **arguments))


def pair(make_engine: Engines, tp: tuple[int, int] = (1, 1), sizes: tuple[int, int] = (16, 16), **rest: Any) -> Any:
    """A prefill and a decode engine that know each other."""
    layouts = rest.pop("layouts", {})
    prefill = make_engine("p", tp=tp[0], layout=make_layout(tp[0], sizes[0], **layouts), **rest)
    decode = make_engine("d", tp=tp[1], layout=make_layout(tp[1], sizes[1], **layouts), **rest)
    prefill.meet(decode.card)
    decode.meet(prefill.card)
    return prefill, decode


@pytest.mark.parametrize("sockets", ["auto", "tcp"])
@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (32, 16), (32, 32)], ids=str)
@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1), (1, 8), (8, 2)], ids=str)
def test_tokens_arrive_in_the_blocks_of_every_rank(
    make_engine: Engines, tp: tuple[int, int], sizes: tuple[int, int], sockets: str
) -> None:
    """F20: any pair of ranks and block sizes, in chunks, behind a hit of decode's, with a partial tail."""
    prefill, decode = pair(make_engine, tp, sizes, sockets=sockets)
    start, num_tokens = 32, 150
    kv = full_kv(num_tokens, prefill.layout)
    source = [i * 7 % 64 for i in range(3, 3 + -(-num_tokens // sizes[0]))]
    target = [i * 11 % 64 for i in range(5, 5 + -(-num_tokens // sizes[1]))]
    prefill.fill(source, kv)
    before = [pool.clone() for pool in decode.pools]

    ticket = decode.want(view("t", kv="await_peer", num_tokens=num_tokens), target, start)
    request = view("t", kv="handoff", num_tokens=num_tokens, ticket=ticket)
    holds = prefill.give(request, source, 96, last=False) + prefill.give(request, source, num_tokens)
    assert [hold.key for hold in holds] == [TransferKey("t", 1, part=1), TransferKey("t", 1, part=2)]

    received = decode.outcome("receiving", TransferKey("t", 1))
    assert received.code == ""
    assert prefill.outcome("sending", TransferKey("t", 1)).code == ""
    for hold in holds:
        assert prefill.outcome("sending", hold.key).code == ""
    decode.check(target, kv, start)
    untouched = [b for b in range(64) if b not in target[start // sizes[1] :]]
    for pool, old in zip(decode.pools, before, strict=True):
        assert torch.equal(pool[untouched], old[untouched])
    assert not decode.unread
    assert not prefill.unread


def transfer(prefill: PushEngine, decode: PushEngine, name: str, source: list[int], target: list[int], n: int) -> None:
    """Begin to move the first `n` tokens of a request that prefill's blocks hold."""
    ticket = decode.want(view(name, kv="await_peer", num_tokens=n), target)
    prefill.give(view(name, kv="handoff", num_tokens=n, ticket=ticket), source, n)


def move(prefill: PushEngine, decode: PushEngine, name: str = "t") -> None:
    """Move 40 tokens and look at them."""
    kv = full_kv(40, prefill.layout, seed=hash(name) % 1000)
    source, target = [9, 3, 1], [4, 6, 5]
    prefill.fill(source, kv)
    transfer(prefill, decode, name, source, target, 40)
    assert decode.outcome("receiving", TransferKey(name, 1)).code == ""
    assert prefill.outcome("sending", TransferKey(name, 1)).code == ""
    decode.check(target, kv)


LARGE = {"num_layers": 4, "head_size": 64}  # 128 KiB a block
SOCKETS = pytest.mark.parametrize("sockets", ["unix", "tcp"])


@pytest.mark.parametrize("num_sockets", [1, 2])
@pytest.mark.parametrize("kv_checksum", ["on", "off"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
@pytest.mark.parametrize("batch_bytes", [1, 1 << 20, 1 << 30])
@SOCKETS
def test_adjacent_and_scattered_blocks_go_from_pool_to_pool(
    make_engine: Engines, sockets: str, batch_bytes: int, compiled: bool, kv_checksum: str, num_sockets: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In batches of one block, of several, and all at once, with and without what the compiler made."""
    monkeypatch.setattr(p2p_pieces, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(p2p_pieces, "WINDOW_BYTES", batch_bytes)
    monkeypatch.setattr(p2p_pieces, "STEP_BYTES", batch_bytes // 2)
    monkeypatch.setattr(outbound, "SECOND_SOCKET_BYTES", 1 << (20 if num_sockets == 2 else 40))
    if not compiled:
        monkeypatch.setattr(PiecePool, "can_stream", False)
    prefill, decode = pair(make_engine, layouts=LARGE, sockets=sockets, kv_checksum=kv_checksum)
    assert prefill.layout.block_bytes == 128 * 1024
    source = [*range(10, 20), 1, 5, 3, *range(30, 50), 60]
    target = [*range(20, 30), 1, 2, 3, *range(40, 60), 5]
    kv = full_kv(len(source) * 16 - 3, prefill.layout)
    prefill.fill(source, kv)
    for name in "tu":
        transfer(prefill, decode, name, source, target, len(kv))
        assert decode.outcome("receiving", TransferKey(name, 1)).num_bytes == len(source) * prefill.layout.block_bytes
        decode.check(target, kv)
        decode.pools[0].zero_()


def test_a_hundred_transfers_at_once(make_engine: Engines) -> None:
    rng = random.Random(3)
    prefill, decode = pair(make_engine, (2, 1), num_blocks=256)
    blocks = [rng.sample(range(256), 256) for _ in range(2)]
    contents = []
    for i in range(100):
        kv = full_kv(rng.randint(1, 32), prefill.layout, seed=i)
        source, target = (table[2 * i : 2 * i + 2] for table in blocks)
        prefill.fill(source, kv)
        contents.append((target, kv))
        transfer(prefill, decode, f"t{i}", source, target, len(kv))
    for i, (target, kv) in enumerate(contents):
        assert decode.outcome("receiving", TransferKey(f"t{i}", 1)).code == ""
        assert prefill.outcome("sending", TransferKey(f"t{i}", 1)).code == ""
        decode.check(target, kv)
    assert [worker.num_links for worker in prefill.workers] == [1, 1]


def test_one_prefill_serves_several_decodes_and_the_other_way_round(make_engine: Engines) -> None:
    engines = [make_engine(name, tp=tp, layout=make_layout(tp)) for name, tp in (("a", 2), ("b", 1), ("c", 4))]
    for engine in engines:
        engine.meet(*(other.card for other in engines if other is not engine))
    for i, (sender, receiver) in enumerate((s, r) for s in engines for r in engines if s is not r):
        move(sender, receiver, f"t{i}")


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_ticket_beyond_its_bound_fails_the_load_at_once(make_engine: Engines) -> None:
    """F7: an explicit refusal, not a wait."""
    decode = make_engine("d", num_blocks=80_000, layout=make_layout(num_layers=1, num_heads=1, head_size=1))
    request = view("t", kv="await_peer", num_tokens=16 * 40_000)
    assert decode.want(request, range(0, 80_000, 2)) is None
    assert decode.outcome("receiving", TransferKey("t", 1)).code == "transfer_failed"
    adjacent = decode.want(view("u", kv="await_peer", num_tokens=16 * 20_000), range(20_000))
    assert adjacent is not None
    assert len(adjacent) < 64


@pytest.mark.parametrize(
    ("ticket", "code"),
    [
        (b"\xc1", "kv_not_found"),
        (["d", "1", "t", 1, 0, 500, pack_blocks(range(32))], "kv_not_found"),  # more tokens than the prompt has
        (["d", "1", "t", 0, 0, 40, pack_blocks(range(3))], "kv_not_found"),  # an earlier attempt's
        (["d", "1", "t", 1, 0, 40, pack_blocks(range(2))], "kv_not_found"),  # too few blocks
        (["d", "0", "t", 1, 0, 40, pack_blocks(range(3))], "stale_epoch"),
        (["x", "1", "t", 1, 0, 40, pack_blocks(range(3))], "peer_gone"),
        (["d", "1", "t", 1, 0, 40, pack_blocks(range(3))], "kv_not_found"),  # nothing is expected there
    ],
    ids=str,
)
def test_tickets_that_cannot_be_served_fail_with_a_type(make_engine: Engines, ticket: Any, code: str) -> None:
    """F2, F15: whatever stands in a ticket, both engines go on."""
    clock = VirtualClock()
    prefill, decode = pair(make_engine, clock=clock)
    before = decode.pools[0].clone()
    data = ticket if isinstance(ticket, bytes) else msgspec.msgpack.encode(ticket)
    prefill.give(view("t", kv="handoff", num_tokens=40, ticket=data), [9, 3, 1], 40)
    if ticket[:3] == ["d", "1", "t"] and ticket[3:6] == [1, 0, 40]:
        clock.until_waiting()  # the receiver may not have heard of it yet
        clock.advance(REGISTRATION_S)
    assert prefill.outcome("sending", TransferKey("t", 1)).code == code
    assert torch.equal(decode.pools[0], before)
    move(prefill, decode, "u")


def test_peers_that_do_not_fit_are_refused_from_their_cards(make_engine: Engines) -> None:
    prefill = make_engine("p")
    decode = make_engine("d", layout=make_layout(num_layers=3))
    prefill.meet(decode.card)
    ticket = decode.want(view("t", kv="await_peer", num_tokens=40), [0, 1, 2])
    prefill.give(view("t", kv="handoff", num_tokens=40, ticket=ticket), [9, 3, 1], 40)
    assert prefill.outcome("sending", TransferKey("t", 1)).code == "incompatible_peers"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"port": "1"}, "unknown option 'port'; known: handshake_timeout_s, host, idle_s"),
        ({"idle_s": "0"}, "number of seconds"),
        ({"max_links": "0"}, "at least 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plan_connector("p2p", options)


@pytest.mark.parametrize("change", [{"num_bytes": 1}, {"num_bytes": 1 << 40}, {"per_batch": 0}, {"form": "units"}])
def test_an_offer_that_contradicts_itself_is_refused(
    make_engine: Engines, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """F16: of a peer of another shape; nothing of it is waited for."""
    prefill, decode = pair(make_engine, sizes=(32, 32))
    real, before = outbound.plan_sending, decode.pools[0].clone()

    def plan(*arguments: Any, **rest: Any) -> Any:
        made = real(*arguments, **rest)
        return made._replace(offer=msgspec.structs.replace(made.offer, **change))

    with monkeypatch.context() as patch:
        patch.setattr(outbound, "plan_sending", plan)
        transfer(prefill, decode, "t", [9, 3], [0, 2], 40)
        assert prefill.outcome("sending", TransferKey("t", 1)).code == "transfer_failed"
    decode.cancel(TransferKey("t", 1), "receive")
    assert torch.equal(decode.pools[0], before)
    assert decode.outcome("receiving", TransferKey("t", 1)).code == "transfer_cancelled"
    move(prefill, decode, "u")


# --- things end early -----------------------------------------------------------------------------------------------


class Gate:
    """Holds a sender before every part of a piece until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sender: PushEngine) -> None:
        self.reached, self.opened = threading.Semaphore(0), threading.Event()
        real, pools = PiecePool._row_table, [worker._pool for worker in sender.workers]

        def row_table(pool: PiecePool, *arguments: Any) -> Any:
            if pool in pools:
                self.reached.release()
                assert self.opened.wait(WAIT_S)
            return real(pool, *arguments)

        monkeypatch.setattr(PiecePool, "_row_table", row_table)

    def wait(self) -> None:
        assert self.reached.acquire(timeout=WAIT_S)


def test_what_comes_after_the_receivers_cancel_is_refused(make_engine: Engines) -> None:
    """F1: the receiver's blocks are its own again at once."""
    prefill, decode = pair(make_engine)
    ticket = decode.want(view("t", kv="await_peer", num_tokens=40), [0, 1, 2])
    decode.cancel(TransferKey("t", 1), "receive")
    assert decode.outcome("receiving", TransferKey("t", 1)).code == "transfer_cancelled"
    before = decode.pools[0].clone()
    prefill.give(view("t", kv="handoff", num_tokens=40, ticket=ticket), [9, 3, 1], 40)
    assert prefill.outcome("sending", TransferKey("t", 1)).code == "kv_not_found"
    assert torch.equal(decode.pools[0], before)
    move(prefill, decode, "u")


def test_a_cancel_while_the_piece_travels_ends_when_nothing_can_land(
    make_engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2p_pieces, "BATCH_BYTES", 1)
    monkeypatch.setattr(p2p_pieces, "WINDOW_BYTES", 1)  # a call for every two blocks
    prefill, decode = pair(make_engine)
    prefill.fill(range(20, 40), full_kv(320, prefill.layout))
    gate = Gate(monkeypatch, prefill)
    transfer(prefill, decode, "t", list(range(20, 40)), list(range(0, 40, 2)), 320)
    gate.wait()
    decode.cancel(TransferKey("t", 1), "receive")
    assert not decode.unread  # its receives are posted
    gate.opened.set()
    assert decode.outcome("receiving", TransferKey("t", 1)).code == "transfer_cancelled"
    before = decode.pools[0].clone()
    assert prefill.outcome("sending", TransferKey("t", 1)).code in ("peer_gone", "transfer_cancelled")
    assert torch.equal(decode.pools[0], before)
    assert (before[38] == -1).all()
    move(prefill, decode, "u")


def test_the_senders_cancel_fails_both_sides(make_engine: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = pair(make_engine)
    gate = Gate(monkeypatch, prefill)
    transfer(prefill, decode, "t", [9, 3, 1], [0, 1, 2], 40)
    gate.wait()
    prefill.cancel(TransferKey("t", 1), "send")
    gate.opened.set()
    assert prefill.outcome("sending", TransferKey("t", 1, part=1)).code == "transfer_cancelled"
    assert prefill.outcome("sending", TransferKey("t", 1)).code == "transfer_cancelled"
    assert decode.outcome("receiving", TransferKey("t", 1)).code in ("", "peer_gone")
    move(prefill, decode, "u")


def test_a_dropped_request_is_forgotten_by_every_rank(make_engine: Engines) -> None:
    """F1: sends of a prompt whose client left in mid-prefill."""
    prefill, decode = pair(make_engine, (2, 2))
    ticket = decode.want(view("t", kv="await_peer", num_tokens=40), [0, 1, 2])
    prefill.give(view("t", kv="handoff", num_tokens=40, ticket=ticket), [9, 3, 1], 32, last=False)
    assert prefill.outcome("sending", TransferKey("t", 1, part=1)).code == ""
    prefill.step(aborted=[TransferKey("t", 1)])
    assert prefill.outcome("sending", TransferKey("t", 1)).code == "transfer_cancelled"
    assert all(worker.num_open_jobs == 0 for worker in prefill.workers)
    decode.cancel(TransferKey("t", 1), "receive")
    assert decode.outcome("receiving", TransferKey("t", 1)).code == "transfer_cancelled"


def test_a_stalled_sender_fails_the_receive_at_its_deadline(
    make_engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    prefill, decode = pair(make_engine, timeout_s="60", clock=clock)
    move(prefill, decode)
    gate = Gate(monkeypatch, prefill)
    transfer(prefill, decode, "s", [9, 3, 1], [0, 1, 2], 40)
    gate.wait()
    clock.advance(RECEIVE_TIMEOUT_S)
    assert decode.outcome("receiving", TransferKey("s", 1)).code == "transfer_timeout"
    gate.opened.set()
    assert prefill.outcome("sending", TransferKey("s", 1)).code in ("transfer_timeout", "peer_gone")
    move(prefill, decode, "u")


def test_sends_to_a_peer_that_left_fail_and_its_successor_gets_a_group_of_its_own(make_engine: Engines) -> None:
    """F5."""
    prefill, decode = pair(make_engine)
    move(prefill, decode)
    ticket = decode.want(view("u", kv="await_peer", num_tokens=40), [0, 1, 2])
    successor = make_engine("d", epoch="2")
    prefill.meet(successor.card)
    prefill.give(view("u", kv="handoff", num_tokens=40, ticket=ticket), [9, 3, 1], 40)
    assert prefill.outcome("sending", TransferKey("u", 1)).code == "stale_epoch"
    successor.meet(prefill.card)
    move(prefill, successor, "v")
    assert prefill.workers[0].num_links == 2


def test_links_of_a_peer_that_left_end(make_engine: Engines) -> None:
    prefill, decode = pair(make_engine)
    move(prefill, decode)
    assert decode.workers[0].listener.num_links == 1
    decode.meet()
    wait_until_true(lambda: decode.workers[0].listener.num_links == 0, "no links")
    decode.meet(prefill.card)
    move(prefill, decode, "u")  # a new group takes the place of the one that was torn down


# --- bounds ---------------------------------------------------------------------------------------------------------


def wait_for_no_links(prefill: PushEngine, decode: PushEngine) -> None:
    sender, receiver = prefill.workers[0], decode.workers[0]
    wait_until_true(lambda: receiver.listener.num_links == sender.lanes.num_lanes == 0, "no links")


def test_idle_groups_are_closed_and_made_again(make_engine: Engines) -> None:
    prefill, decode = pair(make_engine, idle_s="0.05")
    for i in range(2):
        move(prefill, decode, f"t{i}")
        wait_for_no_links(prefill, decode)
    assert prefill.workers[0].num_links == 2


@pytest.mark.parametrize("tp", [(1, 4), (4, 1)])
def test_groups_are_bounded_on_either_side(make_engine: Engines, tp: tuple[int, int]) -> None:
    prefill, decode = pair(make_engine, tp, max_links="2")
    for i in range(5):
        move(prefill, decode, f"t{i}")
        for worker in (*prefill.workers, *decode.workers):
            assert worker.lanes.num_lanes <= 2
            assert worker.listener.num_links <= 2


# --- strangers ------------------------------------------------------------------------------------------------------


def address_of(engine: PushEngine) -> Address:
    return msgspec.msgpack.decode(engine.card.rank_blobs[0], type=Address)


def greeted(listening: PushEngine, **changes: Any) -> tuple[socket.socket, Control]:
    """A connection to an engine's rank 0 by who knows its secret; `changes`: whom it says it means."""
    address = address_of(listening)
    connection = socket.create_connection((address.host, address.port), WAIT_S)
    control = Control(connection, "the engine")
    target = Party(**({"engine": "d", "epoch": "1", "rank": 0} | changes))
    control.greet(address.secret, Party("p", "1", 0), target, WAIT_S)
    return connection, control


def test_garbage_is_refused_and_nobody_else_notices(make_engine: Engines) -> None:
    """F17: whatever comes on the socket, the next peer can connect."""
    prefill, decode = pair(make_engine, handshake_timeout_s="60")
    address, listener = address_of(decode), decode.workers[0].listener
    junk = [
        b"", b"\0", b"\xff" * 4, b"\0\0", b"\1\0\xc1", b"\x64\0" + os.urandom(100), b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(100_000), (1 << 30).to_bytes(4, "little"), b"\x32\0" + b"x" * 20,
        b"\x05\0" + msgspec.msgpack.encode(["Hello"])[:5], b"\x88\x13" + b"\x91" * 5000,
    ]  # fmt: skip
    for i, data in enumerate(junk):
        with socket.create_connection((address.host, address.port)) as connection, contextlib.suppress(OSError):
            connection.sendall(data)  # it may be refused before it has said all
            if i % 2:
                connection.shutdown(socket.SHUT_WR)
        move(prefill, decode, f"t{i}")
    wait_until_true(lambda: listener.num_refused == len(junk), "all refused")


@pytest.mark.parametrize("changes", [{"epoch": "0"}, {"engine": "x"}, {"rank": 1}], ids=str)
def test_who_means_another_incarnation_is_told(make_engine: Engines, changes: dict[str, Any]) -> None:
    """F5."""
    _, decode = pair(make_engine)
    connection, control = greeted(decode, **changes)
    with connection, pytest.raises(StaleEpoch, match="this is Party"):
        control.expect(WAIT_S)


def test_a_link_that_gets_no_thread_does_not_keep_its_listener_from_closing(
    make_engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = make_engine("d")
    listener, start = decode.workers[0].listener, threading.Thread.start
    closing: queue.SimpleQueue[Future[None]] = queue.SimpleQueue()

    def start_late(thread: threading.Thread) -> None:
        if thread.name.startswith("pdkv-p2p-link"):
            closing.put(pool.submit(listener.close, 60.0))
            wait_until_true(listener.auth_listener._thread.stopping.is_set, "it waits for this thread")
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    with ThreadPoolExecutor(1) as pool:
        raw, _ = greeted(decode)
        with raw:
            closing.get(timeout=60.0).result(60.0)
    assert (listener.num_links, listener.auth_listener._thread.is_alive) == (0, False)


def test_a_peer_that_greets_and_then_talks_nonsense_is_dropped(make_engine: Engines) -> None:
    prefill, decode = pair(make_engine, handshake_timeout_s="60")
    listener = decode.workers[0].listener
    connection, control = greeted(decode)
    with connection:
        assert isinstance(control.expect(WAIT_S), Welcome)
        connection.sendall(os.urandom(200))
        with contextlib.suppress(ConnectionError):
            while connection.recv(1000):
                pass
    wait_until_true(lambda: listener.num_links == 0, "no links")
    move(prefill, decode)


def test_idle_strangers_keep_no_peer_out_and_hold_a_bounded_number_of_descriptors(make_engine: Engines) -> None:
    """64 of them used to close every new link: each transfer failed and was computed again."""
    prefill, decode = pair(make_engine, handshake_timeout_s="60")
    address, listener = address_of(decode), decode.workers[0].listener.auth_listener
    with contextlib.ExitStack() as strangers:
        for i in range(1000):
            stranger = strangers.enter_context(socket.create_connection((address.host, address.port), WAIT_S))
            if i % 2:
                stranger.sendall(b"\x64")  # the beginning of a greeting
        wait_until_true(lambda: len(listener._strangers) + listener.num_refused == 1000, "all have been seen")
        assert len(listener._strangers) <= MAX_STRANGERS
        for i in range(3):
            decode.meet()
            decode.meet(prefill.card)
            wait_until_true(lambda: decode.workers[0].listener.num_links == 0, "the link has ended")
            move(prefill, decode, f"t{i}")


def test_a_peer_gets_in_while_strangers_connect_in_a_loop(make_engine: Engines) -> None:
    prefill, decode = pair(make_engine, timeout_s="20")
    address, enough, num_connections = address_of(decode), threading.Event(), itertools.count()

    def knock() -> None:
        kept: deque[socket.socket] = deque()
        while not enough.is_set():
            with contextlib.suppress(OSError):
                kept.append(socket.create_connection((address.host, address.port), 1.0))
                next(num_connections)
            if len(kept) > 200:
                kept.popleft().close()
        for connection in kept:
            connection.close()

    stranger = threading.Thread(target=knock)
    stranger.start()
    try:
        for i in range(5):
            move(prefill, decode, f"t{i}")
            decode.meet()
            decode.meet(prefill.card)
    finally:
        enough.set()
        stranger.join()
    assert next(num_connections) > 100


@SOCKETS
def test_who_holds_a_peers_address_learns_nothing_and_the_send_fails_with_a_type(
    make_engine: Engines, sockets: str
) -> None:
    """The secret used to be the first thing that was sent, to whoever listened."""
    prefill, decode = pair(make_engine, sockets=sockets)
    address = address_of(decode)
    *held, name = listen("127.0.0.1")
    with held[0], held[1]:
        thief = held[sockets == "tcp"]
        stolen = msgspec.structs.replace(address, unix_name=name, port=held[1].getsockname()[1])
        card = msgspec.structs.replace(decode.card, rank_blobs=[msgspec.msgpack.encode(stolen)])
        prefill.meet(card)
        heard: list[bytes] = []

        def hear() -> None:
            connection, _ = thief.accept()
            with connection:
                heard.append(connection.recv(4096))
                challenge = msgspec.msgpack.encode(["Challenge", bytes(32), bytes(32)])
                connection.sendall(len(challenge).to_bytes(2, "little") + challenge)
                while data := connection.recv(4096):
                    heard.append(data)

        listening = threading.Thread(target=hear)
        listening.start()
        transfer(prefill, decode, "t", [9, 3, 1], [0, 1, 2], 40)
        assert prefill.outcome("sending", TransferKey("t", 1)).code == "unauthenticated"
        listening.join(WAIT_S)
    assert len(heard) == 1  # a greeting, and no answer to that challenge
    assert b"Hello" in heard[0]
    assert address.secret not in heard[0]


def test_the_secret_is_not_shown() -> None:
    address = Address(FRAMES_VERSION, "here", "name", "127.0.0.1", 1, b"secretsecret", True)
    assert "secretsecret" not in f"{address} {address!r} {(address,)}"


def test_everything_is_given_back(make_engine: Engines) -> None:
    """F24."""
    warm_up = [PushEngine(P2PConnector, name) for name in "ab"]  # torch.distributed's own threads and files
    warm_up[0].meet(warm_up[1].card)
    move(*warm_up)
    for engine in warm_up:
        engine.close()
    before = held_by_process()
    engines = [PushEngine(P2PConnector, name, tp=2) for name in "ab"]
    engines[0].meet(engines[1].card)
    for i in range(3):
        move(*engines, f"t{i}")
    ticket = engines[1].want(view("u", kv="await_peer", num_tokens=40), [0, 1, 2])
    engines[0].give(view("u", kv="handoff", num_tokens=40, ticket=ticket), [9, 3, 1], 40)  # under way
    for engine in engines:
        engine.close()
    del engines, engine
    wait_until_within(before)
