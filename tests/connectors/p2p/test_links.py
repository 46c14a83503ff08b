"""Links of p2p, as strangers and relays see them: nothing lands that was not authenticated."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from push_rig import WAIT_S, PushEngine, full_kv, make_layout, view
from traffic import wait_until_true

from pdkv.connector_kit.rig.sockets import listeners
from pdkv.connectors.base import TransferKey
from pdkv.connectors.p2p import outbound, pieces
from pdkv.connectors.p2p.connector import P2PConnector
from pdkv.connectors.p2p.link import LinkEnd
from pdkv.connectors.p2p.sockets import NO_PIPE, Connection, can_splice, connect
from pdkv.connectors.p2p.wire import FRAMES_VERSION, Accepted, Address, Control, Delivered, End, Offer, Put, Welcome
from pdkv.connectors.peer.auth import Party
from pdkv.connectors.peer.push_worker import PieceRange
from pdkv.errors import IncompatiblePeers, PeerGone, TransferError, Unauthenticated
from pdkv.host.strangers import MAX_STRANGERS

torch.set_num_threads(1)

Engines = Callable[..., PushEngine]
SOCKETS = pytest.mark.parametrize("sockets", ["unix", "tcp"])
WIDE = {"num_layers": 4, "head_size": 64}  # 128 KiB a block


@pytest.fixture
def make_engine(keep: Callable[..., Any]) -> Engines:
    return lambda name, **arguments: keep(PushEngine(P2PConnector, name, **arguments))


def pair(make_engine: Engines, **rest: Any) -> tuple[PushEngine, PushEngine]:
    """A prefill and a decode engine that know each other."""
    prefill, decode = (make_engine(name, layout=make_layout(**WIDE), **rest) for name in ("p", "d"))
    prefill.meet(decode.card)
    decode.meet(prefill.card)
    return prefill, decode


def begin(prefill: PushEngine, decode: PushEngine, name: str, blocks: list[int]) -> torch.Tensor:
    """Begin to move a request in blocks of the same numbers; returns its KV."""
    kv = full_kv(16 * len(blocks), prefill.layout, seed=sum(name.encode()))
    prefill.fill(blocks, kv)
    ticket = decode.want(view(name, kv="await_peer", num_tokens=len(kv)), blocks)
    prefill.give(view(name, kv="handoff", num_tokens=len(kv), ticket=ticket), blocks, len(kv))
    return kv


def move(prefill: PushEngine, decode: PushEngine, name: str, blocks: list[int]) -> None:
    """Move a request and look at it."""
    kv = begin(prefill, decode, name, blocks)
    assert decode.outcome("receiving", TransferKey(name, 1)).code == ""
    assert prefill.outcome("sending", TransferKey(name, 1)).code == ""
    decode.check(blocks, kv)


def address_of(engine: PushEngine) -> Address:
    return msgspec.msgpack.decode(engine.card.rank_blobs[0], type=Address)


@SOCKETS
def test_nothing_listens_for_a_link_but_what_authenticates_its_peers(make_engine: Engines, sockets: str) -> None:
    """B6: there used to be a second socket on either side, into which whoever came first could write KV."""
    before = set(listeners(os.getpid()))
    prefill, decode = pair(make_engine, sockets=sockets)
    move(prefill, decode, "t", [1, 5, 3])
    doors = set(listeners(os.getpid())) - before
    addresses = [address_of(engine) for engine in (prefill, decode)]
    known = {f"\0{address.unix_name}" for address in addresses} | {(a.host, a.port) for a in addresses}
    assert {door.address for door in doors} == known


# --- somebody between the ends --------------------------------------------------------------------------------------


class Relay:
    """Stands between a sender and a receiver over TCP. `meddle` is told what the sender says, and what is passed on."""

    def __init__(self, target: Address) -> None:
        self.heard: list[bytes] = []  # of each connection, all that the sender said
        self.meddle: Callable[[int, int, bytes], bytes | None] = lambda number, position, data: data
        self._target = (target.host, target.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
        for end in (self._listener, *self._sockets):
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                number = len(self.heard)
                self.heard.append(b"")
                self._sockets += [near, far]
                for source, to, way in ((near, far, number), (far, near, -1)):
                    self._threads.append(threading.Thread(target=self._pump, args=(source, to, way)))
                    self._threads[-1].start()

    def _pump(self, source: socket.socket, to: socket.socket, number: int) -> None:
        """`number`: the connection, for what the sender says; else -1."""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                passed: bytes | None = data
                if number >= 0:
                    position = len(self.heard[number])
                    self.heard[number] += data
                    passed = self.meddle(number, position, data)
                if passed is None:
                    break
                to.sendall(passed)
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relayed(make_engine: Engines) -> Iterator[tuple[PushEngine, PushEngine, Relay]]:
    """A prefill and a decode engine with a relay between them."""
    prefill, decode = pair(make_engine, sockets="tcp", timeout_s="20")
    address = address_of(decode)
    relay = Relay(address)
    meet_at(prefill, decode, msgspec.structs.replace(address, port=relay.port))
    yield prefill, decode, relay
    relay.close()


def meet_at(prefill: PushEngine, decode: PushEngine, address: Address) -> None:
    """Let prefill believe that decode is at that address."""
    prefill.meet(msgspec.structs.replace(decode.card, rank_blobs=[msgspec.msgpack.encode(address)]))


BLOCKS = [1, 5, 3, 20, 21, 22, 40, 8]  # 1 MiB
HALF = 1 << 19


def flip(position: int) -> Callable[[int, int, bytes], bytes]:
    """Changes one bit of what the sender says."""

    def meddle(number: int, begin: int, data: bytes) -> bytes:
        at = position - begin
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] if 0 <= at < len(data) else data

    return meddle


def cut(position: int, number: int = 0) -> Callable[[int, int, bytes], bytes | None]:
    """Ends a connection in the middle."""
    return lambda which, begin, data: None if which == number and begin + len(data) > position else data


def leave_out(number: int, begin: int, data: bytes) -> bytes:
    """One byte in the middle of a piece."""
    return data[1:] if begin <= HALF < begin + len(data) else data


class Swap:
    """Two neighbouring stretches of a piece change places."""

    def __init__(self) -> None:
        self._kept: bytes | None = None

    def __call__(self, number: int, begin: int, data: bytes) -> bytes:
        if self._kept is None and begin > HALF:
            self._kept, data = data, b""
        elif self._kept:
            self._kept, data = b"", data + self._kept
        return data


def check_that_it_fails(prefill: PushEngine, decode: PushEngine, codes: set[str]) -> None:
    """A transfer fails on both sides, its blocks are nobody's any more, and nothing lands afterwards."""
    begin(prefill, decode, "t", BLOCKS)
    assert decode.outcome("receiving", TransferKey("t", 1)).code in codes
    pool = decode.pools[0].view(torch.uint8)  # by bytes: what is shifted may be no number
    before = pool.clone()
    assert prefill.outcome("sending", TransferKey("t", 1)).code in {*codes, "peer_gone", "transfer_failed"}
    assert torch.equal(pool, before)


@pytest.mark.parametrize("position", [HALF, HALF + 1001, 1 << 20], ids=str)
def test_a_bit_that_is_flipped_in_a_piece_is_found_before_its_transfer_ends(
    relayed: tuple[PushEngine, PushEngine, Relay], position: int
) -> None:
    prefill, decode, relay = relayed
    relay.meddle = flip(position)
    check_that_it_fails(prefill, decode, {"unauthenticated", "kv_corrupted"})
    relay.meddle = lambda number, begin, data: data
    move(prefill, decode, "u", BLOCKS)


@pytest.mark.parametrize("meddle", [leave_out, Swap(), cut(HALF)], ids=["truncated", "reordered", "cut"])
def test_a_piece_that_is_not_what_was_sent_fails_and_the_next_one_gets_through(
    relayed: tuple[PushEngine, PushEngine, Relay], meddle: Any
) -> None:
    prefill, decode, relay = relayed
    relay.meddle = meddle
    check_that_it_fails(prefill, decode, {"unauthenticated", "kv_corrupted", "peer_gone"})
    relay.meddle = lambda number, begin, data: data
    move(prefill, decode, "u", BLOCKS)


def test_what_was_said_on_a_link_is_of_no_use_on_another_one(relayed: tuple[PushEngine, PushEngine, Relay]) -> None:
    """Replayed from the greeting on, with the same piece wanted again."""
    prefill, decode, relay = relayed
    move(prefill, decode, "t", BLOCKS)
    listener, address = decode.workers[0].listener, address_of(decode)
    before, num_refused = decode.pools[0].clone(), listener.num_refused
    decode.want(view("u", kv="await_peer", num_tokens=16), [30])
    with socket.create_connection((address.host, address.port)) as stranger, contextlib.suppress(OSError):
        stranger.sendall(relay.heard[0])
        while stranger.recv(1 << 16):
            pass
    wait_until_true(lambda: listener.num_refused == num_refused + 1, "it was refused")
    assert torch.equal(decode.pools[0], before)


def test_frames_that_are_repeated_or_changed_end_the_link_and_land_nowhere(
    relayed: tuple[PushEngine, PushEngine, Relay],
) -> None:
    """Between two pieces: the end of what was said comes once more."""
    prefill, decode, relay = relayed
    move(prefill, decode, "t", BLOCKS)
    listener, before = decode.workers[0].listener, decode.pools[0].clone()
    relay._sockets[1].sendall(relay.heard[0][-200:])
    wait_until_true(lambda: listener.num_links == 0, "the link has ended")
    assert listener.num_refused == 1
    assert torch.equal(decode.pools[0], before)
    move(prefill, decode, "u", BLOCKS)


@pytest.mark.parametrize("number", [0, 1])
def test_when_one_of_two_sockets_dies_the_link_is_torn_down_and_made_again(
    relayed: tuple[PushEngine, PushEngine, Relay], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    prefill, decode, relay = relayed
    monkeypatch.setattr(outbound, "SECOND_SOCKET_BYTES", 1 << 20)
    monkeypatch.setattr(pieces, "BATCH_BYTES", 1 << 17)
    move(prefill, decode, "before", BLOCKS)
    assert len(relay.heard) == 2
    assert min(map(len, relay.heard)) > HALF
    relay.meddle = cut(len(relay.heard[number]) + (1 << 18), number)
    check_that_it_fails(prefill, decode, {"peer_gone"})
    wait_until_true(lambda: decode.workers[0].listener.num_links == 0, "the link has ended")
    relay.meddle = lambda number, begin, data: data
    move(prefill, decode, "after", BLOCKS)
    assert len(relay.heard) == 4


# --- strangers and liars --------------------------------------------------------------------------------------------


def greeted(listening: PushEngine, sockets: str, purpose: str = "", secret: bytes | None = None) -> Control:
    """A link by who knows the secret, or says so."""
    address = address_of(listening)
    name = address.unix_name if sockets == "unix" else ""
    control = Control(connect(name, (address.host, address.port), WAIT_S), "the engine")
    try:
        control.greet(secret or address.secret, Party("p", "1", 0), Party("d", "1", 0), WAIT_S, purpose)
    except BaseException:
        control.close()
        raise
    return control


def offer_of(name: str, num_blocks: int, **changes: Any) -> Offer:
    values = {
        "transfer_id": name, "attempt": 1, "piece": PieceRange(0, 4, 0, 4, 0, 16 * num_blocks), "form": "blocks",
        "num_bytes": num_blocks << 17, "per_batch": 8, "timeout_s": 0.3,
    }  # fmt: skip
    return Offer(**(values | changes))


@SOCKETS
def test_who_does_not_know_the_secret_gets_nowhere(make_engine: Engines, sockets: str) -> None:
    prefill, decode = pair(make_engine, sockets=sockets)
    with pytest.raises(Unauthenticated):
        greeted(decode, sockets, secret=b"x" * 32)
    wait_until_true(lambda: decode.workers[0].listener.num_refused == 1, "it was refused")
    move(prefill, decode, "t", BLOCKS)


@SOCKETS
def test_idle_and_half_open_strangers_disturb_no_transfer(make_engine: Engines, sockets: str) -> None:
    prefill, decode = pair(make_engine, sockets=sockets, handshake_timeout_s="20")
    address, listener = address_of(decode), decode.workers[0].listener.auth_listener
    name = address.unix_name if sockets == "unix" else ""
    with contextlib.ExitStack() as strangers:
        for i in range(500):
            stranger = strangers.enter_context(connect(name, (address.host, address.port), WAIT_S))
            with contextlib.suppress(OSError):  # it had to make room already
                if i % 3 == 0:
                    stranger.sendall(b"\x64")
                elif i % 3 == 1:
                    stranger.shutdown(socket.SHUT_WR)
        move(prefill, decode, "t", BLOCKS)
        assert len(listener._strangers) <= MAX_STRANGERS
    wait_until_true(lambda: listener.num_refused == 500, "all are gone")


@SOCKETS
@pytest.mark.parametrize(
    "frame",
    [Accepted(), Delivered(), Welcome(), End(), Put("k", b"v"), offer_of("x", 1)],
    ids=lambda f: type(f).__name__,
)
def test_right_secret_and_wrong_frames(make_engine: Engines, sockets: str, frame: Any) -> None:
    prefill, decode = pair(make_engine, sockets=sockets, handshake_timeout_s="10")
    control = greeted(decode, sockets)
    assert isinstance(control.expect(WAIT_S), Welcome)
    with pytest.raises(TransferError, match=r"instead of an offer|no such transfer"):
        control.ask(frame, WAIT_S)
    control.close()
    move(prefill, decode, "t", BLOCKS)


@SOCKETS
def test_a_sender_that_stops_in_mid_piece_is_a_timeout_and_lands_nothing_later(
    make_engine: Engines, sockets: str
) -> None:
    _, decode = pair(make_engine, sockets=sockets)
    decode.want(view("t", kv="await_peer", num_tokens=32), [7, 9])
    control = greeted(decode, sockets)
    control.expect(WAIT_S)
    assert isinstance(control.ask(offer_of("t", 2), WAIT_S), Accepted)
    control.connection.socket.sendall(bytes(1 << 17))
    assert decode.outcome("receiving", TransferKey("t", 1)).code == "transfer_timeout"
    before = decode.pools[0].clone()
    with contextlib.suppress(OSError):
        control.connection.socket.sendall(b"\1" * (1 << 17))
    control.close()
    assert torch.equal(decode.pools[0], before)
    assert not before[7].any()
    assert (before[9] == -1).all()


@SOCKETS
@pytest.mark.parametrize(
    "change",
    [{"num_bytes": 1 << 17}, {"per_batch": 0}, {"per_batch": 1 << 62}, {"num_sockets": 2}, {"num_sockets": 0},
     {"piece": PieceRange(0, 4, 0, 4, 0, 64)}, {"piece": PieceRange(0, 1, 0, 4, 0, 32)}, {"attempt": 2}],
    ids=str,
)  # fmt: skip
def test_offers_that_do_not_fit_are_refused(make_engine: Engines, sockets: str, change: dict[str, Any]) -> None:
    prefill, decode = pair(make_engine, sockets=sockets)
    before = decode.pools[0].clone()
    decode.want(view("t", kv="await_peer", num_tokens=32), [7, 9])
    control = greeted(decode, sockets)
    control.expect(WAIT_S)
    control.send(offer_of("t", 2, **change), WAIT_S)
    answers = []
    with pytest.raises(TransferError):
        answers += iter(lambda: control.expect(WAIT_S), None)
    assert Delivered() not in answers
    control.close()
    assert torch.equal(decode.pools[0], before)
    move(prefill, decode, "u", BLOCKS)


@SOCKETS
def test_a_second_socket_belongs_to_the_peer_whose_link_it_is(make_engine: Engines, sockets: str) -> None:
    _, decode = pair(make_engine, sockets=sockets)
    link = greeted(decode, sockets)
    token = link.expect(WAIT_S).token
    for purpose in ("0" * 32, "ä", token[:-1]):
        stray = greeted(decode, sockets, purpose)
        with pytest.raises(PeerGone):
            stray.expect(WAIT_S)
        stray.close()
    second = greeted(decode, sockets, token)
    assert second.expect(WAIT_S) == Welcome()
    third = greeted(decode, sockets, token)
    with pytest.raises(PeerGone):
        third.expect(WAIT_S)
    for end in (link, second, third):
        end.close()
    wait_until_true(lambda: decode.workers[0].listener.num_links == 0, "no links")


def test_engines_that_speak_other_versions_of_the_frames_say_so(make_engine: Engines) -> None:
    prefill, decode = pair(make_engine)
    prefill.meet(msgspec.structs.replace(decode.card, wire_versions={decode.card.connector: FRAMES_VERSION + 1}))
    with pytest.raises(IncompatiblePeers, match=f"but version {FRAMES_VERSION + 1} in engine d"):
        prefill.workers[0].peers.card("d", "1")
    begin(prefill, decode, "t", BLOCKS)
    assert prefill.outcome("sending", TransferKey("t", 1)).code == "incompatible_peers"


def test_only_unix_sockets_are_wanted_and_the_peer_is_elsewhere(make_engine: Engines) -> None:
    prefill, decode = pair(make_engine, sockets="unix")
    meet_at(prefill, decode, msgspec.structs.replace(address_of(decode), host_id="another"))
    begin(prefill, decode, "t", BLOCKS)
    assert prefill.outcome("sending", TransferKey("t", 1)).code == "transfer_failed"


def test_a_peer_on_another_host_is_reached_over_tcp(make_engine: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    families: list[socket.AddressFamily] = []

    def connect_and_tell(*where: Any) -> socket.socket:
        connection = connect(*where)
        families.append(connection.family)
        return connection

    monkeypatch.setattr("pdkv.connectors.p2p.outbound.connect", connect_and_tell)
    prefill, decode = pair(make_engine)
    move(prefill, decode, "within", BLOCKS)
    assert set(families) == {socket.AF_UNIX}
    families.clear()
    prefill, decode = pair(make_engine)
    meet_at(prefill, decode, msgspec.structs.replace(address_of(decode), host_id="another"))
    move(prefill, decode, "between", BLOCKS)
    assert set(families) == {socket.AF_INET}


@SOCKETS
@pytest.mark.parametrize("slow", ["p", "d"])
def test_an_end_without_the_compiled_kernel_gets_on_with_one_that_has_it(
    make_engine: Engines, monkeypatch: pytest.MonkeyPatch, sockets: str, slow: str
) -> None:
    monkeypatch.setattr(pieces, "STEP_BYTES", 32 << 10)  # blocks are digested in four slices
    prefill, decode = pair(make_engine, sockets=sockets)
    pool = {"p": prefill, "d": decode}[slow].workers[0]._pool
    monkeypatch.setattr(pieces.PiecePool, "can_stream", property(lambda self: self is not pool))
    move(prefill, decode, "t", BLOCKS)


@SOCKETS
def test_a_sender_that_gives_up_behind_its_last_byte_has_sent_nothing(
    make_engine: Engines, monkeypatch: pytest.MonkeyPatch, sockets: str
) -> None:
    """Over a unix socket the receiver may still have to read the sender's own pages, which belong to others by then."""
    prefill, decode = pair(make_engine, sockets=sockets, kv_checksum="off")
    move(prefill, decode, "first", [1])  # and the link is made
    all_sent, may_read = threading.Event(), threading.Event()
    real_receive, real_send = LinkEnd.receive_piece, Control.send

    def receive(self: LinkEnd, *arguments: Any) -> bytes:
        assert may_read.wait(WAIT_S)
        return real_receive(self, *arguments)

    def send(self: Control, frame: Any, timeout_s: float) -> None:
        real_send(self, frame, timeout_s)
        if isinstance(frame, End):
            all_sent.set()

    monkeypatch.setattr(LinkEnd, "receive_piece", receive)
    monkeypatch.setattr(Control, "send", send)
    kv = begin(prefill, decode, "t", [2])
    assert all_sent.wait(WAIT_S)
    prefill.cancel(TransferKey("t", 1), "send")
    assert prefill.outcome("sending", TransferKey("t", 1)).code == "transfer_cancelled"
    prefill.fill([2], kv.flip(0))
    may_read.set()
    if decode.outcome("receiving", TransferKey("t", 1)).code != "peer_gone":
        decode.check([2], kv)  # what was copied when it was sent
        assert sockets == "tcp"


def test_memory_goes_without_a_copy_only_where_the_system_can_do_that(
    make_engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    real_pipe = Connection.pipe

    def pipe(self: Connection) -> tuple[int, int]:
        made.append(real_pipe(self))
        return made[-1]

    monkeypatch.setattr(Connection, "pipe", pipe)
    prefill, decode = pair(make_engine)
    move(prefill, decode, "t", BLOCKS)
    assert can_splice()
    assert len(set(made) - {NO_PIPE}) == 1
    monkeypatch.setattr("pdkv.connectors.p2p.sockets.can_splice", lambda: False)
    other = make_engine("d2", layout=make_layout(**WIDE))
    prefill.meet(decode.card, other.card)
    other.meet(prefill.card)
    made.clear()
    move(prefill, other, "u", BLOCKS)
    assert set(made) == {NO_PIPE}


@SOCKETS
def test_a_message_wakes_threads_up_six_times_at_most(
    make_engine: Engines, monkeypatch: pytest.MonkeyPatch, sockets: str
) -> None:
    """Counted by the calls that wait for the other end, of both together, and the lane's for its order: what fits into
    a socket waits nowhere else.
    """
    prefill, decode = pair(make_engine, sockets=sockets)
    waits: list[str] = []
    real_receive, real_stream = Control.receive, pieces.PiecePool.stream

    def receive(self: Control, *arguments: Any, **rest: Any) -> Any:
        frame = real_receive(self, *arguments, **rest)
        waits.append(type(frame).__name__)
        return frame

    def stream(self: Any, plan: Any, sockets: Any, digests: Any, way: str, remaining_s: Any) -> None:
        waits.extend(["piece"] * (way == "receive"))
        real_stream(self, plan, sockets, digests, way, remaining_s)

    monkeypatch.setattr(Control, "receive", receive)
    monkeypatch.setattr(pieces.PiecePool, "stream", stream)
    move(prefill, decode, "first", [1])  # and the link is made
    waits.clear()
    move(prefill, decode, "t", [1])
    assert sorted(waits) == ["Accepted", "Delivered", "End", "Offer", "piece"]
    assert len(["order", *waits]) <= 6
