"""Challenge and response, sealed headers, the listener: who does not know the secret gets nothing and costs nothing."""

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from frame_fuzz import Mutator
from hypothesis import given
from hypothesis import strategies as st
from no_threads import no_threads
from traffic import wait_until_true

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.connectors.p2p.wire import Accepted, Control, Delivered, Welcome
from pdkv.connectors.peer.auth import (
    HEADER_BYTES,
    MAX_GREETING_BYTES,
    VERSION,
    Acceptor,
    Answer,
    Challenge,
    Hello,
    Party,
    Seal,
    Session,
    dial,
    digest_of,
)
from pdkv.connectors.peer.auth_listener import AuthListener
from pdkv.errors import PeerGone, ServerBusy, TransferError, TransferTimeout, Unauthenticated
from pdkv.host.strangers import MAX_STRANGERS_PER_SOURCE
from pdkv.testing import VirtualClock

WAIT_S = 60.0
SECRET = b"s" * 32
P, D = Party("p", "1", 0), Party("d", "1", 3)


# --- greetings, without I/O -----------------------------------------------------------------------------------------


def frame(greeting: Any) -> bytes:
    body = msgspec.msgpack.encode(greeting)
    return len(body).to_bytes(2, "little") + body


def parse(data: bytes, kind: type[Any]) -> Any:
    assert int.from_bytes(data[:2], "little") == len(data) - 2
    return msgspec.msgpack.decode(data[2:], type=kind)


class Recorded:
    """One greeting between `dial` and an acceptor, with what each said; `meddle` may change that on its way."""

    def __init__(
        self,
        *,
        secret: bytes = SECRET,
        channel: str = "c",
        meddle: Callable[[str, bytes], bytes] = lambda who, data: data,
    ) -> None:
        self.said: list[tuple[str, bytes]] = []
        self.acceptor = Acceptor(SECRET, "c")
        self.session: Session | None = None
        self.refusals: list[str] = []
        ours, theirs = socket.socketpair()
        listening = threading.Thread(target=self._listen, args=(theirs, meddle))
        listening.start()
        try:
            self.session = dial(ours, secret, channel, P, D, WAIT_S)
        except (Unauthenticated, PeerGone) as error:
            self.refusals.append(f"dialer: {error}")
        finally:
            ours.close()
            listening.join()

    def _listen(self, connection: socket.socket, meddle: Callable[[str, bytes], bytes]) -> None:
        with connection, contextlib.suppress(ConnectionError):
            while data := connection.recv(4096):
                self.said.append(("dialer", data))
                try:
                    reply = self.acceptor.feed(meddle("dialer", data))
                except Unauthenticated as error:
                    self.refusals.append(f"listener: {error}")
                    return
                if reply:
                    self.said.append(("listener", reply))
                    connection.sendall(meddle("listener", reply))


def test_both_ends_agree_and_the_secret_is_never_said() -> None:
    greeting = Recorded()
    assert greeting.session is not None
    assert greeting.acceptor.session is not None
    assert greeting.acceptor.session.hello == greeting.session.hello
    assert (greeting.session.hello.source, greeting.session.hello.target) == (P, D)
    for there, back in (
        (greeting.session.sending, greeting.acceptor.session.receiving),
        (greeting.acceptor.session.sending, greeting.session.receiving),
    ):
        assert back.open(there.make(5, digest_of(b"hello"))) == (5, digest_of(b"hello"))
    assert [who for who, _ in greeting.said] == ["dialer", "listener", "dialer"]
    assert not any(SECRET in data for _, data in greeting.said)


def test_a_thousand_wrong_greetings_get_nowhere() -> None:
    mutator, num_refused = Mutator((), 3), 0
    for _ in range(1000):
        acceptor = Acceptor(SECRET, "p2p")
        try:
            acceptor.feed(mutator.greeting())
            acceptor.feed(mutator.greeting())
        except Unauthenticated:
            num_refused += 1
        assert acceptor.session is None
    assert num_refused > 500


def test_a_wrong_secret_is_seen_by_the_dialer_which_then_proves_nothing() -> None:
    greeting = Recorded(secret=b"x" * 32)
    assert greeting.refusals == ["dialer: the listener in place of engine d rank 3 does not know its secret"]
    assert [who for who, _ in greeting.said] == ["dialer", "listener"]


@pytest.mark.parametrize("channel", ["", "d", "c\0", "x" * 900])
def test_a_secret_of_one_channel_opens_no_other(channel: str) -> None:
    greeting = Recorded(channel=channel)
    assert greeting.session is None
    assert greeting.acceptor.session is None


@pytest.mark.parametrize(("who", "message"), [("dialer", 0), ("dialer", 1), ("listener", 0)])
def test_a_flipped_bit_anywhere_in_a_greeting_is_seen(who: str, message: int) -> None:
    """Names, nonces, channel and proofs: every byte counts."""
    clean = [data for sayer, data in Recorded().said if sayer == who]
    for position in range(2, len(clean[message])):
        count = {"dialer": 0, "listener": 0}

        def flip(sayer: str, data: bytes, position: int = position, count: dict[str, int] = count) -> bytes:
            count[sayer] += 1
            if sayer != who or count[sayer] - 1 != message:
                return data
            changed = bytearray(data)
            changed[position] ^= 1
            return bytes(changed)

        greeting = Recorded(meddle=flip)
        assert greeting.acceptor.session is None, position


def test_a_replayed_greeting_opens_nothing() -> None:
    """The listener's nonce is new: yesterday's answer is wrong."""
    said = [data for who, data in Recorded().said if who == "dialer"]
    acceptor = Acceptor(SECRET, "c")
    assert acceptor.feed(said[0])
    with pytest.raises(Unauthenticated, match="does not know the secret"):
        acceptor.feed(said[1])
    assert acceptor.session is None


def test_a_proof_that_is_sent_back_proves_nothing() -> None:
    """Reflection: the listener's proof is none of a dialer, and a dialer takes its own greeting for no challenge."""
    hello = Hello(VERSION, "c", os.urandom(32), P, D, 1.0)
    acceptor = Acceptor(SECRET, "c")
    challenge = parse(acceptor.feed(frame(hello)), Challenge)
    with pytest.raises(Unauthenticated):
        acceptor.feed(frame(Answer(challenge.proof)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        echo = threading.Thread(target=lambda: theirs.sendall(theirs.recv(4096)))
        echo.start()
        with pytest.raises(Unauthenticated, match="not a greeting"):
            dial(ours, SECRET, "c", P, D, WAIT_S)
        echo.join()


def test_a_greeting_that_comes_byte_by_byte_is_one() -> None:
    ours, theirs = socket.socketpair()
    acceptor = Acceptor(SECRET, "c")

    def listen() -> None:
        while acceptor.session is None:
            theirs.sendall(acceptor.feed(theirs.recv(1)))

    listening = threading.Thread(target=listen)
    with ours, theirs:
        listening.start()
        assert dial(ours, SECRET, "c", P, D, WAIT_S)
        listening.join()


@given(st.binary(max_size=3000), st.integers(1, 50))
def test_noise_is_refused_and_kept_bounded(noise: bytes, step: int) -> None:
    acceptor = Acceptor(SECRET, "c")
    with contextlib.suppress(Unauthenticated):
        for start in range(0, len(noise), step):
            acceptor.feed(noise[start : start + step])
            assert len(acceptor._buffer) <= MAX_GREETING_BYTES + 2
    assert acceptor.session is None


@pytest.mark.parametrize(
    "data", [b"", b"\0\0", b"\xff\xff", frame(["Challenge", b"", b""]), frame(["Hello", 1])], ids=str
)
def test_a_dialer_meets_nobody_that_it_knows(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(Unauthenticated if data else PeerGone):
            dial(ours, SECRET, "c", P, D, WAIT_S)


def test_a_silent_listener_is_a_timeout() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TransferTimeout):
        dial(ours, SECRET, "c", P, D, 0.05)


# --- headers --------------------------------------------------------------------------------------------------------


def test_headers_that_are_changed_repeated_left_out_or_swapped_are_seen() -> None:
    sending = Seal(b"k" * 32)
    headers = [sending.make(length, digest_of(bytes(length))) for length in range(3)]
    assert {len(header) for header in headers} == {HEADER_BYTES}
    for header in headers:
        for position in range(HEADER_BYTES):
            changed = bytearray(header)
            changed[position] ^= 0x80
            with pytest.raises(Unauthenticated, match="MAC"):
                Seal(b"k" * 32).open(bytes(changed))
    for order in ([0, 0], [1], [0, 2], [0, 1, 1]):
        receiving = Seal(b"k" * 32)
        for number in order[:-1]:
            receiving.open(headers[number])
        with pytest.raises(Unauthenticated, match=f"expected message {len(order) - 1}, got {order[-1]}"):
            receiving.open(headers[order[-1]])
    with pytest.raises(Unauthenticated, match="MAC"):
        Seal(b"l" * 32).open(headers[0])
    with pytest.raises(Unauthenticated, match="MAC"):
        Seal(b"k" * 32).open(headers[0][:-1])


def wired() -> tuple[Control, Control, socket.socket, socket.socket]:
    """A sender and a receiver that know each other, with somebody between them, who holds these two sockets."""
    greeting = Recorded()
    assert greeting.session is not None
    pairs = [_tcp_pair() for _ in range(2)]
    sockets = [pairs[0][1], pairs[1][0]]
    sender = Control(pairs[0][0], "the receiver", greeting.session)
    receiver = Control(pairs[1][1], "the sender", greeting.acceptor.session)
    return sender, receiver, *sockets


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


FRAMES = [Welcome(), Accepted(), Delivered()]


@pytest.mark.parametrize(
    ("meddle", "num_right"),
    [
        (lambda frames: frames, 3),
        (lambda frames: [frames[0], frames[0]], 1),  # replayed
        (lambda frames: [frames[1], frames[0]], 0),  # reordered
        (lambda frames: [frames[0], frames[2]], 1),  # one left out
        (lambda frames: [frames[0], frames[1][:-1]], 1),  # cut off
        (lambda frames: [frames[0], frames[1][:-1] + b"\0"], 1),  # another body
        (lambda frames: [frames[0], frames[1][: HEADER_BYTES - 1]], 1),
        (lambda frames: [frames[0][:HEADER_BYTES] + frames[1][HEADER_BYTES:]], 0),  # bodies exchanged
        (lambda frames: [b"\xff" * 200], 0),
    ],
)
def test_what_happens_to_frames_on_their_way_is_seen(
    meddle: Callable[[list[bytes]], list[bytes]], num_right: int
) -> None:
    sender, receiver, from_sender, to_receiver = wired()
    frames = []
    for sent in FRAMES:
        sender.send(sent, WAIT_S)
        frames.append(from_sender.recv(4096))
    to_receiver.sendall(b"".join(meddle(frames)))
    to_receiver.shutdown(socket.SHUT_WR)
    assert [receiver.receive(WAIT_S) for _ in range(num_right)] == FRAMES[:num_right]
    with pytest.raises((Unauthenticated, PeerGone)):
        receiver.receive(WAIT_S)
    for end in (sender, receiver, from_sender, to_receiver):
        end.close()


def test_a_frame_that_is_sent_back_is_none() -> None:
    sender, receiver, from_sender, to_receiver = wired()
    sender.send(Welcome(), WAIT_S)
    from_sender.sendall(from_sender.recv(4096))
    with pytest.raises(Unauthenticated):
        sender.receive(WAIT_S)
    for end in (sender, receiver, from_sender, to_receiver):
        end.close()


# --- the listener -------------------------------------------------------------------------------------------------


class Opened:
    """A listener, who came in, and how to get to it."""

    def __init__(self, listener: socket.socket, timeout_s: float = WAIT_S, clock: Clock = MONOTONIC) -> None:
        self.family, self.address = listener.family, listener.getsockname()
        self.came: list[tuple[socket.socket, Session, str]] = []
        self.listener = AuthListener(
            [listener], SECRET, "c", handshake_timeout_s=timeout_s, name="test", clock=clock,
            welcome=lambda *arguments: self.came.append(arguments),
        )  # fmt: skip
        self._mine: list[socket.socket] = []

    def connect(self) -> socket.socket:
        connection = socket.socket(self.family, socket.SOCK_STREAM)
        self._mine.append(connection)
        connection.settimeout(WAIT_S)
        connection.connect(self.address)
        return connection

    def enter(self) -> Session:
        return dial(self.connect(), SECRET, "c", P, D, WAIT_S)

    def close(self) -> None:
        assert self.listener.close(WAIT_S)
        assert self.listener.close(WAIT_S)
        for connection in [*self._mine, *(connection for connection, *_ in self.came)]:
            connection.close()


@pytest.fixture(params=["tcp", "unix"])
def opened(request: pytest.FixtureRequest, keep: Callable[..., Any]) -> Callable[..., Opened]:
    def open_listener(**arguments: Any) -> Opened:
        if request.param == "tcp":
            listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        else:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind("")  # a name that the kernel chooses, for all users of the host
            listener.listen(1024)
        return keep(Opened(listener, **arguments))

    return open_listener


def test_a_peer_comes_in_and_its_connection_works(opened: Callable[..., Opened]) -> None:
    own = opened()
    session = own.enter()
    wait_until_true(lambda: len(own.came) == 1, "it came in")
    connection, theirs, source = own.came[0]
    assert theirs.hello == session.hello
    assert source in ("127.0.0.1", f"uid {os.geteuid()}")
    assert connection.getblocking()
    assert len(own.listener._strangers) == own.listener.num_refused == 0


def test_a_listener_whose_thread_ends_before_it_is_woken_closes(
    opened: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer's greeting may end the thread's turn first, and its descriptors must not be others' by then."""
    own = opened()
    thread = own.listener._thread
    wake = thread._wake

    def wake_late() -> None:
        own.connect()
        wait_until_true(lambda: not thread.is_alive, "the thread has ended")
        assert all(listener.fileno() >= 0 for listener in own.listener._listeners)
        wake()

    monkeypatch.setattr(thread, "_wake", wake_late)
    own.close()
    assert all(listener.fileno() < 0 for listener in own.listener._listeners)


def test_a_listener_for_which_there_is_no_thread_leaves_nothing(opened: Callable[..., Opened]) -> None:
    before = os.listdir("/proc/self/fd")
    with no_threads(), pytest.raises(ServerBusy, match="no thread for test"):
        opened()
    assert os.listdir("/proc/self/fd") == before


def test_a_thousand_idle_strangers_hold_few_descriptors_and_keep_nobody_out(opened: Callable[..., Opened]) -> None:
    own = opened()
    for i in range(1000):
        with contextlib.suppress(BlockingIOError):  # a unix socket's queue is full
            connection = own.connect()
            if i % 2:
                connection.send(b"\x10")
        if i % 100 == 99:
            own.enter()
    wait_until_true(lambda: len(own.came) == 10, "all peers came in")
    assert len(own.listener._strangers) <= MAX_STRANGERS_PER_SOURCE


def test_as_many_peers_as_have_links_may_come_at_once(opened: Callable[..., Opened]) -> None:
    """None is pushed out by the others."""
    own, together = opened(), threading.Barrier(64)
    sessions: list[Session] = []

    def enter() -> None:
        together.wait()
        sessions.append(own.enter())

    peers = [threading.Thread(target=enter) for _ in range(64)]
    for peer in peers:
        peer.start()
    for peer in peers:
        peer.join()
    assert len(sessions) == 64
    wait_until_true(lambda: len(own.came) == 64, "all came in")
    assert own.listener.num_refused == 0


def test_a_stranger_that_is_too_slow_has_to_go(opened: Callable[..., Opened]) -> None:
    """Half open, or a byte now and then: the deadline is one for all of the greeting."""
    clock = VirtualClock()
    own = opened(timeout_s=10.0, clock=clock)
    silent, slow = own.connect(), own.connect()
    wait_until_true(lambda: len(own.listener._strangers) == 2, "they are seen")
    for _ in range(2):
        assert own.listener.num_refused == 0
        clock.advance(5.0)
        slow.send(b"\1")  # whoever says something wakes the listener
    assert not silent.recv(1)
    wait_until_true(lambda: own.listener.num_refused == 2, "both are gone")
    assert len(own.listener._strangers) == 0


def test_the_oldest_of_the_same_source_makes_room(
    opened: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdkv.host.strangers.MAX_STRANGERS_PER_SOURCE", 2)
    own = opened()
    connections = []
    for number in range(1, 4):
        connections.append(own.connect())
        wait_until_true(lambda n=number: len(own.listener._strangers) + own.listener.num_refused == n, "it is seen")  # type: ignore[misc]
    assert not connections[0].recv(1)
    connections[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        connections[1].recv(1)


def test_without_descriptors_a_stranger_makes_room_and_the_listener_recovers(opened: Callable[..., Opened]) -> None:
    own = opened()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    idle = own.connect()
    wait_until_true(lambda: len(own.listener._strangers) == 1, "it is seen")
    mine = [socket.socket(own.family, socket.SOCK_STREAM) for _ in range(2)]
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        for connection in mine:
            connection.settimeout(WAIT_S)
            connection.connect(own.address)
        assert not idle.recv(1)  # it has given its descriptor back
        wait_until_true(lambda: own.listener.num_refused >= 1, "a stranger has made room")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for connection in mine:
            connection.close()
    own.enter()
    wait_until_true(lambda: len(own.came) == 1, "a peer comes in again")


@pytest.mark.parametrize("opened", ["unix"], indirect=True)
def test_another_user_of_the_host_does_not_get_to_the_greeting(
    opened: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unix sockets say whose they are."""
    own = opened()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(PeerGone):
        own.enter()
    assert own.listener.num_refused == 1


def test_what_a_welcome_raises_ends_nobody_else(opened: Callable[..., Opened]) -> None:
    own = opened()
    welcome = own.listener._welcome

    def fail(connection: socket.socket, *rest: object) -> None:
        raise TransferError("no")

    own.listener._welcome = fail
    connection = own.connect()
    dial(connection, SECRET, "c", P, D, WAIT_S)
    assert not connection.recv(1)  # it is closed
    own.listener._welcome = welcome
    wait_until_true(lambda: own.enter() and bool(own.came), "the next one comes in")
