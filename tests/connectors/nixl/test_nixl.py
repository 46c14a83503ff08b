"""The `nixl` connector between two real processes: content, cuts, failures, and what is left afterwards."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from nixl_engines import NUM_BLOCKS, WAIT_S, Engine, RemoteEngine, awaiting, closing, make_layout, view
from nixl_peer import Listening
from nixl_rig import needs_nixl
from traffic import held_by_process, wait_until_true, wait_until_within

from pdkv.connector_kit.rig.shm_files import left_behind, shm_files
from pdkv.connectors.base import TransferKey
from pdkv.connectors.nixl.connector import NixlConnector
from pdkv.connectors.nixl.doorbell import DoorbellAddress
from pdkv.connectors.nixl.receiver import _GRACE_S
from pdkv.connectors.nixl.wire import Dropped, Freed, Gather, Reset, Taken, encode
from pdkv.connectors.nixl.wire import decode as decode_message
from pdkv.connectors.peer.pull_scheduler import BlockLoad, PullMetadata
from pdkv.connectors.registry import load_connector, plan_connector
from pdkv.errors import (
    ConfigError,
    KVNotFound,
    PeerGone,
    StaleEpoch,
    StaleGeneration,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from pdkv.testing import VirtualClock
from pdkv.wire.kv import EngineCard

pytestmark = needs_nixl

MODES = ["pull", "push"]

BY_UCX = {"path": "ucx"}
PATHS = [{"path": "arena"}, BY_UCX]
"""Within a host."""

GATHER_ALL = {**BY_UCX, "gather_below": str(1 << 30), "gather_min_pieces": "1"}
MEANS = [
    pytest.param({"path": "arena"}, id="arena"),
    pytest.param(GATHER_ALL, id="gather"),
    pytest.param(BY_UCX, id="ucx", marks=pytest.mark.slow),
]
"""Memory that is read in place, and messages; the others differ from these in how bytes are copied."""

SMALL_SLOTS = {"slot_bytes": "8192", "slots": "4"}
TIMEOUT_S = 1000.0
PATIENT = {"transfer_timeout_s": str(TIMEOUT_S)}
"""Passes by a test's clock alone."""


def of(mode: str) -> dict[str, str]:
    """A mode's options."""
    return {"mode": mode}


class World:
    """A prefill engine in a process of its own and a decode engine in this one, which know each other."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._numbers = iter(range(1000))
        self.clock = VirtualClock()
        """Of the engines in this process."""

    def remote(self, name: str = "p", **arguments: Any) -> RemoteEngine:
        """An engine in a process of its own."""
        engine: RemoteEngine = self._make(RemoteEngine, name, **arguments)
        return engine

    def local(self, name: str = "d", **arguments: Any) -> Engine:
        """An engine in this process."""
        engine: Engine = self._make(Engine, name, clock=self.clock, **arguments)
        return engine

    def pair(self, mode: str = "pull", options: dict[str, str] | None = None, **sides: Any) -> tuple[Any, Engine]:
        """(prefill, decode), which know each other. `prefill`, `decode`: arguments of one side only."""
        common = {"options": {**of(mode), **(options or {})}}
        prefill = self.remote("p", **common, **sides.get("prefill", {}))
        decode = self.local("d", **common, **sides.get("decode", {}))
        introduce(prefill, decode)
        return prefill, decode

    def let_time_out(self, engine: Engine, key: str, is_under_way: Callable[[], Any]) -> None:
        """A transfer that is under way, of an engine in this process, ends at its deadline."""
        wait_until_true(is_under_way, "it is under way")
        self.clock.advance(TIMEOUT_S)
        assert engine.ended(key).code == TransferTimeout.code

    def key(self) -> str:
        """A transfer's name."""
        return f"t{next(self._numbers)}"


@pytest.fixture
def world() -> Iterator[World]:
    with closing() as make:
        yield World(make)


def introduce(*engines: Any) -> None:
    """They know each other and nobody else."""
    for engine in engines:
        engine.meet(*[other.card for other in engines if other is not engine])


def scattered(num_blocks: int, step: int = 11) -> list[int]:
    """So many blocks, no two of them neighbours."""
    return [(step * i + 5) % NUM_BLOCKS for i in range(num_blocks)]


def runs(engine: Engine, key: str) -> bool:
    """Whether a thread works on a load."""
    return [job.state for job in engine.workers[0].open_jobs(TransferKey(key, 1), "receive")] == ["running"]


def blocks_for(num_tokens: int, engine: Any) -> int:
    return -(-num_tokens // engine.card.layout.block_size)


def begin(mode: str, key: str, prefill: Any, decode: Engine, num_tokens: int, hit: int = 0) -> tuple[Any, list[int]]:
    """Compute a prompt on one side and begin to load it on the other; returns (hand-off or ticket, decode's blocks)."""
    theirs = scattered(blocks_for(num_tokens, prefill))
    ours = scattered(blocks_for(num_tokens, decode), 7)
    prefill.call("fill", theirs, num_tokens, 1)
    if mode == "pull":
        handoff = prefill.hand_off(key, theirs, num_tokens)
        decode.load(awaiting(handoff), ours, hit)
        return handoff, ours
    ticket = decode.load(view(key, kv="await_peer", num_tokens=num_tokens + 1), ours, hit)
    return ticket, ours


def send(key: str, ticket: bytes | None, prefill: Any, num_tokens: int, cuts: Sequence[int] = ()) -> None:
    """Push: confirm a prompt up to each of `cuts`, and then all of it."""
    theirs = scattered(blocks_for(num_tokens, prefill))
    for start, stop in zip([0, *cuts], [*cuts, num_tokens], strict=True):
        prefill.push(key, ticket, theirs, start, stop, last=stop == num_tokens)


def hand_over(mode: str, world: World, prefill: Any, decode: Engine, num_tokens: int, hit: int = 0) -> None:
    """One whole transfer: every token behind the hit is right."""
    key = world.key()
    ticket, ours = begin(mode, key, prefill, decode, num_tokens, hit)
    if mode != "pull":
        send(key, ticket, prefill, num_tokens, [num_tokens // 2 // 32 * 32] if num_tokens >= 64 else [])
        codes = {code for code, *_ in prefill.call("outcomes", key)}
        assert codes == {""}  # first: a receive whose offers failed waits for the router's word
    assert decode.ended(key).code == ""
    assert decode.wrong_tokens(ours, hit, num_tokens, 1) == []


def check_nothing_is_left(*engines: Any) -> None:
    """All slots are free again, all jobs have ended."""
    for engine in engines:
        if isinstance(engine, Engine):
            wait_until_true(lambda e=engine: [len(w.source._free) for w in e.workers] == _slots(e), "slots")  # type: ignore[misc]
            assert [worker.num_open_jobs for worker in engine.workers] == [0] * engine.tp
            buffers = engine.workers[0].endpoint.buffers
            assert buffers.num_free == buffers.count
        else:
            wait_until_true(lambda e=engine: len(set(e.call("free_slots"))) == 1, "slots")  # type: ignore[misc]


def _slots(engine: Engine) -> list[int]:
    return [worker.endpoint.slots.count for worker in engine.workers]


# --- content ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [*PATHS, pytest.param(GATHER_ALL, marks=pytest.mark.slow), {**GATHER_ALL, **SMALL_SLOTS}],
    ids=["arena", "ucx", "gather", "small"],
)
def test_every_token_arrives(world: World, mode: str, options: dict[str, str]) -> None:
    prefill, decode = world.pair(mode, options)
    for num_tokens, hit in ((100, 0), (37, 32), (200, 64), (16, 0), (1, 0)):
        hand_over(mode, world, prefill, decode, num_tokens, hit)
    check_nothing_is_left(prefill, decode)


SHAPES = [(1, 2, 16, 16), (2, 1, 16, 32), (2, 4, 32, 16), (4, 1, 16, 16), (1, 1, 32, 16), (1, 1, 16, 32)]
"""(tp, the peer's, block size, the peer's)."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("path", "tp", "peer_tp", "block_size", "peer_block_size"),
    [
        pytest.param(path, *shape, marks=() if number == 2 * n else pytest.mark.slow)
        for n, path in enumerate(("arena", "ucx"))
        for number, shape in enumerate(SHAPES)
    ],
)
def test_engines_of_unequal_shape_exchange_every_token(
    world: World, mode: str, path: str, tp: int, peer_tp: int, block_size: int, peer_block_size: int
) -> None:
    """F20."""
    sides = {"prefill": {"tp": tp, "block_size": block_size}, "decode": {"tp": peer_tp, "block_size": peer_block_size}}
    prefill, decode = world.pair(mode, {"path": path, **SMALL_SLOTS}, **sides)
    for num_tokens, hit in ((100, 0), (200, 64)):
        hand_over(mode, world, prefill, decode, num_tokens, hit)
    check_nothing_is_left(prefill, decode)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("pull", {}),
        ("push", GATHER_ALL),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("pull", {**GATHER_ALL, "threads_per_peer": "4"}),
                ("pull", {**BY_UCX, "threads_per_peer": "4"}),
                ("push", {}),
                ("pull", GATHER_ALL),
            )
        ),
    ],
)
def test_a_hundred_transfers_at_once(world: World, mode: str, options: dict[str, str]) -> None:
    """F7, F18."""
    prefill, decode = world.pair(mode, {**SMALL_SLOTS, **options})
    theirs, ours = scattered(2), [[2 * (i % 30), 2 * (i % 30) + 1] for i in range(100)]
    prefill.call("fill", theirs, 32, 1)
    keys = [world.key() for _ in range(100)]
    for key, block_ids in zip(keys, ours, strict=True):
        if mode == "pull":
            decode.load(awaiting(prefill.hand_off(key, theirs, 32)), block_ids)
        else:
            ticket = decode.load(view(key, kv="await_peer", num_tokens=33), block_ids)
            prefill.push(key, ticket, theirs, 0, 32, last=True)
    found: dict[tuple[str, int], Any] = {}
    while len(found) < 100:
        results = decode.next_results()
        assert not results.failed_receiving
        found.update(results.finished_receiving)
    assert all(decode.wrong_tokens(block_ids, 0, 32, 1) == [] for block_ids in ours)
    check_nothing_is_left(prefill, decode)


# --- late reads, epochs, refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", MEANS)
def test_blocks_that_were_reused_are_refused(world: World, options: dict[str, str]) -> None:
    """F4: the lease has expired, decode reads late."""
    prefill, decode = world.pair("pull", options)
    theirs = scattered(4)
    prefill.call("fill", theirs, 64, 1)
    handoff = prefill.hand_off("late", theirs, 64)
    prefill.call("reuse", theirs[2])
    decode.load(awaiting(handoff), scattered(4, 7))
    assert decode.ended("late").code == StaleGeneration.code
    hand_over("pull", world, prefill, decode, 64)


@pytest.mark.parametrize("mode", MODES)
def test_a_restarted_peer_is_met_again_and_its_predecessor_is_refused(world: World, mode: str) -> None:
    """F5: without touching others."""
    prefill, decode = world.pair(mode)
    other = world.remote("other", options=of(mode))
    introduce(prefill, decode, other)
    hand_over(mode, world, prefill, decode, 100)
    old = prefill.hand_off("old", [0], 16) if mode == "pull" else None
    prefill.signal(signal.SIGKILL)
    successor = world.remote("p", epoch="2", options=of(mode))
    introduce(successor, decode, other)
    if old is not None:
        assert decode.scheduler.get_num_new_matched_tokens(awaiting(old), 0).num_tokens == 0
        load = BlockLoad(TransferKey("old", 1), "p", "1", 0, 16, 16, bytes(8), bytes(8), [1])
        decode.workers[0].start_load_kv(PullMetadata(step_id=0, loads=[load]))
        assert decode.ended("old").code == StaleEpoch.code
    hand_over(mode, world, successor, decode, 100)
    hand_over(mode, world, other, decode, 100)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("prefill", "decode", "what"),
    [
        ({"options": {"mode": "pull"}}, {"options": {"mode": "push"}}, "mode of the nixl connector"),
        ({"layout": make_layout(dtype="float16", dtype_bytes=2)}, {}, "float16"),
        (
            {"tp": 2, "layout": make_layout(num_kv_heads=3, total_kv_heads=6)},
            {"tp": 3, "layout": make_layout(num_kv_heads=2, total_kv_heads=6)},
            "2 there",
        ),
    ],
    ids=["mode", "dtype", "ranks"],
)
def test_what_cannot_work_is_refused_from_the_cards_with_both_values(
    world: World,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    prefill: dict[str, Any],
    decode: dict[str, Any],
    what: str,
) -> None:
    options = {"options": of(mode)}
    theirs = world.local("p", **{**options, **prefill})
    ours = world.local("d", **{**options, **decode})
    introduce(theirs, ours)
    assert what in caplog.text
    assert not ours.scheduler.peers.knows("p", "1")


# --- peers that stop, die or talk nonsense ----------------------------------------------------------------------------


def test_a_pull_from_a_stopped_peer_ends_at_its_deadline(world: World) -> None:
    """What is gathered needs the peer: its silence is a TransferTimeout, and afterwards it serves again."""
    prefill, decode = world.pair("pull", {**GATHER_ALL, **PATIENT})
    hand_over("pull", world, prefill, decode, 100)
    theirs = scattered(4)
    prefill.call("fill", theirs, 64, 1)
    handoff = prefill.hand_off("stopped", theirs, 64)
    prefill.signal(signal.SIGSTOP)
    decode.load(awaiting(handoff), scattered(4, 7))
    gathered = decode.workers[0].reader.gathered
    world.let_time_out(decode, "stopped", lambda: gathered._open_requests("p/1/0"))
    prefill.signal(signal.SIGCONT)
    hand_over("pull", world, prefill, decode, 100)
    check_nothing_is_left(prefill, decode)


def test_a_first_pull_from_a_stopped_peer_ends_at_its_deadline(world: World) -> None:
    """No handshake."""
    prefill = world.remote("p", options={**PATIENT, **BY_UCX})
    decode = world.local("d", options={**PATIENT, **BY_UCX})
    handoff = prefill.hand_off("stopped", [1], 16)
    prefill.signal(signal.SIGSTOP)
    decode.meet(prefill.card)
    decode.load(awaiting(handoff), [2])
    world.let_time_out(decode, "stopped", lambda: runs(decode, "stopped"))
    prefill.signal(signal.SIGCONT)
    introduce(prefill, decode)
    hand_over("pull", world, prefill, decode, 100)


def test_what_a_stopped_peer_has_leased_is_read_on_its_host(world: World) -> None:
    """Nobody there takes part, not even in the first read."""
    options = {"path": "arena"}
    prefill, decode = world.remote("p", options=options), world.local("d", options=options)
    prefill.call("fill", scattered(4), 64, 1)
    handoff = prefill.hand_off("stopped", scattered(4), 64)
    prefill.signal(signal.SIGSTOP)
    decode.meet(prefill.card)
    decode.load(awaiting(handoff), scattered(4, 7))
    assert decode.ended("stopped").code == ""
    assert decode.wrong_tokens(scattered(4, 7), 0, 64, 1) == []


@pytest.mark.parametrize("options", MEANS)
def test_a_push_to_a_stopped_peer_ends_at_its_deadline(world: World, options: dict[str, str]) -> None:
    """The sender's blocks come free; the receiver, running again, gives its own back when the sender has confirmed."""
    receiver = world.remote("d", options={"mode": "push", **options, **PATIENT})
    sender = world.local("p", options={"mode": "push", **options, **PATIENT})
    introduce(receiver, sender)
    ticket = bytes.fromhex(receiver.call("await_push", "stopped", scattered(4, 7), 64))
    receiver.signal(signal.SIGSTOP)
    sender.fill_seeded(scattered(4), 64, 1)
    sender.push("stopped", ticket, scattered(4), 0, 64, last=True)
    (job,) = sender.workers[0].open_jobs(TransferKey("stopped", 1), "send")
    world.let_time_out(sender, "stopped", lambda: job.state == "posted")
    receiver.signal(signal.SIGCONT)
    receiver.call("cancel", "stopped")
    assert receiver.call("outcomes", "stopped")[0][0] == TransferCancelled.code
    check_nothing_is_left(sender)


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_a_receive_whose_sender_is_silent_ends_at_once_when_it_is_given_up(world: World, end: signal.Signals) -> None:
    """Only its own rank writes its blocks, so nobody's word is waited for."""
    prefill, decode = world.pair("push")
    ticket, _ = begin("push", "half", prefill, decode, 64)
    prefill.push("half", ticket, scattered(4), 0, 32, last=False)
    worker = decode.workers[0]
    wait_until_true(lambda: not decode.wrong_tokens(scattered(4, 7), 0, 32, 1), "the first half is there")
    prefill.signal(end)
    worker.cancel(TransferKey("half", 1), "receive")
    assert decode.ended("half").code == TransferCancelled.code
    check_nothing_is_left(decode)


def test_only_who_an_offer_was_made_to_can_say_that_it_is_taken(world: World) -> None:
    """A third engine that names the offer's number ends nothing; the sender's blocks stay where they are."""
    prefill, decode, other = (world.local(name, options={"mode": "push"}) for name in "pdo")
    introduce(prefill, decode, other)
    ticket = decode.load(view("t", kv="await_peer", num_tokens=65), scattered(4, 7), 0)
    sender = prefill.workers[0]
    taken: list[Any] = []
    sender.endpoint.handle(Taken, lambda blob, message: taken.append((blob, message)))
    prefill.push("t", ticket, scattered(4), 0, 64, last=True)
    wait_until_true(lambda: taken, "the receiver's word is here")
    (theirs, message), forger = taken[0], sender.endpoint.peers.agent("o/1/0")
    with pytest.raises(TransferError, match=r"offer .* was made to agent d/1/0"):
        sender._sender._on_taken(forger, message)
    assert sender.num_open_jobs == 1
    sender._sender._on_taken(theirs, message)
    assert prefill.ended("t").code == ""
    assert decode.ended("t").code == ""


def test_a_receive_that_nobody_writes_is_cancelled_at_once(world: World) -> None:
    """F1."""
    prefill, decode = world.pair("push")
    begin("push", "nobody", prefill, decode, 64)
    decode.workers[0].cancel(TransferKey("nobody", 1), "receive")
    assert decode.ended("nobody").code == TransferCancelled.code
    send("nobody", None, prefill, 64)  # too late
    check_nothing_is_left(decode)


def test_a_push_that_comes_too_late_is_refused(world: World) -> None:
    """F1: its offer is not read."""
    prefill, decode = world.pair("push")
    ticket, _ = begin("push", "late", prefill, decode, 64)
    decode.workers[0].cancel(TransferKey("late", 1), "receive")
    decode.ended("late")
    for pool in decode.pools:
        pool.zero_()
    send("late", ticket, prefill, 64)
    wait_until_true(lambda: decode.workers[0]._receiver._early, "its offer is here")
    world.clock.advance(2 * _GRACE_S)
    assert prefill.call("outcomes", "late")[0][0] == KVNotFound.code
    assert all(not pool.any() for pool in decode.pools)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("pull", GATHER_ALL),
        ("push", {}),
        pytest.param("pull", {}, marks=pytest.mark.slow),
        pytest.param("push", GATHER_ALL, marks=pytest.mark.slow),
    ],
)
def test_a_peer_that_dies_under_load_fails_its_transfers_only(world: World, mode: str, options: dict[str, str]) -> None:
    """F5: kill -9 in the middle of many transfers."""
    prefill, decode = world.pair(mode, {**options, **SMALL_SLOTS, **PATIENT})
    other = world.remote("other", options={**of(mode), **options, **SMALL_SLOTS})
    introduce(prefill, decode, other)
    theirs = scattered(30)
    prefill.call("fill", theirs, 480, 1)
    keys = [world.key() for _ in range(40)]
    if mode == "pull":
        views = [awaiting(prefill.hand_off(key, theirs, 480)) for key in keys]
    before, after = keys[:30], keys[30:]
    for number, key in enumerate(keys):
        if key == after[0]:
            prefill.signal(signal.SIGKILL)
        if mode == "pull":
            decode.load(views[number], scattered(30, 7))
        else:
            ticket = decode.load(view(key, kv="await_peer", num_tokens=481), scattered(30, 7))
            if key in before:
                prefill.tell("push", [key, (ticket or b"").hex(), theirs, 0, 480], {"last": True})
    decode.meet(other.card)
    if mode != "pull":
        for key in keys:  # the router's word: KVReady(ok=False)
            decode.workers[0].cancel(TransferKey(key, 1), "receive")
    ended: dict[tuple[str, int], Any] = {}
    while len(ended) < len(keys):
        results = decode.next_results()
        ended.update({**results.finished_receiving, **results.failed_receiving})
    allowed = {"", PeerGone.code, TransferCancelled.code, StaleEpoch.code, KVNotFound.code}
    assert {outcome.code for outcome in ended.values()} <= allowed
    if mode != "pull" or options:  # a mapped arena outlives its owner
        assert all(ended[TransferKey(key, 1)].code for key in after)
    hand_over(mode, world, other, decode, 100)
    check_nothing_is_left(decode)


@pytest.mark.parametrize("mode", MODES)
def test_who_is_deaf_to_ucx_still_gets_its_neighbours_messages(
    world: World, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """F5: UCX's queue within a host has one tail for all senders. Who is killed while it sends blocks it for good."""
    prefill, decode = world.pair(mode, GATHER_ALL)
    hand_over(mode, world, prefill, decode, 100)  # UCX has connected
    monkeypatch.setattr(decode.workers[0].endpoint._agent, "receive", list)
    hand_over(mode, world, prefill, decode, 100)


@pytest.mark.parametrize("loses", [False, True], ids=["waits", "is lost"])
def test_a_source_that_stood_still_hears_that_a_request_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch, loses: bool
) -> None:
    """F1: two losses took all slots that a reader may have, for good."""
    if loses:
        monkeypatch.setattr("pdkv.connectors.nixl.outbox.MAX_WAITING", 1)
    options = {**of("pull"), **GATHER_ALL, **PATIENT}
    prefill, decode = (world.local(name, options=options) for name in "pd")
    introduce(prefill, decode)
    source, reader = (engine.workers[0] for engine in (prefill, decode))
    bell, address = reader.endpoint._doorbell, source.endpoint._doorbell.address
    real, sent = bell.send, list[Any]()

    def send(to: DoorbellAddress, message: Any, *, alone: bool = False) -> bool:
        is_taken: bool = real(to, message, alone=alone)
        sent.append((type(decode_message(message)) if isinstance(message, bytes) else Reset, is_taken))
        return is_taken

    def begin_load() -> str:
        sent.clear()
        key = world.key()
        decode.load(awaiting(prefill.hand_off(key, scattered(7), 100)), scattered(7, 7))
        return key

    def has_slots() -> bool:
        return not source.source._requests and len(source.source._free) == source.endpoint.slots.count

    monkeypatch.setattr(bell, "send", send)
    assert decode.ended(begin_load()).code == ""
    for _ in range(2):
        stands, goes_on = threading.Event(), threading.Event()
        source.endpoint.post(lambda stands=stands, goes_on=goes_on: (stands.set(), goes_on.wait(WAIT_S)))
        assert stands.wait(WAIT_S)
        key = begin_load()
        wait_until_true(lambda: (Gather, True) in sent, "the request is in the pipe")
        filler = encode(Taken(0)) * 64
        while real(address, filler) and (loses or not bell._full):
            pass
        world.let_time_out(decode, key, partial(runs, decode, key))
        wait_until_true(lambda: ((Reset, True) if loses else (Dropped, True)) in sent, "it was told")
        goes_on.set()
        wait_until_true(lambda: not bell._full and has_slots(), "the source knows")
    assert [decode.ended(begin_load()).code for _ in range(3)] == [""] * 3
    wait_until_true(has_slots, "all slots are free")


def test_a_source_frees_the_slots_of_a_reader_that_forgot_it_for_a_while(world: World) -> None:
    """Its router was gone, to the reader alone."""
    options = {**of("pull"), **GATHER_ALL, **PATIENT}
    prefill, decode = (world.local(name, options=options) for name in "pd")
    introduce(prefill, decode)
    source, reader = (engine.workers[0] for engine in (prefill, decode))

    def begin_load() -> str:
        key = world.key()
        decode.load(awaiting(prefill.hand_off(key, scattered(7), 100)), scattered(7, 7))
        return key

    for _ in range(3):
        stands, goes_on = threading.Event(), threading.Event()
        source.endpoint.post(lambda stands=stands, goes_on=goes_on: (stands.set(), goes_on.wait(WAIT_S)))
        assert stands.wait(WAIT_S)
        key = begin_load()
        wait_until_true(lambda: reader.reader.gathered._open_requests("p/1/0"), "it has asked")
        decode.meet()
        assert decode.ended(key).code == PeerGone.code
        decode.meet(prefill.card)
        goes_on.set()
        assert decode.ended(begin_load()).code == ""
    wait_until_true(lambda: not source.source._requests, "it has ended all of them")
    wait_until_true(lambda: len(source.source._free) == source.endpoint.slots.count, "all slots are free")


def test_an_error_that_nobody_expects_ends_no_thread(world: World) -> None:
    prefill, decode = world.local("p", options=BY_UCX), world.local("d", options=BY_UCX)
    introduce(prefill, decode)
    source, reader = (engine.workers[0] for engine in (prefill, decode))
    source.endpoint.handle(Freed, lambda blob, message: 1 // 0)
    to_source = reader.endpoint.peers.agent("p/1/0")
    for _ in range(2):
        reader.endpoint.send(to_source, Freed(1, 1))
    wait_until_true(lambda: source.endpoint.num_bad_messages == 2, "both were served")


def test_garbage_is_counted_and_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """F2, F17: from agents that nobody knows and from those that everybody does."""
    prefill, decode = world.pair("push", BY_UCX)  # prefill may greet before it is known
    monkeypatch.setattr("pdkv.connectors.nixl.inbox._EARLY_S", 0.0)  # who is not known by now never will be
    endpoint = decode.workers[0].endpoint
    stranger = Listening("stranger", 4096, 0)
    posing = Listening("p/1/0", 4096, 0)
    try:
        name, metadata = endpoint._agent.name, endpoint._agent.metadata()
        for agent in (stranger.agent, posing.agent):
            agent.add_peer(name, metadata)
            for garbage in (b"\x00", b"not msgpack", b"\x93\x01\x02\x03", encode(Taken(7))):
                agent.send(name, garbage)
        wait_until_true(lambda: endpoint.num_bad_messages >= 3, "garbage of a known agent")
        wait_until_true(lambda: endpoint._inbox.num_unknown_agents >= 4, "messages of an unknown one")
        hand_over("push", world, prefill, decode, 100)
        # A word about an offer that was never made is well-formed, and ends nothing.
        assert (endpoint.num_bad_messages, endpoint._inbox.num_unknown_agents) == (3, 4)
        assert not endpoint._inbox._early
        assert decode.workers[0].num_unexpected_errors == 0
    finally:
        stranger.close()
        posing.close()


@pytest.mark.parametrize("options", MEANS)
def test_an_engine_gives_threads_descriptors_and_shared_memory_back(world: World, options: dict[str, str]) -> None:
    """F24."""
    prefill = world.remote("p", options=options)

    def use_one() -> None:
        decode = world.local("d", options=options)
        introduce(prefill, decode)
        hand_over("pull", world, prefill, decode, 100)
        prefill.meet()
        decode.close()

    use_one()
    before, files_before = held_by_process(), shm_files()
    for _ in range(3):
        use_one()
    wait_until_within(before)
    assert not left_behind(files_before, WAIT_S)


def test_a_thread_that_does_not_end_keeps_its_descriptors(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed ones could be another's when it goes on: it would take that one's bytes."""
    endpoint = world.local("d").workers[0].endpoint
    hangs, goes_on, stop = threading.Event(), threading.Event(), endpoint._thread.stop
    endpoint.post(lambda: (hangs.set(), goes_on.wait(WAIT_S)))
    assert hangs.wait(WAIT_S)
    monkeypatch.setattr(endpoint._thread, "stop", lambda: stop(0.0))
    try:
        endpoint.close()
        assert os.fstat(endpoint._doorbell.address.fd).st_ino == endpoint._doorbell.address.inode
    finally:
        goes_on.set()
    assert stop(WAIT_S)
    endpoint._doorbell.close()


def test_nothing_is_loaded_before_a_worker_side_is_made() -> None:
    """The fork server imports the connector's module: no thread, no UCX."""
    code = (
        "import json, os, sys; import pdkv.connectors.nixl.connector as nixl; "
        "print(json.dumps([[m for m in sys.modules if m.startswith('nixl')], len(os.listdir('/proc/self/task'))]))"
    )
    output = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == [[], 1]


# --- configuration ----------------------------------------------------------------------------------------------------


def test_the_mode_decides_kind_and_orders() -> None:
    assert load_connector("nixl") is NixlConnector
    pull, push = (plan_connector("nixl", {"mode": mode}) for mode in ("pull", "push"))
    assert (pull.kind, push.kind) == ("pull", "push")
    assert pull.orders == ("prefill_first", "decode_first")
    assert push.orders == ("decode_first", "needs_peer_first", "concurrent")


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "both"},
        {"transfer_timeout_s": "0"},
        {"slots": "0"},
        {"slot_bytes": "100"},
        {"gather_below": "-1"},
        {"path": "tcp"},
        {"x": "1"},
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        plan_connector("nixl", options)


def test_a_card_is_what_a_peer_needs(world: World) -> None:
    card: EngineCard = world.local("d", tp=2).card
    assert len(card.rank_blobs) == 2
    assert sum(map(len, card.rank_blobs)) < 8192
