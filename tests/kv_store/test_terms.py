"""Values that end, and values of owners who may have only so much, in memory: what goes, and what stays for others."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdkv.errors import StoreFull
from pdkv.kv_store.base import Item, KVStore
from pdkv.kv_store.host_segment import LAST_END, PAGE_BYTES, Segment, key_of
from pdkv.kv_store.host_store import HostStore
from pdkv.kv_store.host_writer import SegmentWriter
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.terms import NO_TERMS, Ledger, Terms
from pdkv.testing import VirtualClock

SIZE = PAGE_BYTES  # of a value, in memory too
ROOM = 24  # values
CAPACITY = ROOM * PAGE_BYTES
NOW = 1_800_000_000.0
ANNA, BERT = 7, 2**63 - 1


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(NOW)


@pytest.fixture(params=["host", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: VirtualClock) -> Iterator[KVStore]:
    if request.param == "host":
        with HostStore(tmp_path / "kv", StoreOptions(capacity=CAPACITY), clock.now) as host:
            yield host
            check_writer(host)
    else:
        with MemoryStore("terms", CAPACITY, clock.now) as memory:
            yield memory
            memory.check_integrity()


def check_writer(store: HostStore) -> None:
    """The ledger has what the values take, and no more."""
    writer = own(store)
    owned: dict[int, int] = {}
    for held in writer._held.values():
        if held.terms.owner:
            owned[held.terms.owner] = owned.get(held.terms.owner, 0) + len(held.pages) * PAGE_BYTES
    assert writer._ledger.count() == owned
    assert sum(len(held.pages) for held in writer._held.values()) + writer.num_free_pages == writer.segment.num_pages


def own(store: HostStore) -> SegmentWriter:
    assert store.own is not None
    return store.own


def key(name: str) -> bytes:
    return name.encode()


def put(store: KVStore, *names: str, size: int = SIZE, terms: Terms = NO_TERMS) -> None:
    """One after the other: the first one is the least recently used."""
    for name in names:
        store.put_on_terms([(key(name), memoryview(bytes(size)))], {key(name): terms})


def there(store: KVStore, *names: str) -> str:
    """Those that are, in one word: `contains` and copies agree. It may count as a use."""
    found = store.contains([key(name) for name in names])
    out = [memoryview(bytearray(SIZE)) for _ in names]
    assert store.peek([key(name) for name in names], out) == found
    return "".join(name for name, is_there in zip(names, found, strict=True) if is_there)


# --- ends ---------------------------------------------------------------------------------------------------------


def test_a_value_is_there_until_its_time_is_over(store: KVStore, clock: VirtualClock) -> None:
    put(store, "a", terms=Terms(int(NOW) + 10))
    put(store, "b")
    clock.advance(9.5)
    assert there(store, "a", "b") == "ab"
    clock.advance(0.5)
    assert there(store, "a", "b") == "b"


def test_a_value_whose_time_is_over_can_be_put_anew_and_one_that_is_there_keeps_its_end(
    store: KVStore, clock: VirtualClock
) -> None:
    put(store, "a", terms=Terms(int(NOW) + 10))
    put(store, "a", terms=Terms(int(NOW) + 20))
    put(store, "a")
    clock.advance(10)
    assert there(store, "a") == ""
    put(store, "a", terms=Terms(int(NOW) + 20))
    assert there(store, "a") == "a"
    clock.advance(10)
    assert there(store, "a") == ""


def test_what_is_over_already_is_not_put(store: KVStore) -> None:
    put(store, "a", terms=Terms(int(NOW)))
    assert there(store, "a") == ""


def test_values_whose_time_is_over_make_room_before_the_least_recently_used(
    store: KVStore, clock: VirtualClock
) -> None:
    old = [chr(ord("A") + i) for i in range(ROOM - 2)]
    put(store, *old)
    put(store, "x", "y", terms=Terms(int(NOW) + 10))
    clock.advance(10)
    put(store, "1", "2", "3")
    assert there(store, *old, "x", "y", "1", "2", "3") == "".join(old[1:]) + "123"


@pytest.mark.parametrize("step", [-1e9, 1e9, 1e12, -NOW - 5])
def test_a_clock_that_steps_costs_values_at_most(store: KVStore, clock: VirtualClock, step: float) -> None:
    put(store, "a", terms=Terms(int(NOW) + 10))
    clock.advance(step)
    assert there(store, "a") == ("a" if step < 0 else "")
    put(store, "b", terms=Terms(max(int(clock.now()) + 10, 1)))
    put(store, "c")
    assert there(store, "c") == "c"


def test_ends_that_no_clock_reaches_are_kept(store: KVStore, clock: VirtualClock) -> None:
    """Those of damaged values, on their way from a slower tier, are any number."""
    put(store, "a", terms=Terms(2**64 - 1))
    clock.advance(LAST_END - 1 - clock.now())
    assert there(store, "a") == "a"


def test_nothing_is_kept_of_ends_of_values_that_are_gone() -> None:
    ledger: Ledger[bytes] = Ledger()
    for number in range(10_000):
        name = b"%d" % number
        ledger.enter(name, Terms(int(NOW) + number))
        ledger.leave(name)
    assert len(ledger._ends) < 100
    assert ledger.first_over(NOW + 10_000) is None


# --- quotas -------------------------------------------------------------------------------------------------------


def test_within_a_quota_the_owners_least_recently_used_values_make_room_and_nobody_elses(store: KVStore) -> None:
    put(store, "x", terms=Terms(owner=BERT, quota=SIZE))
    put(store, "y")
    annas = Terms(owner=ANNA, quota=3 * SIZE)
    put(store, "a", "b", "c", terms=annas)
    assert store.get([key("a")], [memoryview(bytearray(SIZE))]) == [True]
    put(store, "d", terms=annas)
    assert there(store, "a", "b", "c", "d", "x", "y") == "acdxy"
    assert store.count_held().owned == ({ANNA: 3 * SIZE, BERT: SIZE} if isinstance(store, HostStore) else {})


def test_an_owner_without_a_quota_has_as_much_as_there_is(store: KVStore) -> None:
    names = [chr(ord("A") + i) for i in range(ROOM)]
    put(store, *names, terms=Terms(owner=ANNA))
    assert there(store, *names) == "".join(names)


def test_a_value_larger_than_the_quota_is_refused_and_costs_the_owner_nothing(store: KVStore) -> None:
    put(store, "a", terms=Terms(owner=ANNA, quota=SIZE))
    with pytest.raises(StoreFull, match=rf"do not fit into .*{SIZE}$"):
        put(store, "b", size=SIZE + 1, terms=Terms(owner=ANNA, quota=SIZE))
    assert there(store, "a") == "a"


def test_a_smaller_quota_holds_from_the_next_value_on(store: KVStore) -> None:
    put(store, "a", "b", "c", terms=Terms(owner=ANNA, quota=3 * SIZE))
    put(store, "d", terms=Terms(owner=ANNA, quota=2 * SIZE))
    assert there(store, "a", "b", "c", "d") == "cd"


def test_what_is_deleted_or_over_or_evicted_is_no_part_of_a_quota(store: KVStore, clock: VirtualClock) -> None:
    annas = Terms(owner=ANNA, quota=2 * SIZE)
    put(store, "a", terms=annas)
    put(store, "b", terms=annas._replace(expires_at=int(NOW) + 10))
    store.delete([key("a")])
    clock.advance(10)
    put(store, "c", "d", terms=annas)
    assert there(store, "c", "d") == "cd"
    put(store, *[f"{i}" for i in range(ROOM)])  # all others go
    put(store, "e", "f", terms=annas)
    assert there(store, "e", "f") == "ef"


def test_of_an_owners_values_those_that_are_over_go_first(store: KVStore, clock: VirtualClock) -> None:
    annas = Terms(owner=ANNA, quota=2 * SIZE)
    put(store, "a", terms=annas)
    put(store, "b", terms=annas._replace(expires_at=int(NOW) + 10))
    clock.advance(10)
    put(store, "c", terms=annas)
    assert there(store, "a", "b", "c") == "ac"


# --- host memory alone --------------------------------------------------------------------------------------------

Open = Callable[[], HostStore]


@pytest.fixture(name="open_")
def opener(tmp_path: Path, clock: VirtualClock, keep: Callable[..., Any]) -> Open:
    return lambda: keep(HostStore(tmp_path / "kv", StoreOptions(capacity=CAPACITY), clock.now))


def test_who_reads_another_ones_segment_keeps_to_its_ends_and_then_writes_the_value(
    open_: Open, clock: VirtualClock
) -> None:
    writer, reader = open_(), open_()
    put(writer, "a", terms=Terms(int(NOW) + 10))
    put(reader, "a")
    assert (there(reader, "a"), len(own(reader))) == ("a", 0)
    clock.advance(10)
    assert there(reader, "a") == ""
    put(reader, "a")
    assert (there(reader, "a"), there(writer, "a"), len(own(reader))) == ("a", "a", 1)


def test_a_successor_goes_on_with_ends_and_owners(open_: Open, clock: VirtualClock) -> None:
    store = open_()
    annas = Terms(owner=ANNA, quota=2 * SIZE)
    put(store, "x")
    put(store, "a", "b", terms=annas)
    put(store, "c", terms=Terms(int(NOW) + 10, BERT))
    store.close()
    again = open_()
    assert again.count_held().owned == {ANNA: 2 * SIZE, BERT: SIZE}
    assert again.terms_of([key("x"), key("a"), key("c")]) == {
        key("a"): Terms(owner=ANNA), key("c"): Terms(int(NOW) + 10, BERT)
    }  # fmt: skip
    put(again, "d", terms=annas)
    clock.advance(10)
    assert there(again, "x", "a", "b", "c", "d") == "xbd"
    check_writer(again)


def test_an_end_or_an_owner_that_is_damaged_costs_the_value(open_: Open, tmp_path: Path) -> None:
    store = open_()
    put(store, "a", terms=Terms(int(NOW) + 10, ANNA))
    put(store, "b", terms=Terms(int(NOW) + 10, ANNA))
    put(store, "c")
    store.close()
    [path] = (tmp_path / "kv").iterdir()
    segment = Segment(os.open(path, os.O_RDWR), writable=True)
    for name, field in (("a", "expires_at"), ("b", "owner"), ("c", "owner")):
        found = segment.find(key_of(key(name)))
        assert found is not None
        segment.entries[field][found.entry] ^= 1
    segment.close()
    assert there(open_(), "a", "b", "c") == ""


def test_pinned_values_count_and_do_not_make_room_and_expected_ones_do_last(open_: Open) -> None:
    store = open_()
    annas = Terms(owner=ANNA, quota=3 * SIZE)
    put(store, "a", "b", "c", terms=annas)
    assert store.pin([key("a")], None) == [True]
    store.expect([key("b")])
    put(store, "d", terms=annas)
    assert there(store, "a", "b", "c", "d") == "abd"
    assert store.pin([key("d")], None) == [True]
    put(store, "e", terms=annas)
    assert there(store, "a", "b", "d", "e") == "ade", "what is expected goes where there is nothing else"
    assert store.pin([key("e")], None) == [True]
    with pytest.raises(StoreFull, match="all of what its owner may have is being written, or pinned"):
        put(store, "f", terms=annas)
    put(store, "x")
    assert there(store, "a", "d", "e", "x") == "adex"


def test_a_pin_does_not_keep_a_value_beyond_its_end(open_: Open, clock: VirtualClock) -> None:
    store = open_()
    put(store, "a", terms=Terms(int(NOW) + 10))
    assert store.pin([key("a")], None) == [True]
    put(store, "b", terms=Terms(int(NOW) + 10))
    clock.advance(10)
    assert there(store, "a") == ""
    assert store.unpin(None) == 0
    assert store.pin([key("b")], None) == [False]


def test_an_owners_values_that_are_written_at_a_time_keep_to_the_quota_together(
    open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_()
    both = threading.Barrier(2)
    write = Segment.write

    def write_together(segment: Segment, pages: list[int], value: memoryview) -> None:
        both.wait(20)
        write(segment, pages, value)

    monkeypatch.setattr(Segment, "write", write_together)
    results: list[str] = []

    def put_one(name: str) -> None:
        try:
            put(store, name, terms=Terms(owner=ANNA, quota=SIZE))
        except StoreFull as error:
            results.append(error.code)
            both.wait(20)

    threads = [threading.Thread(target=put_one, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == ["store_full"]
    assert len(there(store, "a", "b")) == 1
    check_writer(store)


def test_a_write_that_fails_gives_the_owners_room_back(open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_()

    def fail(segment: Segment, pages: list[int], value: memoryview) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "write", fail)
        with pytest.raises(StoreFull, match="No space"):
            put(store, "a", terms=Terms(owner=ANNA, quota=SIZE))
    assert store.count_held().owned == {}
    put(store, "a", terms=Terms(owner=ANNA, quota=SIZE))
    assert there(store, "a") == "a"


def test_what_goes_first_is_told_of_the_whole_segment_and_of_each_quota(open_: Open, clock: VirtualClock) -> None:
    store = open_()
    annas = Terms(owner=ANNA, quota=4 * SIZE)
    put(store, "x")
    put(store, "a", "b", "c", terms=annas)
    put(store, "o", terms=Terms(int(NOW) + 10, BERT))
    quarter = CAPACITY // 4

    def first_to_go() -> str:
        return "".join(name.decode() for name, _ in store.coldest(quarter))

    assert first_to_go() == ""
    put(store, "d", terms=annas)
    assert first_to_go() == "a", "a quarter of the quota"
    put(store, *[f"{i}" for i in range(ROOM - 6)])
    assert first_to_go() == "xabcod"
    clock.advance(10)
    assert "o" not in first_to_go()


def test_a_store_of_ones_own_gets_values_with_terms_as_all_others() -> None:
    puts: list[bytes] = []

    class Simple(MemoryStore):
        put_on_terms = KVStore.put_on_terms

        def put(self, items: Sequence[Item]) -> None:
            puts.extend(name for name, _ in items)

    terms: Mapping[bytes, Terms] = {b"a": Terms(1, ANNA, 1)}
    with Simple("simple") as store:
        store.put_on_terms([(b"a", memoryview(b"x")), (b"b", memoryview(b"y"))], terms)
        assert puts == [b"a", b"b"]
        assert KVStore.terms_of(store, [b"a"]) == {}
        out = [memoryview(bytearray(1))]
        assert KVStore.read_on_terms(store, [b"a"], out, lambda i, stop: None, lambda i: NO_TERMS) == [False]
