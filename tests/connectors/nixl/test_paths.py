"""By which path a peer on this host is read, and what happens where it lies, changes or ends."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from nixl_engines import Engine, RemoteEngine, awaiting, closing, make_layout, view
from nixl_rig import needs_nixl

from pdkv.connectors.base import ConnectorConfig, TransferKey
from pdkv.connectors.nixl.receiver import MAX_EARLY, MAX_EARLY_PER_SENDER
from pdkv.connectors.nixl.wire import Offer, RankBlob, encode_blob
from pdkv.connectors.peer.push_worker import PieceRange
from pdkv.connectors.registry import build_connector, plan_connector
from pdkv.connectors.stats import sum_stats
from pdkv.connectors.transfer.block_runs import MAX_BLOCK_ID, pack_blocks
from pdkv.connectors.transfer.pool_copy import copy_pieces
from pdkv.errors import ConfigError, KVNotFound, StaleGeneration, TransferError
from pdkv.wire.kv import EngineCard
from pdkv.wire.reports import ConnectorStats

pytestmark = needs_nixl

BLOCKS, TOKENS = [3, 1, 7, 5], 64


@pytest.fixture(name="make")
def engines() -> Iterator[Any]:
    with closing() as make:
        yield make


def changed(card: EngineCard, **changes: Any) -> EngineCard:
    """A card whose only rank says something else."""
    blob = msgspec.structs.replace(blob_of(card), **changes)
    return msgspec.structs.replace(card, rank_blobs=[encode_blob(blob)])


def blob_of(card: EngineCard) -> RankBlob:
    return msgspec.msgpack.decode(card.rank_blobs[0], type=RankBlob)


def pull(prefill: Any, decode: Engine, key: str) -> str:
    """One hand-off; returns the code of its failure."""
    if isinstance(prefill, RemoteEngine):
        prefill.call("fill", BLOCKS, TOKENS, 1)
    else:
        prefill.fill_seeded(BLOCKS, TOKENS, 1)
    decode.load(awaiting(prefill.hand_off(key, BLOCKS, TOKENS)), [9, 2, 4, 6])
    code = decode.ended(key).code
    if not code:
        assert decode.wrong_tokens([9, 2, 4, 6], 0, TOKENS, 1) == []
    return code


def path_to(decode: Engine, engine: str = "p") -> str | None:
    return decode.workers[0].get_stats()[""].paths.get(engine)


@pytest.mark.parametrize(
    ("prefill", "decode", "path"), [("auto", "auto", "arena"), ("ucx", "auto", "ucx"), ("auto", "ucx", "ucx")]
)
def test_the_first_path_that_both_sides_offer_is_taken(make: Any, prefill: str, decode: str, path: str) -> None:
    theirs, ours = make(Engine, "p", options={"path": prefill}), make(Engine, "d", options={"path": decode})
    ours.meet(theirs.card)
    theirs.meet(ours.card)
    assert pull(theirs, ours, "t") == ""
    assert path_to(ours) == path


def test_ranks_whose_paths_differ_are_both_named() -> None:
    ranks = [{"": ConnectorStats(loads=1, paths={"p": path, "q": "ucx"})} for path in ("ucx", "arena", "ucx")]
    assert sum_stats(ranks) == {"": ConnectorStats(loads=3, paths={"p": "arena+ucx", "q": "ucx"})}


def test_paths_that_do_not_meet_are_refused_from_the_cards(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    theirs, ours = make(Engine, "p", options={"path": "ucx"}), make(Engine, "d", options={"path": "arena"})
    ours.meet(theirs.card)
    assert "engine d reads by path arena, but engine p can be read by path ucx: set their option path" in caplog.text
    assert not ours.scheduler.peers.knows("p", "1")


def test_a_pool_that_the_connector_has_not_allocated_is_read_by_another_path(make: Any) -> None:
    """As within `multi`, beside a connector that needs its own pool."""
    theirs, ours = make(Engine, "p", own_pool=False), make(Engine, "d")
    ours.meet(theirs.card)
    theirs.meet(ours.card)
    assert blob_of(theirs.card).paths == ["ucx"]
    assert pull(theirs, ours, "t") == ""
    assert path_to(ours) == "ucx"
    with pytest.raises(ConfigError, match="allocated by another connector or the engine: path=auto"):
        make(Engine, "q", own_pool=False, options={"path": "arena"})


def test_pools_on_a_device_are_read_by_nixl_only() -> None:
    plan = plan_connector("nixl", {})
    config = ConnectorConfig(engine="e", epoch="1", layout=make_layout(), num_blocks=4, plan=plan, device="cuda")
    connector = build_connector(config, lambda: None)
    assert connector.kv_cache() is None
    connector.shutdown()


# --- peers that lie, change and end -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lie",
    [
        {"arena": {"inode": 1}},
        {"arena": {"size": 4096}},
        {"arena": {"fd": 0}},
        {"arena": {"pid": 2**40}},
        {"arena": {"start_time": 1}},
        {"arena": None},
    ],
    ids=str,
)
def test_an_arena_that_is_not_what_the_card_says_is_not_mapped(make: Any, lie: dict[str, Any]) -> None:
    """The next path is taken; with none left the load fails with a typed error. Nothing is read from elsewhere."""
    theirs, ours = make(Engine, "p"), make(Engine, "d")
    arena = blob_of(theirs.card).arena
    assert arena is not None
    said = None if lie["arena"] is None else msgspec.structs.replace(arena, **lie["arena"])
    ours.meet(changed(theirs.card, arena=said))
    assert pull(theirs, ours, "t") == ""
    assert path_to(ours) == "ucx"
    ours.meet()
    ours.meet(changed(theirs.card, arena=said, paths=["arena"]))
    assert pull(theirs, ours, "u") in ("peer_gone", "incompatible_peers")
    assert path_to(ours) is None or path_to(ours) == "none"


def test_a_withdrawn_offer_is_refused_behind_the_data(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1, F4: the sender gives up while the receiver copies; what it copied counts for nothing."""
    options = {"mode": "push", "path": "arena"}
    prefill, decode = make(Engine, "p", options=options), make(Engine, "d", options=options)
    prefill.meet(decode.card)
    decode.meet(prefill.card)
    reached, go_on = threading.Event(), threading.Event()

    def copy(*arguments: Any) -> None:
        copy_pieces(*arguments)
        reached.set()
        assert go_on.wait(20.0)

    monkeypatch.setattr("pdkv.connectors.nixl.reader.copy_pieces", copy)
    ticket = decode.load(view("t", kv="await_peer", num_tokens=TOKENS + 1), [9, 2, 4, 6])
    prefill.fill_seeded(BLOCKS, TOKENS, 1)
    prefill.push("t", ticket, BLOCKS, 0, TOKENS, last=True)
    assert reached.wait(20.0)
    errors: list[str] = []
    endpoint = decode.workers[0].endpoint
    monkeypatch.setattr(endpoint, "try_send", lambda blob, message: errors.append(message.code) or True)
    prefill.workers[0].cancel(TransferKey("t", 1), "send")
    assert prefill.ended("t").code == "transfer_cancelled"
    go_on.set()
    decode.workers[0]._receiver.shutdown()
    assert errors == [StaleGeneration.code]
    assert decode.workers[0].num_open_jobs == 1  # nothing has arrived
    decode.workers[0].cancel(TransferKey("t", 1), "receive")
    assert decode.ended("t").code == "transfer_cancelled"


def test_a_word_that_no_sender_has_is_a_typed_error(make: Any) -> None:
    options = {"mode": "push", "path": "arena"}
    prefill, decode = make(Engine, "p", options=options), make(Engine, "d", options=options)
    decode.meet(prefill.card)
    source = decode.workers[0].endpoint.sources.source(blob_of(prefill.card))
    for number in (-1, 4096, 2**40):
        with pytest.raises(Exception, match="word"):
            source.word(number)


def offer_of(key: str, number: int) -> Offer:
    return Offer(key, 1, number, 1, 1, False, pack_blocks(np.arange(1)), 0, PieceRange(0, 1, 0, 1, 0, 16))


def test_offers_that_nobody_expects_are_kept_so_many_at_most(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few transfers they name: of each sender, and of all."""
    monkeypatch.setattr("pdkv.connectors.nixl.receiver._GRACE_S", 600.0)
    decode = make(Engine, "d", options={"mode": "push"})
    senders = [make(Engine, name, options={"mode": "push"}) for name in "pqr"]
    decode.meet(*(sender.card for sender in senders))
    receiver = decode.workers[0]._receiver
    answers: list[tuple[str, str]] = []
    endpoint = decode.workers[0].endpoint
    monkeypatch.setattr(endpoint, "try_send", lambda blob, message: answers.append((blob.agent, message.code)) or True)
    for number in range(MAX_EARLY):
        for sender in senders[:2]:
            receiver._on_offer(blob_of(sender.card), offer_of("unknown", number))
    assert len(receiver._early) == MAX_EARLY == 2 * MAX_EARLY_PER_SENDER
    receiver._on_offer(blob_of(senders[2].card), offer_of("another", 0))
    assert len(receiver._early) == MAX_EARLY
    refused = [(blob_of(sender.card).agent, KVNotFound.code) for sender in senders]
    assert answers == refused[:2] * (MAX_EARLY - MAX_EARLY_PER_SENDER) + refused[2:]
    monkeypatch.setattr("pdkv.connectors.nixl.receiver._GRACE_S", 0.0)
    receiver._refuse_late()
    assert len(answers) == 2 * MAX_EARLY + 1
    assert not receiver._early
    assert not receiver._senders


def test_a_sender_has_no_more_offers_open_than_words_to_withdraw_them(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it offers for a transfer that is expected waits in its lane, which would take any number."""
    monkeypatch.setattr("pdkv.connectors.nixl.receiver.MAX_OPEN", 8)
    prefill, decode = (make(Engine, name, options={"mode": "push"}) for name in "pd")
    decode.meet(prefill.card)
    decode.load(view("t", kv="await_peer", num_tokens=TOKENS + 1), [9, 2, 4, 6])
    worker, blob = decode.workers[0], blob_of(prefill.card)
    receiver, go_on = worker._receiver, threading.Event()
    answers: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def read(*_: Any) -> None:
        assert go_on.wait(20.0)
        raise KVNotFound("when it may go on")

    monkeypatch.setattr(receiver, "_read", read)
    monkeypatch.setattr(
        worker.endpoint, "try_send", lambda _, message: answers.put((message.offer, message.code)) or True
    )
    for number in range(10):
        receiver._on_offer(blob, offer_of("t", number))
    assert [answers.get(timeout=20.0) for _ in range(2)] == [(8, TransferError.code), (9, TransferError.code)]
    go_on.set()
    assert [answers.get(timeout=20.0) for _ in range(8)] == [(number, KVNotFound.code) for number in range(8)]
    receiver._on_offer(blob, offer_of("t", 10))
    assert answers.get(timeout=20.0) == (10, KVNotFound.code)
    assert not receiver._senders


@pytest.mark.parametrize("whole", [True, False], ids=["blocks", "units"])
@pytest.mark.parametrize("checksum", ["on", "off"])
def test_an_offer_of_what_lies_outside_the_pool_is_refused(make: Any, checksum: str, whole: bool) -> None:
    """Its blocks are numbers that a peer says, copied or digested on the way; then an honest offer arrives."""
    options = {"mode": "push", "path": "arena"}
    prefill, decode = make(Engine, "p", options=options), make(Engine, "d", options=options)
    prefill.meet(msgspec.structs.replace(decode.card, kv_checksum=checksum))
    decode.meet(msgspec.structs.replace(prefill.card, kv_checksum=checksum))
    prefill.fill_seeded(BLOCKS, TOKENS, 1)
    ticket = decode.load(view("t", kv="await_peer", num_tokens=TOKENS + 1), [9, 2, 4, 6])
    worker, blob = decode.workers[0], blob_of(prefill.card)
    layout, before = prefill.layout, decode.pools[0].clone()
    piece = PieceRange(0, layout.num_layers, 0, layout.num_kv_heads, 0, TOKENS)
    for first in (prefill.card.num_blocks - 3, MAX_BLOCK_ID - 3):
        offered = pack_blocks(np.arange(first, first + 4))
        offer = Offer("t", 1, 1, 0, blob.nonce, whole, offered, 0, piece)
        with pytest.raises(TransferError, match="exceed the peer's pool of"):
            worker._receiver._read(blob, offer)
    assert bool((decode.pools[0] == before).all())
    prefill.push("t", ticket, BLOCKS, 0, TOKENS, last=True)
    assert decode.ended("t").code == ""
    assert decode.wrong_tokens([9, 2, 4, 6], 0, TOKENS, 1) == []
