"""Threads that help to read: who reads what, and what happens when a helper cannot."""

import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from nixl_peer import Listening as Own
from nixl_rig import NO_DOORBELL, PIECE, WAIT_S, Peer, needs_nixl
from traffic import wait_until_true

from pdkv.connectors.nixl.agent import NixlAgent
from pdkv.connectors.nixl.helper_threads import Helper, SharedPosts
from pdkv.connectors.nixl.wire import BLOB_VERSION, RankBlob
from pdkv.errors import PeerGone, TransferCancelled
from pdkv.host.host_id import host_id

pytestmark = needs_nixl


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer("peer", fill=9)
    yield peer
    peer.kill()


@pytest.fixture
def start_helper(own: Own) -> Iterator[Callable[[], Helper]]:
    helpers: list[Helper] = []

    def start() -> Helper:
        helpers.append(Helper("own#1", own.region, lambda blob: True, lambda blob: None))
        return helpers[-1]

    yield start
    for helper in helpers:
        helper.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "pdkv-nixl-help"]


def blob_of(peer: Peer) -> RankBlob:
    return RankBlob(
        version=BLOB_VERSION, mode="pull", agent=peer.name, metadata=peer.metadata, host=host_id(),
        doorbell=NO_DOORBELL, pool=peer.region, block_bytes=PIECE, slots=peer.region, slot_bytes=PIECE,
        permits=peer.region,
    )  # fmt: skip


def read_piece(own: Own, peer: Peer, agent: NixlAgent, piece: int) -> None:
    offset = np.asarray([piece * PIECE])
    agent.transfer(
        "READ",
        peer.name,
        own.region.pieces(offset, PIECE),
        peer.region.pieces(offset, PIECE),
        deadline=time.monotonic() + WAIT_S,
    )


def test_a_helper_reads_by_an_agent_of_its_own(own: Own, peer: Peer, start_helper: Callable[[], Helper]) -> None:
    helped = threading.Event()
    readers = {}

    def read(piece: int, agent: NixlAgent | None) -> None:
        if agent is None:
            assert helped.wait(WAIT_S)
        readers[piece] = agent
        read_piece(own, peer, agent or own.agent, piece)
        if agent is not None:
            helped.set()

    own.agent.connect(peer.name, peer.metadata)
    helper = start_helper()
    shared = SharedPosts(blob_of(peer), range(4), read)
    helper.ask(shared)
    shared.read_all()
    assert sorted(readers) == [0, 1, 2, 3]
    assert {agent.name for agent in readers.values() if agent is not None} == {"own#1"}
    assert (own.data[: 4 * PIECE] == 9).all()
    assert not own.data[4 * PIECE :].any()


def test_what_a_helper_cannot_read_is_read_by_the_transfers_own_thread(
    own: Own, peer: Peer, start_helper: Callable[[], Helper]
) -> None:
    failed = threading.Event()
    read_by_itself = []

    def read(piece: int, agent: NixlAgent | None) -> None:
        if agent is not None:
            failed.set()
            raise PeerGone("not for me")
        assert failed.wait(WAIT_S)
        read_by_itself.append(piece)

    shared = SharedPosts(blob_of(peer), range(4), read)
    start_helper().ask(shared)
    shared.read_all()
    assert sorted(read_by_itself) == [0, 1, 2, 3]


def test_a_transfer_that_is_given_up_waits_for_its_helpers(
    own: Own, peer: Peer, start_helper: Callable[[], Helper]
) -> None:
    """Nothing is written after it has ended."""
    helping, may_end = threading.Event(), threading.Event()
    begun = []

    def read(piece: int, agent: NixlAgent | None) -> None:
        begun.append(piece)
        if agent is not None:
            helping.set()
            assert may_end.wait(WAIT_S)
            return
        assert helping.wait(WAIT_S)
        raise TransferCancelled("enough")

    ended: list[Exception] = []

    def read_all() -> None:
        try:
            shared.read_all()
        except TransferCancelled as error:
            ended.append(error)

    shared = SharedPosts(blob_of(peer), range(8), read)
    start_helper().ask(shared)
    thread = threading.Thread(target=read_all)
    thread.start()
    assert helping.wait(WAIT_S)
    wait_until_true(lambda: shared.is_over, "nothing is handed out any more")
    assert thread.is_alive()
    assert not ended
    may_end.set()
    thread.join(WAIT_S)
    assert len(ended) == 1
    assert len(begun) == 2


def test_a_peer_that_does_not_answer_a_helper_delays_nobody(
    own: Own, peer: Peer, start_helper: Callable[[], Helper]
) -> None:
    own.agent.connect(peer.name, peer.metadata)
    read_piece(own, peer, own.agent, 0)
    peer.signal(signal.SIGSTOP)
    readers = []

    def read(piece: int, agent: NixlAgent | None) -> None:
        readers.append(agent)
        read_piece(own, peer, agent or own.agent, piece)

    helper = start_helper()
    for _ in range(3):
        shared = SharedPosts(blob_of(peer), range(4), read)
        helper.ask(shared)
        shared.read_all()
    helper.close()
    assert readers == [None] * 12
    assert (own.data[: 4 * PIECE] == 9).all()
