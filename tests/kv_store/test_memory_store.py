"""Values in memory: shared by name, bounded by bytes."""

from collections.abc import Iterator

import pytest

from pdkv.errors import ConfigError, StoreFull
from pdkv.kv_store.memory_store import MemoryStore


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    """Room for three values of 100 bytes."""
    store = MemoryStore("test", 300)
    yield store
    store.check_integrity()
    store.close()


def put(store: MemoryStore, *keys: bytes) -> None:
    store.put([(key, memoryview(bytes(100))) for key in keys])


def test_the_least_recently_used_goes_first(store: MemoryStore) -> None:
    for key in (b"a", b"b", b"c"):
        put(store, key)
    assert store.get([b"a"], [memoryview(bytearray(100))]) == [True]
    put(store, b"d")
    assert store.contains([b"a", b"b", b"c", b"d"]) == [True, False, True, True]
    assert store.num_evicted == 1


def test_the_end_of_a_batch_goes_before_its_beginning(store: MemoryStore) -> None:
    put(store, b"a", b"b", b"c")
    put(store, b"d")
    assert store.contains([b"a", b"b", b"c", b"d"]) == [True, True, False, True]


def test_of_a_batch_beyond_the_bound_the_beginning_stays(store: MemoryStore) -> None:
    put(store, b"a", b"b", b"c", b"d", b"e")
    assert store.contains([b"a", b"b", b"c", b"d", b"e"]) == [True, True, True, False, False]


def test_a_value_larger_than_the_bound_is_refused_and_nothing_is_lost(store: MemoryStore) -> None:
    """F7: no room is an answer, not a wait."""
    put(store, b"a")
    with pytest.raises(StoreFull, match="301 bytes do not fit into 300"):
        store.put([(b"b", memoryview(bytes(301)))])
    assert store.contains([b"a", b"b"]) == [True, False]


def test_stores_of_one_name_share_values_until_the_last_is_closed() -> None:
    first, second = MemoryStore("shared"), MemoryStore("shared")
    put(first, b"a")
    first.close()
    assert second.contains([b"a"]) == [True]
    second.close()
    with MemoryStore("shared") as third:
        assert third.contains([b"a"]) == [False]


def test_stores_of_two_names_share_nothing() -> None:
    with MemoryStore("one") as one, MemoryStore("two") as two:
        put(one, b"a")
        assert two.contains([b"a"]) == [False]


def test_two_capacities_under_one_name_are_refused(store: MemoryStore) -> None:
    with pytest.raises(ConfigError, match="capacity 300, got 400"):
        MemoryStore("test", 400)
    with MemoryStore("test") as same:
        put(same, b"a")
        assert store.contains([b"a"]) == [True]
