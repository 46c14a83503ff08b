"""Tiers that do not take all that is written: what comes to them, when, and what does not."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from traffic import wait_until_true

from pdkv.errors import StoreTimeout, StoreUnavailable
from pdkv.kv_store import backfill
from pdkv.kv_store.backfill import COLD_SHARE
from pdkv.kv_store.base import Item, Sized
from pdkv.kv_store.host_segment import LAST_END, PAGE_BYTES
from pdkv.kv_store.host_store import HostStore
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.recent_keys import RecentKeys
from pdkv.kv_store.terms import NO_TERMS, Terms
from pdkv.kv_store.tier import WritePolicy
from pdkv.kv_store.tiers import TieredStore
from pdkv.testing import VirtualClock

SIZE = PAGE_BYTES
CAPACITY = 3 << 20
WAIT_S = 20.0


class LowerTier(MemoryStore):
    """Memory that tells when something was put or deleted, and that can be held up and refuse."""

    def __init__(self) -> None:
        super().__init__("lower")
        self.changed = threading.Condition()
        self.may_put = threading.Event()
        self.may_put.set()
        self.putting = threading.Event()
        self.fails = False
        self.num_puts = 0
        self.num_deletes = 0
        self.terms: dict[bytes, Terms] = {}  # on which values came

    def put_on_terms(self, items: Sequence[Item], terms: Mapping[bytes, Terms]) -> None:
        self.putting.set()
        assert self.may_put.wait(WAIT_S)
        with self.changed:
            self.num_puts += 1
            self.changed.notify_all()
            if self.fails:
                raise StoreUnavailable("not now")
            self.terms.update(terms)
            super().put_on_terms(items, terms)

    def delete(self, keys: Sequence[bytes]) -> None:
        with self.changed:
            self.num_deletes += 1
            super().delete(keys)
            self.changed.notify_all()

    def await_keys(self, *keys: bytes) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: all(self.contains(keys)), WAIT_S)


def key(number: int) -> bytes:
    return b"key%d" % number


def value(number: int) -> memoryview:
    return memoryview(bytes([number % 251]) * SIZE)


def put(store: TieredStore, *numbers: int) -> None:
    store.put([(key(n), value(n)) for n in numbers])


def get(store: TieredStore, *numbers: int) -> list[bool]:
    out = [memoryview(bytearray(SIZE)) for _ in numbers]
    found = store.get([key(n) for n in numbers], out)
    assert all(buffer == value(n) for n, buffer, is_in in zip(numbers, out, found, strict=True) if is_in)
    return found


@pytest.fixture
def lower() -> LowerTier:
    return LowerTier()


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path, lower: LowerTier) -> Iterator[TieredStore]:
    policy: WritePolicy = request.param
    host = HostStore(tmp_path / "host", StoreOptions(capacity=CAPACITY))
    with TieredStore([host, lower], retry_after_s=1e-9, write=["all", policy]) as tiers:
        yield tiers


second_use = pytest.mark.parametrize("store", ["second-use"], indirect=True)
evicted = pytest.mark.parametrize("store", ["evicted"], indirect=True)


@second_use
def test_what_is_put_once_is_not_written_and_what_is_put_again_is(store: TieredStore, lower: LowerTier) -> None:
    put(store, 1, 2)
    assert lower.num_puts == 0
    put(store, 2, 3)
    assert lower.contains([key(1), key(2), key(3)]) == [False, True, False]


@second_use
def test_what_is_read_from_a_faster_tier_is_copied_behind_the_reader(store: TieredStore, lower: LowerTier) -> None:
    """The reader has its value while the slow tier still hangs."""
    put(store, 1, 2)
    lower.may_put.clear()
    assert get(store, 2) == [True]
    assert lower.putting.wait(WAIT_S)
    assert get(store, 2) == [True]
    lower.may_put.set()
    lower.await_keys(key(2))
    assert lower.contains([key(1)]) == [False]
    store.tiers[0].store.delete([key(2)])
    assert get(store, 2) == [True]  # from below, with its bytes


@second_use
def test_what_is_there_already_is_not_written_again(store: TieredStore, lower: LowerTier) -> None:
    put(store, 1, 2)
    lower.put([(key(1), value(1))])
    get(store, 1, 2)
    lower.await_keys(key(2))
    copies = store._backfill
    assert copies is not None
    wait_until_true(lambda: not copies._is_busy, "it is known")
    get(store, 1, 2)
    put(store, 3)
    get(store, 3)
    lower.await_keys(key(3))
    assert lower.num_puts == 3  # the one from outside, that of 2, that of 3


@second_use
def test_a_value_that_is_deleted_while_it_is_copied_does_not_come_again(store: TieredStore, lower: LowerTier) -> None:
    put(store, 1)
    lower.may_put.clear()
    get(store, 1)
    assert lower.putting.wait(WAIT_S)
    store.delete([key(1)])
    lower.may_put.set()
    with lower.changed:
        assert lower.changed.wait_for(lambda: lower.num_puts == 1 and lower.num_deletes == 2, WAIT_S)
    assert store.contains([key(1)]) == [False]


@second_use
def test_a_copy_under_way_does_not_bring_back_what_is_cleared(store: TieredStore, lower: LowerTier) -> None:
    put(store, 1)
    lower.may_put.clear()
    get(store, 1)
    assert lower.putting.wait(WAIT_S)
    store.forget(None)
    for part in reversed(store.parts().values()):
        part.discard(None)
    lower.may_put.set()
    with lower.changed:
        assert lower.changed.wait_for(lambda: lower.num_puts == 1 and lower.num_deletes == 1, WAIT_S)
    assert store.contains([key(1)]) == [False]


@second_use
def test_a_still_block_begins_behind_the_copy_under_way_and_before_the_next(
    store: TieredStore, lower: LowerTier
) -> None:
    put(store, 1, 2)
    copies = store._backfill
    assert copies is not None
    num_puts: list[int] = []

    def look() -> None:
        with store.still(WAIT_S):
            num_puts.append(lower.num_puts)

    lower.may_put.clear()
    get(store, 1)
    assert lower.putting.wait(WAIT_S)
    looker = threading.Thread(target=look)
    looker.start()
    wait_until_true(lambda: copies._is_held, "it is waited for")
    get(store, 2)
    lower.may_put.set()
    looker.join(WAIT_S)
    assert num_puts == [1]
    lower.await_keys(key(1), key(2))


@second_use
def test_a_copy_that_does_not_end_in_time_is_an_error(store: TieredStore, lower: LowerTier) -> None:
    put(store, 1)
    lower.may_put.clear()
    get(store, 1)
    assert lower.putting.wait(WAIT_S)
    with pytest.raises(StoreTimeout, match="a copy between tiers has not ended in time"), store.still(0.0):
        pytest.fail("it is under way")
    lower.may_put.set()
    lower.await_keys(key(1))
    with store.still(WAIT_S):
        assert lower.num_puts == 1


@second_use
def test_two_still_blocks_are_one_after_the_other(store: TieredStore, lower: LowerTier) -> None:
    with store.still(WAIT_S), pytest.raises(StoreTimeout), store.still(0.0):
        pytest.fail("both at once")
    put(store, 1)
    get(store, 1)
    lower.await_keys(key(1))


@second_use
def test_a_store_is_closed_within_a_still_block(store: TieredStore) -> None:
    """The thread does not wait for the block's end."""
    put(store, 1)
    get(store, 1)
    with store.still(WAIT_S):
        get(store, 1)
        store.close()
    assert store._backfill is not None
    assert not store._backfill._thread.is_alive


@second_use
def test_a_tier_that_fails_gets_it_with_the_next_use(store: TieredStore, lower: LowerTier) -> None:
    put(store, 1)
    lower.fails = True
    get(store, 1)
    with lower.changed:
        assert lower.changed.wait_for(lambda: lower.num_puts == 1, WAIT_S)
        lower.fails = False
    for _ in range(1000):  # the first ones may find the copy that failed still on its way
        assert get(store, 1) == [True]
        with lower.changed:
            if lower.changed.wait_for(lambda: lower.contains([key(1)])[0], 0.02):
                return
    pytest.fail("never written")


@evicted
def test_what_goes_from_host_memory_is_below_and_what_stays_is_not(store: TieredStore, lower: LowerTier) -> None:
    num_pages = num_pages_of(store)
    cold = -(-num_pages // COLD_SHARE)
    for number in range(num_pages - cold):
        put(store, number)
    assert lower.num_puts == 0
    for number in range(num_pages - cold, num_pages + 4):  # what goes next is copied before it goes
        put(store, number)
        first = number - num_pages + cold
        lower.await_keys(key(first))
    assert store.tiers[0].store.contains([key(n) for n in range(5)]) == [False] * 4 + [True]
    assert get(store, *range(4)) == [True] * 4
    assert lower.contains([key(num_pages), key(num_pages + 3)]) == [False, False]


@evicted
def test_what_makes_room_for_what_is_put_into_host_memory_alone_is_below(store: TieredStore, lower: LowerTier) -> None:
    num_pages = num_pages_of(store)
    for number in range(num_pages):
        store.put_into(host_of(store), [(key(number), value(number))], {})
    lower.await_keys(key(0))


@evicted
def test_the_thread_rests_when_all_that_goes_first_is_below(
    store: TieredStore, lower: LowerTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it takes several turns."""
    monkeypatch.setattr(backfill, "BATCH_BYTES", SIZE)
    num_pages, copies = num_pages_of(store), store._backfill
    assert copies is not None
    for number in range(num_pages):
        put(store, number)
    lower.await_keys(*map(key, range(num_pages // COLD_SHARE)))
    wait_until_true(lambda: not (copies._looks or copies._is_busy), "the thread rests")


@evicted
def test_a_copy_is_no_use_of_what_it_copies(store: TieredStore, lower: LowerTier) -> None:
    for number in range(num_pages_of(store)):
        put(store, number)
    lower.await_keys(key(0))
    assert first_to_go(host_of(store)) == key(0)


@evicted
def test_what_comes_back_from_below_does_not_go_there_again(store: TieredStore, lower: LowerTier) -> None:
    lower.put([(key(1), value(1))])
    assert get(store, 1) == [True]
    assert host_of(store).contains([key(1)]) == [True]
    assert lower.num_puts == 1


@second_use
def test_a_copy_of_what_is_used_again_has_the_terms_that_it_was_read_on(store: TieredStore, lower: LowerTier) -> None:
    put(store, 1, 2)
    terms = Terms(LAST_END, owner=1, quota=4 * SIZE)
    out = [memoryview(bytearray(SIZE)) for _ in range(2)]
    store.read_on_terms([key(1), key(2)], out, lambda index, stop: None, [terms, NO_TERMS].__getitem__)
    lower.await_keys(key(1), key(2))
    assert lower.terms == {key(1): terms}


@evicted
def test_what_goes_from_host_memory_keeps_its_terms_below(store: TieredStore, lower: LowerTier) -> None:
    """It goes for want of its owner's room, while others have a lot."""
    terms = Terms(LAST_END, owner=1, quota=COLD_SHARE * SIZE)
    for number in range(COLD_SHARE):
        store.put_on_terms([(key(number), value(number))], {key(number): terms})
    lower.await_keys(key(0))
    assert lower.terms == {key(0): terms}
    assert lower.contains([key(1)]) == [False]


def host_of(store: TieredStore) -> HostStore:
    host = store.tiers[0].store
    assert isinstance(host, HostStore)
    return host


def num_pages_of(store: TieredStore) -> int:
    own = host_of(store).own
    assert own is not None
    return own.segment.num_pages


def first_to_go(host: HostStore) -> bytes:
    cold: list[Sized] = host.coldest(SIZE)
    return cold[0][0]


def test_recent_keys_are_forgotten_in_time_and_by_place() -> None:
    recent = RecentKeys(num_slots=1)
    assert b"a" not in recent
    recent.add(b"a")
    assert b"a" in recent
    recent.add(b"b")  # the only place
    assert (b"a" in recent, b"b" in recent) == (False, True)
    recent.discard(b"a")
    assert b"b" in recent
    recent.discard(b"b")
    assert b"b" not in recent
    clock = VirtualClock()
    old = RecentKeys(valid_for_s=60.0, now=clock.now)
    old.add(b"a")
    clock.advance(59)
    assert b"a" in old
    clock.advance(1)
    assert b"a" not in old
