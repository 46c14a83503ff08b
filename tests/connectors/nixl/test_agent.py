"""The wrapper of NIXL against real agents in other processes: data, messages, and every way in which a peer fails."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from nixl_peer import Listening as Own
from nixl_rig import PIECE, WAIT_S, Peer, needs_nixl
from traffic import wait_until_true

from pdkv.connectors.nixl import agent as nixl_agent
from pdkv.connectors.nixl.agent import Memory, NixlAgent, load_bindings
from pdkv.errors import ConfigError, IncompatiblePeers, PeerGone, TransferCancelled, TransferError, TransferTimeout

pytestmark = needs_nixl


@pytest.fixture
def start_peer(keep: Callable[..., Any]) -> Callable[..., Peer]:
    def start(name: str = "peer", **arguments: int) -> Peer:
        return keep(Peer(name, **arguments))

    return start


def copy(
    own: Own, peer: Peer, *, num_pieces: int = 8, timeout_s: float = WAIT_S, check: Callable[[], None] | None = None
) -> None:
    """Pieces in reverse order on this side."""
    theirs = np.arange(num_pieces, dtype=np.int64) * PIECE
    ours = theirs[::-1].copy()
    own.agent.read(
        peer.name,
        own.region.pieces(ours, PIECE),
        peer.region.pieces(theirs, PIECE),
        deadline=time.monotonic() + timeout_s,
        check=check,
    )


def meet(own: Own, peer: Peer) -> None:
    """Connect, and go through the first transfer, with which UCX connects."""
    own.agent.add_peer(peer.name, peer.metadata)
    copy(own, peer)


def test_a_read_brings_exactly_the_pieces_named(own: Own, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer(fill=9)
    meet(own, peer)
    assert (own.data[: 8 * PIECE] == 9).all()
    assert not own.data[8 * PIECE :].any()


def test_messages_go_both_ways(own: Own, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer()
    own.agent.add_peer(peer.name, peer.metadata)
    peer.know(own.agent)
    own.agent.send(peer.name, b"hello")
    assert peer.ask("hear") == [["own", "hello"]]
    peer.ask("say", "own", "there")
    assert own.messages.get(timeout=WAIT_S) == ("peer", b"there")


def test_a_message_that_is_too_long_is_counted_and_dropped(
    own: Own, start_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_agent, "MAX_MESSAGE_BYTES", 4)
    peer = start_peer()
    peer.know(own.agent)
    peer.ask("say", "own", "garbage")
    wait_until_true(lambda: own.agent.num_bad_messages, "the message")
    assert own.messages.empty()


def test_an_agents_name_that_is_no_text_is_counted_and_dropped(own: Own) -> None:
    """F17: no frame ends the loop that receives."""
    bindings = load_bindings()
    stranger = bindings.nixlAgent(b"\xff\xfe", bindings.nixlAgentConfig())
    stranger.createBackend("UCX", {})
    stranger.loadRemoteMD(own.agent.metadata())
    stranger.genNotif("own", b"hello", [])

    def heard() -> int:
        stranger.getNotifs({}, [])  # it has no thread of its own that makes progress
        return own.agent.num_bad_messages

    assert wait_until_true(heard, "the message") == 1


def test_a_killed_peer_is_gone(own: Own, start_peer: Callable[..., Peer]) -> None:
    """F5."""
    peer = start_peer()
    meet(own, peer)
    peer.kill()
    with pytest.raises(PeerGone):
        copy(own, peer)
    assert not own.agent.is_connected(peer.name)
    with pytest.raises(PeerGone):
        own.agent.send(peer.name, b"hello")


def test_a_peer_that_dies_during_a_transfer_is_gone(own: Own, start_peer: Callable[..., Peer]) -> None:
    """F5."""
    peer = start_peer()
    meet(own, peer)
    started = threading.Event()
    killer = threading.Thread(target=lambda: started.wait(WAIT_S) and peer.kill())
    killer.start()

    def copy_on() -> None:
        while True:
            started.set()
            copy(own, peer, num_pieces=256)

    with pytest.raises(PeerGone):
        copy_on()
    killer.join()


def test_a_restarted_peer_is_another_one_whose_old_description_leads_nowhere(
    own: Own, start_peer: Callable[..., Peer]
) -> None:
    """F5: old descriptors are invalid, a reconnect works."""
    first = start_peer("peer")
    meet(own, first)
    first.kill()
    second = start_peer("peer", fill=3)
    with pytest.raises(PeerGone):
        copy(own, first)
    with pytest.raises(PeerGone):
        meet(own, first)
    own.agent.disconnect("peer")
    meet(own, second)
    assert own.data[0] == 3


def test_a_peer_that_is_stopped_times_out_and_can_be_met_again(own: Own, start_peer: Callable[..., Peer]) -> None:
    """A stopped process answers no handshake: the transfer ends at its deadline, and its connection with it."""
    peer = start_peer()
    peer.signal(signal.SIGSTOP)
    own.agent.add_peer(peer.name, peer.metadata)
    with pytest.raises(TransferTimeout):
        copy(own, peer, timeout_s=0.0)
    assert not own.agent.is_connected(peer.name)
    peer.signal(signal.SIGCONT)
    meet(own, peer)
    assert own.data[0] == 7


def test_what_waits_for_one_peer_holds_up_no_other(own: Own, start_peer: Callable[..., Peer]) -> None:
    stopped, well = start_peer("stopped"), start_peer("well")
    stopped.signal(signal.SIGSTOP)
    own.agent.add_peer("stopped", stopped.metadata)
    errors: list[Exception] = []

    def wait_for_stopped() -> None:
        try:
            copy(own, stopped, check=began.set)
        except TransferError as error:
            errors.append(error)

    began = threading.Event()
    waiting = threading.Thread(target=wait_for_stopped)
    waiting.start()
    assert began.wait(WAIT_S)
    meet(own, well)
    assert waiting.is_alive()
    own.agent.disconnect("stopped")  # returns when nothing of the transfer is under way
    waiting.join(WAIT_S)
    assert [type(error) for error in errors] == [TransferCancelled]
    meet(own, well)


def test_who_disconnects_does_not_wait_for_a_transfer_that_does_not_look(
    own: Own, start_peer: Callable[..., Peer]
) -> None:
    """The message thread disconnects; whichever transfer leaves last closes the connection."""
    peer = start_peer()
    peer.signal(signal.SIGSTOP)
    own.agent.add_peer(peer.name, peer.metadata)
    began, may_look = threading.Event(), threading.Event()
    errors: list[TransferError] = []

    def hold() -> None:
        began.set()
        assert may_look.wait(2 * WAIT_S)

    def transfer() -> None:
        try:
            copy(own, peer, check=hold)
        except TransferError as error:
            errors.append(error)

    waiting = threading.Thread(target=transfer, daemon=True)
    waiting.start()
    assert began.wait(WAIT_S)
    said: list[bool] = []
    message_thread = threading.Thread(target=lambda: said.append(own.agent.disconnect(peer.name)), daemon=True)
    message_thread.start()
    message_thread.join(WAIT_S)
    still_waits = message_thread.is_alive()
    may_look.set()
    waiting.join(WAIT_S)
    assert not still_waits
    assert said == [False]
    assert [type(error) for error in errors] == [TransferCancelled]
    assert own.agent.disconnect(peer.name)
    peer.signal(signal.SIGCONT)
    meet(own, peer)


def test_a_check_can_end_a_transfer(own: Own, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer()
    peer.signal(signal.SIGSTOP)
    own.agent.add_peer(peer.name, peer.metadata)

    def give_up() -> None:
        raise TransferCancelled("given up")

    with pytest.raises(TransferCancelled, match="given up"):
        copy(own, peer, check=give_up)
    assert not own.agent.is_connected(peer.name)


@pytest.mark.parametrize(
    "spoil",
    [lambda data: b"", lambda data: b"abc", lambda data: data[:100], lambda data: data.replace(b"peer", b"reep")],
)
def test_metadata_that_is_not_the_peers_is_refused(
    own: Own, start_peer: Callable[..., Peer], spoil: Callable[[bytes], bytes]
) -> None:
    peer = start_peer()
    with pytest.raises((IncompatiblePeers, PeerGone)):
        own.agent.add_peer("peer", spoil(peer.metadata))
    meet(own, peer)  # nothing of it is left


def test_pieces_outside_of_a_region_are_refused_before_anything_moves() -> None:
    region = Memory(1 << 20, 100)
    for offset, size in ((-1, 2), (99, 2), (0, 0), (101, 1)):
        with pytest.raises(TransferError, match="outside"):
            region.pieces(np.array([offset]), size)


def test_memory_of_the_peer_that_is_not_registered_is_refused(own: Own, start_peer: Callable[..., Peer]) -> None:
    peer = start_peer()
    meet(own, peer)
    beyond = Memory(peer.region.address, 2 * peer.region.size)
    offset = np.array([peer.region.size])
    with pytest.raises(TransferError):
        own.agent.read(
            peer.name,
            own.region.pieces(np.array([0]), PIECE),
            beyond.pieces(offset, PIECE),
            deadline=time.monotonic() + WAIT_S,
        )
    copy(own, peer)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(nixl_agent.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install.*nixl"):
        NixlAgent("own")
