"""What a store connector tells of its store: what was saved, loaded or missed here, by its first KV group's keys."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from store_rig import Engine, FaultyStore, MakeEngine, chain, prefill, scattered, view

from pdkv.connectors.store import news as store_news
from pdkv.errors import StoreUnavailable
from pdkv.kv_store.file_store import FileStore
from pdkv.kv_store.host_store import HostStore
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.redis_store import RedisStore
from pdkv.kv_store.tiers import TieredStore
from pdkv.wire.kv import KVGroup
from pdkv.wire.tiers import TierEvents, TierPart


def told(engine: Engine) -> tuple[list[bytes], list[bytes]]:
    """(stored, removed) since this was asked last."""
    events = engine.scheduler.tiers.take_events()
    return [key for e in events for key in e.stored], [key for e in events for key in e.removed]


def ends(num_tokens: int, salt: str = "0") -> list[bytes]:
    """The block keys at the ends of values of 64 tokens."""
    return chain(num_tokens // 16, salt)[3::4]


def test_the_first_call_says_that_there_is_a_store(make: MakeEngine) -> None:
    engine = make()
    assert list(engine.scheduler.tiers.take_events()) == [
        TierEvents("store", True, 64, parts=[TierPart("")], value_bytes=64 * engine.layout.token_bytes)
    ]
    assert list(engine.scheduler.tiers.take_events()) == []


def test_whole_values_that_were_saved_are_told_and_no_tail(make: MakeEngine) -> None:
    engine = make("p")
    told(engine)
    prefill(engine, 200)  # 3 values and a tail of 8 tokens
    assert told(engine) == (ends(192), [])
    assert told(engine) == ([], [])


def test_what_was_loaded_is_told_by_the_reader_too(make: MakeEngine) -> None:
    prefill(make("p"), 256)
    reader, request = make("o"), view("u", num_tokens=257, salt="0")
    assert reader.ask(request) == 256
    assert told(reader) == ([], []), "not what is only looked up"
    assert not reader.load(request, scattered(256, 16), 256).code
    assert told(reader) == (ends(256), [])


def test_the_first_value_that_a_prompt_does_not_find_is_told_as_missing(make: MakeEngine) -> None:
    prefill(make("p"), 128)
    reader = make("o")
    told(reader)
    assert reader.ask(view("u", num_tokens=257, salt="0")) == 128
    assert told(reader) == ([], ends(256)[2:3])
    assert reader.ask(view("w", num_tokens=257, salt="other")) == 0
    assert told(reader) == ([], ends(64, "other"))


def test_a_load_tells_how_far_it_came(make: MakeEngine, store: FaultyStore) -> None:
    prefill(make("p"), 256)
    reader, request = make("o"), view("u", num_tokens=257, salt="0")
    assert reader.ask(request) == 256
    cut = reader.connectors[0].cut
    store.inner.delete([ends(256)[2] + suffix for suffix in cut.suffixes])
    assert reader.load(request, scattered(256, 16), 256).num_tokens == 128
    assert told(reader) == (ends(128), ends(256)[2:3])


def test_a_store_that_does_not_answer_says_nothing_of_its_content(make: MakeEngine, store: FaultyStore) -> None:
    prefill(make("p"), 256)
    reader, request = make("o"), view("u", num_tokens=257, salt="0")
    assert reader.ask(request) == 256
    told(reader)
    store.failing["get"] = StoreUnavailable("gone")
    assert reader.load(request, scattered(256, 16), 256).code == StoreUnavailable.code
    assert told(reader) == ([], [])
    store.failing["contains"] = StoreUnavailable("gone")
    assert reader.ask(view("v", num_tokens=257, salt="other")) == 0
    assert told(reader) == ([], [])


def test_a_failed_save_tells_nothing(make: MakeEngine, store: FaultyStore) -> None:
    engine, request = make("p"), view("t", num_tokens=129, salt="0")
    told(engine)
    store.failing["put"] = StoreUnavailable("full")
    blocks = scattered(128, 16)
    engine.fill(blocks, torch.zeros(128, 3, 2, 4, 4))
    outcome = engine.save(request, blocks, 128)
    assert outcome is not None
    assert outcome.code
    assert told(engine) == ([], [])


def test_of_a_key_the_last_word_counts_and_so_many_wait(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_news, "MAX_NEWS", 3)
    engine = make()
    news, cut = engine.scheduler._news, engine.connectors[0].cut
    values = cut.whole_values(chain(20), 0, 320)
    news.stored(values)
    news.missing(values[1:2])
    assert told(engine) == ([values[0].key, values[2].key], [values[1].key])


@pytest.mark.parametrize(
    ("groups", "is_told"),
    [((KVGroup((0, 1)), KVGroup((2,), 40)), True), ((KVGroup((0, 1, 2), 40),), False)],
    ids=["full and window", "window"],
)
def test_of_several_groups_the_first_is_told_and_a_window_never(
    make: MakeEngine, groups: tuple[KVGroup, ...], is_told: bool
) -> None:
    engine = make(groups=groups)
    cut, keys = engine.connectors[0].cut, chain(8)
    told(engine)
    engine.scheduler._news.stored([v for group in range(len(groups)) for v in cut.whole_values(keys, 0, 128, group)])
    assert told(engine) == ((keys[3::4] if is_told else []), [])


def test_engines_of_unequal_blocks_name_the_same_ends(make: MakeEngine) -> None:
    """Their hits may end elsewhere, where there are windows."""
    groups = (KVGroup((0, 1)), KVGroup((2,), 40))
    small, large = (make(f"e{size}", block_size=size, groups=groups, tokens_per_value="16") for size in (16, 32))
    assert [engine.connectors[0].cut.hit_tokens for engine in (small, large)] == [16, 32]
    value_bytes = 16 * small.layout.token_bytes
    told_first = [TierEvents("store", True, 16, parts=[TierPart("")], value_bytes=value_bytes)]
    assert list(small.scheduler.tiers.take_events()) == list(large.scheduler.tiers.take_events()) == told_first


def test_stores_say_what_they_lie_on_and_whether_others_reach_it() -> None:
    assert (MemoryStore.medium, MemoryStore.is_shared) == ("memory", False)
    assert (FileStore.medium, FileStore.is_shared) == ("disk", True)
    assert (RedisStore.medium, RedisStore.is_shared) == ("store", True)
    assert (TieredStore.medium, TieredStore.is_shared) == ("store", True)


def test_what_a_store_consists_of_is_told_with_the_room_that_each_part_has(tmp_path: Path) -> None:
    host = HostStore(tmp_path / "kv", StoreOptions(capacity=1 << 20))
    with closing(Engine(TieredStore([host, FileStore(tmp_path / "files")]))) as engine:
        [events] = engine.scheduler.tiers.take_events()
        value_bytes = 64 * engine.layout.token_bytes
    room = host.count_held().capacity // value_bytes
    assert room > 0
    assert events.parts == [TierPart("0-host", room), TierPart("1-file")]
    assert events.under("1-store").parts == [TierPart("1-store/0-host", room), TierPart("1-store/1-file")]
    assert TierEvents("store", True, 64, parts=[TierPart("")]).under("1-store").parts == [TierPart("1-store")]


def test_reads_of_each_part_are_measured_and_named_as_the_parts_are() -> None:
    tiers = TieredStore([MemoryStore(), MemoryStore()])
    with closing(Engine(tiers, "p")) as writer, closing(Engine(tiers, "o")) as reader:
        prefill(writer, 256)
        request = view("u", num_tokens=257, salt="0")
        assert reader.ask(request) == 256
        assert not reader.load(request, scattered(256, 16), 256).code
        stats = reader.worker.get_stats()
    assert stats["0-memory"].read_bytes == stats[""].read_bytes > 0
    assert 0 < stats["0-memory"].read_seconds <= stats[""].read_seconds
    assert not stats["1-memory"].read_bytes


def test_the_size_of_what_is_read_is_that_of_what_is_stored(make: MakeEngine) -> None:
    """A codec makes it smaller; a rank reads all parts of a value."""
    for options in ({"codec": "fp8"}, {"codec": "fp8", "layer_groups": "3"}, {}):
        writer, reader = make("p", **options), make("o", **options)
        [events] = reader.scheduler.tiers.take_events()
        prefill(writer, 128, transfer_id=f"{options}")
        request = view("u", num_tokens=129, salt="0")
        assert reader.ask(request) == 128
        assert not reader.load(request, scattered(128, 16), 128).code
        read_bytes = reader.worker.get_stats()[""].read_bytes
        envelopes = 0 if options else 2 * 64
        assert read_bytes == 2 * events.value_bytes + envelopes
