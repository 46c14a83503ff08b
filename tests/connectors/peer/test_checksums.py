"""What is handed off arrives as it was, or its load fails and says between whom."""

import logging
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import pytest
from push_rig import WAIT_S, PullEngine, PushEngine, full_kv, view

from pdkv.connector_kit.rig.damage import Damage, How
from pdkv.connectors.base import TransferKey
from pdkv.connectors.p2p.connector import P2PConnector
from pdkv.connectors.peer.checksums import SAMPLED, is_checked
from pdkv.connectors.peer.push_worker import PushPiece
from pdkv.connectors.shared_memory.connector import SharedMemoryConnector
from pdkv.connectors.transfer.worker import Job
from pdkv.errors import KVCorrupted, KVNotFound, PeerGone, TransferTimeout
from pdkv.testing import VirtualClock
from pdkv.wire.kv import ChecksumMode

NUM_TOKENS = 75
SOURCE, TARGET = [9, 2, 17, 4, 30], [8, 1, 22, 13, 5]


def pull(source: PullEngine, reader: PullEngine, name: str = "t") -> str:
    """The code that a load of a hand-off ended with."""
    source.fill(SOURCE, full_kv(NUM_TOKENS, source.layout))
    reader.load(source.hand_off(name, SOURCE, NUM_TOKENS), TARGET)
    return reader.outcome("receiving", TransferKey(name, 1)).code


@contextmanager
def pair(
    tp: tuple[int, int] = (1, 1), modes: tuple[ChecksumMode, ChecksumMode] = ("on", "on"), **options: Any
) -> Iterator[tuple[PullEngine, PullEngine]]:
    """(source, reader), which know each other."""
    source, reader = (
        PullEngine(SharedMemoryConnector, name, tp=ranks, kv_checksum=mode, **options)
        for name, ranks, mode in zip(("p", "d"), tp, modes, strict=True)
    )
    with closing(source), closing(reader):
        source.meet(reader.card)
        reader.meet(source.card)
        yield source, reader


@contextmanager
def push_pair(tp: tuple[int, int]) -> Iterator[tuple[PushEngine, PushEngine]]:
    """(sender, receiver), which know each other; the sender has a prompt."""
    sender, receiver = (PushEngine(P2PConnector, name, tp=ranks) for name, ranks in zip(("p", "d"), tp, strict=True))
    with closing(sender), closing(receiver):
        sender.meet(receiver.card)
        receiver.meet(sender.card)
        sender.fill(SOURCE, full_kv(NUM_TOKENS, sender.layout))
        yield sender, receiver


def push(sender: PushEngine, receiver: PushEngine) -> None:
    """Begin to push the prompt."""
    ticket = receiver.want(view("t", kv="await_peer", num_tokens=NUM_TOKENS), TARGET)
    sender.give(view("t", kv="handoff", num_tokens=NUM_TOKENS, ticket=ticket), SOURCE, NUM_TOKENS)


@pytest.mark.parametrize("how", ["flip", "swap"])
@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (2, 1), (4, 2)], ids=str)
def test_a_damaged_pull_fails_with_both_engines_names(
    tp: tuple[int, int], how: How, caplog: pytest.LogCaptureFixture
) -> None:
    with pair(tp) as (source, reader):
        spoiled = [Damage(worker, how, seed) for seed, worker in enumerate(source.workers)]
        assert pull(source, reader) == KVCorrupted.code
        assert all(damage.num_done == 1 for damage in spoiled)
        assert "from engine p to engine d is damaged: transfer t, attempt 1" in caplog.text
        assert sum(worker.get_stats()[""].corrupted_transfers for worker in reader.workers) > 0
        for damage in spoiled:
            damage.undo()
        assert pull(source, reader, "again") == ""
        reader.check(TARGET, full_kv(NUM_TOKENS, reader.layout))


def test_a_source_that_makes_no_digests_is_not_believed() -> None:
    clock, asked = VirtualClock(), threading.Event()
    with pair(clock=clock) as (source, reader):
        source.workers[0].source_digests.close()
        worker = reader.workers[0]
        read_digests = worker.read_digests
        worker.read_digests = lambda *arguments: (asked.set(), read_digests(*arguments))[1]
        source.fill(SOURCE, full_kv(NUM_TOKENS, source.layout))
        reader.load(source.hand_off("t", SOURCE, NUM_TOKENS), TARGET)
        assert asked.wait(WAIT_S)
        clock.advance(worker.timeout_s)
        assert reader.outcome("receiving", TransferKey("t", 1)).code == TransferTimeout.code


@pytest.mark.parametrize("modes", [("off", "on"), ("on", "off"), ("off", "off")], ids="-".join)
def test_where_one_end_has_digests_off_loads_succeed(modes: tuple[ChecksumMode, ChecksumMode]) -> None:
    with pair(modes=modes) as (source, reader):
        assert pull(source, reader) == ""
        reader.check(TARGET, full_kv(NUM_TOKENS, reader.layout))


def test_of_a_sample_both_ends_choose_the_same_transfers() -> None:
    names = [f"t{number}" for number in range(400)]
    sampled = [name for name in names if is_checked("sample", name)]
    assert len(names) / SAMPLED / 2 < len(sampled) < len(names) / SAMPLED * 2
    with pair(modes=("sample", "on")) as (source, reader):
        other = next(name for name in names if name not in sampled)
        for name in (sampled[0], other):
            damage = Damage(source.workers[0], "flip")
            code = pull(source, reader, name)
            assert (code, damage.num_done) == ((KVCorrupted.code, 1) if name in sampled else ("", 0))
            damage.undo()


@pytest.mark.parametrize("how", ["flip", "swap"])
@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_a_damaged_push_fails_at_both_ends(tp: tuple[int, int], how: How, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with push_pair(tp) as (sender, receiver):
        damage = Damage(sender.workers[-1], how)
        push(sender, receiver)
        # Another rank's piece may come when the transfer has already failed, or be on its way when it does.
        assert sender.outcome("sending", TransferKey("t", 1)).code in (KVCorrupted.code, KVNotFound.code, PeerGone.code)
        receiver.cancel(
            TransferKey("t", 1), "receive"
        )  # as the router has it: to some of its ranks nothing may have been offered
        assert receiver.outcome("receiving", TransferKey("t", 1)).code == KVCorrupted.code
        assert damage.num_done == 1
        assert "from engine p to engine d is damaged: transfer t, attempt 1" in caplog.text


def test_a_rank_to_which_nothing_was_offered_ends_when_the_load_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with push_pair((1, 2)) as (sender, receiver):
        given_up = threading.Event()
        worker = sender.workers[0]
        interrupt, send = worker.interrupt, worker.send

        def send_behind_the_failure(job: Job, piece: PushPiece, scratch: Any) -> int | None:
            if piece.heads.peer_rank == 1:
                assert given_up.wait(WAIT_S)
            sent: int | None = send(job, piece, scratch)
            return sent

        def interrupt_and_tell(job: Job) -> bool:
            given_up.set()
            free: bool = interrupt(job)
            return free

        monkeypatch.setattr(worker, "send", send_behind_the_failure)
        monkeypatch.setattr(worker, "interrupt", interrupt_and_tell)
        Damage(worker, "flip")
        push(sender, receiver)
        assert (
            sender.outcome("sending", TransferKey("t", 1)).code == KVCorrupted.code
        )  # the router hears that, and says it
        assert [rank.num_open_jobs for rank in receiver.workers] == [0, 1]
        receiver.cancel(TransferKey("t", 1), "receive")
        assert receiver.outcome("receiving", TransferKey("t", 1)).code == KVCorrupted.code
        assert [rank.get_stats()[""].corrupted_transfers for rank in receiver.workers] == [1, 0]


def test_a_pull_copies_before_its_source_has_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (source, reader):
        copied, orders = threading.Event(), source.workers[0].source_digests
        make, copy = orders.make, reader.workers[0].read_digested

        def make_behind_the_copy(*news: Any) -> None:
            assert copied.wait(WAIT_S)
            make(*news)

        def copy_and_tell(*read: Any) -> Any:
            landed = copy(*read)
            copied.set()
            return landed

        monkeypatch.setattr(orders, "make", make_behind_the_copy)
        monkeypatch.setattr(reader.workers[0], "read_digested", copy_and_tell)
        assert pull(source, reader) == ""
        reader.check(TARGET, full_kv(NUM_TOKENS, reader.layout))


def test_where_the_source_has_digests_of_more_tokens_a_pull_makes_those() -> None:
    with pair() as (source, reader):
        kv = full_kv(NUM_TOKENS, source.layout)
        source.fill(SOURCE, kv)
        handoff = source.hand_off("t", SOURCE, NUM_TOKENS)
        for how in ("whole", "damaged"):
            shorter = msgspec.structs.replace(handoff, transfer_id=how, num_tokens=NUM_TOKENS - 3)
            if how == "damaged":  # a token that is not wanted, of a hash block that is
                source.pools[0][SOURCE[-1], 0, 0, 0, NUM_TOKENS % 16 - 1] += 1
            assert reader.load(shorter, TARGET) == NUM_TOKENS - 3
            assert reader.outcome("receiving", TransferKey(how, 1)).code == ("" if how == "whole" else KVCorrupted.code)
            reader.check(TARGET, kv[: NUM_TOKENS - 3])
