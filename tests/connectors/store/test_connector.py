"""Store connectors: what is saved, found, loaded and dropped. Both sides driven by hand over a real memory store."""

from typing import Any

import msgspec
import pytest
import torch
from store_rig import (
    NUM_BLOCKS,
    FaultyStore,
    MakeEngine,
    RigConnector,
    chain,
    make_layout,
    prefill,
    random_kv,
    scattered,
    view,
)

from pdkv.connectors.base import ConfirmedRange, ConnectorConfig, TransferKey
from pdkv.connectors.plan import INTERFACE, ConnectorPlan
from pdkv.connectors.store.envelope import ENVELOPE_BYTES
from pdkv.connectors.store.shared_storage import SharedStorageConnector
from pdkv.connectors.store.url import StoreUrlConnector
from pdkv.errors import ConfigError, KVNotFound, TransferCancelled

# --- hand-offs and hits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 63, 64, 65, 128, 200])
@pytest.mark.parametrize(("here", "there"), [(16, 16), (16, 32), (32, 16), (48, 64)])
def test_a_hand_off_arrives_whole_between_unequal_blocks(
    make: MakeEngine, here: int, there: int, num_tokens: int
) -> None:
    kv, handoff = prefill(make("p", block_size=here), num_tokens)
    decode = make("d", block_size=there)
    request = view("t", kv="await_peer", num_tokens=num_tokens + 1, handoff=handoff, kv_ready=True, salt="0")
    assert decode.ask(request) == num_tokens
    blocks = scattered(num_tokens, there, start=1)
    outcome = decode.load(request, blocks, num_tokens)
    assert not outcome.code
    assert outcome.num_bytes > 0
    assert torch.equal(decode.tokens(blocks, num_tokens), kv)
    others = [block for block in range(NUM_BLOCKS) if block not in blocks]
    assert bool((decode.pools[0][others] == -1).all())


@pytest.mark.parametrize("num_hit", [32, 64, 96, 160])
def test_nothing_is_written_into_the_readers_own_hit(make: MakeEngine, num_hit: int) -> None:
    kv, handoff = prefill(make("p"), 170)
    decode = make("d", block_size=32)
    request = view(
        "t", kv="await_peer", num_tokens=171, handoff=handoff, kv_ready=True, num_local_hit=num_hit, salt="0"
    )
    assert decode.ask(request, num_hit) == 170 - num_hit
    blocks = scattered(170, 32)
    assert not decode.load(request, blocks, 170 - num_hit).code
    got = decode.tokens(blocks, 170)
    assert torch.equal(got[num_hit:], kv[num_hit:])
    assert bool((got[:num_hit] == -1).all())


@pytest.mark.parametrize("pair", [(1, 2), (2, 1), (2, 2), (2, 4), (4, 1), (8, 2), (1, 8)], ids=str)
def test_ranks_find_their_heads_whoever_saved_them(make: MakeEngine, pair: tuple[int, int]) -> None:
    """F20: unequal and replicated heads, either way."""
    shards = max(pair)
    kv, handoff = prefill(make("p", tp=pair[0], kv_shards=shards, layer_groups="2"), 100)
    decode = make("d", tp=pair[1], kv_shards=shards, block_size=32, layer_groups="2")
    request = view("t", kv="await_peer", num_tokens=101, handoff=handoff, kv_ready=True, salt="0")
    blocks = scattered(100, 32)
    assert decode.ask(request) == 100
    assert not decode.load(request, blocks, 100).code
    assert torch.equal(decode.tokens(blocks, 100), kv)


def test_replicated_heads_are_written_once(store: FaultyStore, make: MakeEngine) -> None:
    prefill(make("p", tp=8), 64)
    assert store.count("put") == 4


def test_another_request_finds_whole_values_only(make: MakeEngine) -> None:
    kv, _ = prefill(make("p"), 200)
    other = make("o", block_size=32)
    request = view("u", num_tokens=300, salt="0")
    assert other.ask(request) == 192
    assert other.ask(request, 64) == 128
    assert other.ask(request, 160) == 0, "32 tokens are fewer than min_hit_tokens"
    blocks = scattered(192, 32)
    assert not other.load(request, blocks, 192).code
    assert torch.equal(other.tokens(blocks, 192), kv[:192])


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize(("block_size", "found"), [(16, 240), (32, 224), (128, 192)])
def test_of_a_value_that_ends_behind_what_is_wanted_its_first_blocks_are_loaded(
    make: MakeEngine, block_size: int, found: int, layerwise: bool
) -> None:
    """A prompt of four values comes again, and computes its last token."""
    options = {"layer_groups": "3", "load": "layerwise" if layerwise else "async"}
    kv, _ = prefill(make("p", **options), 256)
    engine = make("o", block_size=block_size, **options)
    request = view("u", num_tokens=256, block_keys=chain(16, "0"))
    assert engine.ask(request) == found
    assert engine.ask(request, 128) == found - 128
    blocks = scattered(256, block_size)
    engine.start_load(request, blocks, found, layerwise=layerwise)
    if layerwise:
        engine.forward()
        outcomes = engine.reported(request.transfer_key)
        assert outcomes is not None
        assert not outcomes[0].code
    else:
        assert not engine.wait(request.transfer_key).code
    assert torch.equal(engine.tokens(blocks, 256)[:found], kv[:found])
    assert (engine.tokens(blocks, 256)[found:] == -1).all(), "nothing is written behind it"


def test_the_first_blocks_of_a_value_that_is_gone_are_not_promised(store: FaultyStore, make: MakeEngine) -> None:
    engine = make("p")
    prefill(engine, 256)
    last = engine.connectors[0].cut.whole_values(chain(16, "0"), 192, 256)[0]
    request = view("u", num_tokens=256, block_keys=chain(16, "0"))
    reader = make("o")
    assert reader.ask(request) == 240
    store.inner.delete([last.key + engine.connectors[0].cut.suffixes[0]])
    blocks = scattered(256, 16)
    outcome = reader.load(request, blocks, 240)
    assert (outcome.code, outcome.num_tokens) == (KVNotFound.code, 192)
    assert reader.ask(view("v", num_tokens=256, block_keys=chain(16, "0"))) == 192


def test_a_hit_ends_at_the_first_value_that_is_missing(store: FaultyStore, make: MakeEngine) -> None:
    engine = make("p", layer_groups="3")
    prefill(engine, 256)
    values = engine.connectors[0].cut.whole_values(view("x", num_tokens=257, salt="0").block_keys, 0, 256)
    store.inner.delete([values[2].key + engine.connectors[0].cut.suffixes[1]])  # one part of it is enough
    assert make("o", layer_groups="3").ask(view("u", num_tokens=300, salt="0")) == 128


def test_salts_and_cuts_separate_what_is_stored(make: MakeEngine) -> None:
    """F23."""
    prefill(make("p"), 128)
    assert make("o").ask(view("u", num_tokens=200, salt="another")) == 0
    assert make("q", tokens_per_value="32").ask(view("u", num_tokens=200, salt="0")) == 0
    assert make("r", layer_groups="3").ask(view("u", num_tokens=200, salt="0")) == 0


def test_generated_tokens_are_saved_when_their_value_is_whole(make: MakeEngine) -> None:
    engine, kv = make("d"), random_kv(130)
    blocks = scattered(130, 16)
    engine.fill(blocks, kv)
    request = view("t", num_tokens=131)
    assert engine.save(request, blocks, 112, start=96) is None
    outcome = engine.save(request, blocks, 128, start=112)
    assert outcome is not None
    assert not outcome.code
    other = make("o")
    engine.save(request, blocks, 64)
    found = view("u", num_tokens=140, salt="")
    assert other.ask(found) == 128
    there = scattered(128, 16, start=2)
    assert not other.load(found, there, 128).code
    assert torch.equal(other.tokens(there, 128), kv[:128])


# --- two phases, tails --------------------------------------------------------------------------------------------


def test_what_is_not_confirmed_is_not_saved(store: FaultyStore, make: MakeEngine) -> None:
    make("p").step()
    assert store.count("put") == 0


def test_a_save_is_invisible_until_it_is_complete_and_holds_its_blocks_so_long(
    store: FaultyStore, make: MakeEngine
) -> None:
    """F9, F10."""
    engine, other = make("p"), make("o")
    engine.fill(scattered(128, 16), random_kv(128))
    store.hold("put")
    request = view("t", kv="handoff", num_tokens=129)
    meta = engine.confirm(request, scattered(128, 16), 128)
    (hold,) = meta.holds
    assert sorted(hold.block_ids) == sorted(scattered(128, 16))
    assert hold.owner == request.transfer_key
    store.wait_held("put")
    engine.collect()
    assert engine.reported(hold.key) is None
    assert other.ask(view("u", num_tokens=200)) == 0
    store.let_go("put")
    assert not engine.wait(hold.key).code


def test_a_tail_belongs_to_its_transfer_and_attempt(make: MakeEngine) -> None:
    """F14."""
    _, handoff = prefill(make("p"), 100)
    decode = make("d")
    later = msgspec.structs.replace(handoff, attempt=2)  # it was computed again
    for wrong in (
        view("t", kv="await_peer", num_tokens=101, handoff=later, kv_ready=True, salt="0", attempt=2),
        view("other", kv="await_peer", num_tokens=101, handoff=handoff, kv_ready=True, salt="0"),
    ):
        assert decode.load(wrong, scattered(100, 16), 100).code == KVNotFound.code


def test_a_later_attempt_finds_the_tail_of_the_attempt_that_handed_it_off(make: MakeEngine) -> None:
    source, decode = make("p"), make("d")
    kv, handoff = prefill(source, 100)
    blocks = scattered(100, 16)
    request = view("t", kv="await_peer", num_tokens=101, salt="0", handoff=handoff, kv_ready=True, attempt=4)
    assert decode.ask(request) == 100
    assert not decode.load(request, blocks, 100).code
    assert torch.equal(decode.tokens(blocks, 100), kv)


def test_release_deletes_the_tail_and_leaves_the_content(make: MakeEngine) -> None:
    engine = make("p", layer_groups="2")
    _, handoff = prefill(engine, 100)
    meta = engine.step(aborted=[TransferKey("t", 1)])
    (drop,) = meta.drops
    assert drop.key == TransferKey("t", 1)
    assert not engine.step(aborted=[TransferKey("t", 1)]).drops, "once"
    engine.wait(drop.batch)
    decode = make("d", layer_groups="2")
    request = view("t", kv="await_peer", num_tokens=101, handoff=handoff, kv_ready=True, salt="0")
    assert decode.load(request, scattered(100, 16), 100).code == KVNotFound.code
    assert decode.ask(view("u", num_tokens=100, salt="0")) == 64


def test_a_tail_whose_save_is_under_way_is_deleted_after_it(store: FaultyStore, make: MakeEngine) -> None:
    engine = make("p")
    engine.fill(scattered(40, 16), random_kv(40))
    store.hold("put")
    request = view("t", kv="handoff", num_tokens=41)
    (hold,) = engine.confirm(request, scattered(40, 16), 40, last=True).holds
    store.wait_held("put")
    (drop,) = engine.step(aborted=[TransferKey("t", 1)]).drops
    store.let_go("put")
    assert engine.wait(hold.key).code == TransferCancelled.code
    engine.wait(drop.batch)
    assert store.calls[-1] == ("delete", 1)
    assert len(store.inner._shelf._values) == 0


def test_the_rest_of_a_tails_last_unit_does_not_leave_the_engine(store: FaultyStore, make: MakeEngine) -> None:
    """F23: it may hold what an earlier owner of the block has left there."""
    engine = make("p")
    engine.pools[0].fill_(7.0)
    prefill(engine, 20)
    (value,) = store.inner._shelf._values.values()
    image = torch.from_numpy(value[:-ENVELOPE_BYTES]).view(torch.float32).view(2, 3, 2, 4, 16, 4)
    assert bool((image[1, :, :, :, 4:] == 0).all())
    assert bool((image[1, :, :, :, :4] != 0).all())


def test_a_hand_off_that_its_first_token_ended_is_forgotten(store: FaultyStore, make: MakeEngine) -> None:
    engine = make("p")
    request = view("t", kv="handoff", num_tokens=129)
    engine.save(request, scattered(64, 16), 64)
    meta = engine.step(finished=[TransferKey("t", 1)])
    assert [drop.tails for drop in meta.drops] == [[]]
    assert engine.wait(TransferKey("t", 1)).code == ""
    assert engine.worker.num_open_jobs == 0
    assert not engine.worker._transfers


# --- what is not written again ------------------------------------------------------------------------------------


def test_known_values_are_not_written_again(store: FaultyStore, make: MakeEngine) -> None:
    engine = make("p")
    engine.save(view("a", num_tokens=129), scattered(128, 16), 128)
    assert engine.save(view("b", num_tokens=129), scattered(128, 16), 128) is None
    assert store.count("put") == 2


def test_a_hand_off_checks_what_is_believed_and_writes_what_was_evicted(store: FaultyStore, make: MakeEngine) -> None:
    engine = make("p")
    kv, _ = prefill(engine, 128)
    assert store.count("put") == 2
    prefill(engine, 128, transfer_id="u")
    assert store.count("put") == 2
    store.inner.delete(list(store.inner._shelf._values)[:1])
    _, handoff = prefill(engine, 128, transfer_id="v")
    assert store.count("put") == 3
    decode = make("d")
    request = view("v", kv="await_peer", num_tokens=129, handoff=handoff, kv_ready=True, salt="0")
    assert not decode.load(request, scattered(128, 16), 128).code
    assert torch.equal(decode.tokens(scattered(128, 16), 128), kv)


@pytest.mark.parametrize("bound", [1, 64])
def test_what_was_too_much_is_saved_as_room_comes(store: FaultyStore, make: MakeEngine, bound: int) -> None:
    """F56: Also behind its request's end: its blocks have it until they are reused. A hand-off waits for no room."""
    engine = make("p")
    request, blocks = view("a", num_tokens=257), scattered(256, 16)
    kv = random_kv(256, seed=7)
    engine.fill(blocks, kv)
    engine.scheduler._max_save_bytes = bound * engine.scheduler._token_bytes  # at most one value
    meta = engine.confirm(request, blocks, 256)
    news: dict[str, Any] = {"finished": [TransferKey("a", 1)]}
    while meta.saves:
        (save,) = meta.saves
        assert len(save.values) == 1
        assert not engine.scheduler.has_pending_work
        assert not engine.wait(save.batch).code
        meta, news = engine.step(**news), {}
    assert engine.scheduler.num_late_saves == 0
    assert engine.ask(view("b", num_tokens=257)) == 256
    assert not engine.load(view("b", num_tokens=257), scattered(256, 16, start=7), 256).code
    assert torch.equal(engine.tokens(scattered(256, 16, start=7), 256), kv)
    prefill(engine, 128, transfer_id="c", seed=1)


def test_what_was_too_much_is_lost_with_its_blocks_and_counted(store: FaultyStore, make: MakeEngine) -> None:
    engine, blocks = make("p", max_save_bytes="1"), scattered(256, 16)
    meta = engine.confirm(view("a", num_tokens=257), blocks, 256)
    engine.table.reuse(blocks[5])  # of the second value
    for _ in range(3):
        engine.wait(meta.saves[0].batch)
        meta = engine.step(finished=[TransferKey("a", 1)])
    assert not meta.saves
    assert store.count("put") == 3
    assert engine.scheduler.get_stats()[""].late_saves == 1
    assert not engine.scheduler.has_pending_work


def test_what_was_handed_over_is_looked_for_before_it_is_saved(store: FaultyStore, make: MakeEngine) -> None:
    """F59: Prefill has stored it, or is about to."""
    prefill(make("p"), 128)
    num_put = store.count("put")
    request = view("u", num_tokens=193, salt="0", num_handed_over=150)
    engine = make("d")
    meta = engine.confirm(request, scattered(192, 16), 192)
    assert [(len(save.values), len(save.check)) for save in meta.saves] == [(1, 2)]
    engine.wait(meta.saves[0].batch)
    assert store.count("put") == num_put + 1


def test_what_its_first_token_ended_is_stored(store: FaultyStore, make: MakeEngine) -> None:
    engine, blocks = make("p"), scattered(128, 16)
    request = view("t", kv="handoff", num_tokens=129)
    confirmed = ConfirmedRange(request, 0, 128, [blocks], False)
    meta = engine.step(confirmed=[confirmed], finished=[TransferKey("t", 1)])
    assert not engine.wait(meta.saves[0].batch).code
    assert store.count("put") == 2
    assert not engine.worker._transfers


# --- configuration ------------------------------------------------------------------------------------------------


def config(**options: str) -> ConnectorConfig:
    plan = ConnectorPlan(interface=INTERFACE, kind="store", options=options)
    return ConnectorConfig(engine="e", epoch="1", layout=make_layout(16), num_blocks=8, plan=plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_per_value": "40"}, "multiple of 16, got 40"),
        ({"layer_groups": "4"}, r"1 to 3 .* got 4"),
        ({"load": "eager"}, "one of async, layerwise was expected, got 'eager'"),
        ({"io_threads": "0"}, "at least 1"),
        ({"transfer_timeout_s": "inf"}, "above 0"),
        ({"nonsense": "1"}, "unknown option 'nonsense'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RigConnector(config(**options), lambda: None)


def test_heads_that_cannot_be_cut_are_refused_with_both_values() -> None:
    layout = make_layout(16, 2)
    with pytest.raises(ConfigError, match="4 KV heads on 2 ranks cannot be cut into 3 shards"):
        RigConnector(
            ConnectorConfig(engine="e", epoch="1", layout=layout, num_blocks=8, tp=2, kv_shards=3), lambda: None
        )


def test_layerwise_loads_come_in_groups_unless_told_otherwise() -> None:
    groups = [
        RigConnector(config(**options), lambda: None).cut.layer_groups
        for options in ({}, {"load": "layerwise"}, {"load": "layerwise", "layer_groups": "2"})
    ]
    assert groups == [1, 3, 2]  # three layers are at most three groups


def test_store_and_shared_storage_need_a_place() -> None:
    with pytest.raises(ConfigError, match="url="):
        StoreUrlConnector(config(), lambda: None).open_store()
    with pytest.raises(ConfigError, match="path="):
        SharedStorageConnector(config(), lambda: None).open_store()
    with pytest.raises(ConfigError, match="an absolute path was expected, got 'relative'"):
        SharedStorageConnector(config(path="relative"), lambda: None).open_store()


def test_options_of_the_store_are_passed_on() -> None:
    with pytest.raises(ConfigError, match="unknown option 'nonsense'"):
        StoreUrlConnector(config(url="memory://x", nonsense="1"), lambda: None).open_store()
    StoreUrlConnector(config(url="memory://x", capacity="1MiB"), lambda: None).open_store().close()
