"""Several stores as one: what a slower one had, what a failing one costs."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from no_threads import no_threads
from store_servers import RedisServer, impatient
from traffic import wait_until_true

from pdkv.errors import StoreError, StoreFull, StoreReadOnly, StoreTimeout, StoreUnavailable
from pdkv.kv_store.base import Held, Item, Scattered
from pdkv.kv_store.file_store import FileStore
from pdkv.kv_store.host_store import HostStore
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.redis_store import RedisStore
from pdkv.kv_store.terms import NO_TERMS, Terms
from pdkv.kv_store.tier import Rest, Tier
from pdkv.kv_store.tiers import LATE_S, TieredStore
from pdkv.testing import VirtualClock

if TYPE_CHECKING:
    from redis import Redis

SIZE = 1000
KEYS = [b"a", b"b", b"c"]


def items(*keys: bytes) -> list[tuple[bytes, memoryview]]:
    return [(key, memoryview(key * SIZE)) for key in keys]


def get(store: TieredStore, *keys: bytes) -> list[bool]:
    out = [memoryview(bytearray(SIZE)) for _ in keys]
    found = store.get(keys, out)
    assert all(buffer == key * SIZE for key, buffer, is_in in zip(keys, out, found, strict=True) if is_in)
    return found


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def tiers(server: RedisServer, tmp_path: Path) -> Iterator[TieredStore]:
    """Memory, Redis, files. What failed rests until the end of the test."""
    redis = RedisStore(server.url, StoreOptions(operation_timeout_s=20, connect_timeout_s=20))
    with TieredStore([MemoryStore("tiers"), redis, FileStore(tmp_path)], retry_after_s=1000) as store:
        yield store


def test_a_put_goes_to_all_tiers(tiers: TieredStore) -> None:
    tiers.put(items(*KEYS))
    assert [tier.store.contains(KEYS) for tier in tiers.tiers] == [[True] * 3] * 3


def test_what_is_scattered_comes_from_the_first_tier_alone(server: RedisServer, tmp_path: Path) -> None:
    """Hits are counted as those of any read; of a tier that fails nothing is found."""
    files = FileStore(tmp_path)
    with TieredStore([files, RedisStore(server.url)]) as store, TieredStore([RedisStore(server.url), files]) as other:
        store.put(items(*KEYS))
        files.delete([b"b"])
        out = [Scattered(memoryview(bytearray(1)), memoryview(bytearray(SIZE - 1))) for _ in KEYS]
        found = store.read_scattered(KEYS, out, lambda index, stop: None, lambda index: NO_TERMS)
        assert found == [True, False, True]
        assert [b"".join(value.buffers) for value in (out[0], out[2])] == [b"a" * SIZE, b"c" * SIZE]
        assert store.count_tiers()["0-file"].hits == 2
        assert store.can_scatter
        assert not other.can_scatter
        files.close()
        found = store.read_scattered(KEYS, out, lambda index, stop: None, lambda index: NO_TERMS)
        assert found == [False] * 3
        assert store.tiers[0].failures["store_unavailable"] == 1
        assert store.read_scattered(KEYS, out, lambda index, stop: None, lambda index: NO_TERMS) == [False] * 3
        assert store.tiers[0].failures["store_unavailable"] == 1, "it rests"


def test_each_tier_is_asked_for_what_is_still_missing(tiers: TieredStore) -> None:
    memory, server, files = (tier.store for tier in tiers.tiers)
    memory.put(items(b"a"))
    server.put(items(b"a", b"b"))
    files.put(items(b"c"))
    assert tiers.contains([*KEYS, b"d"]) == [True, True, True, False]
    assert get(tiers, *KEYS, b"d") == [True, True, True, False]
    assert [tier.num_hits for tier in tiers.tiers] == [1, 1, 1]


def test_a_hit_in_a_slower_tier_is_copied_into_the_faster_ones(tiers: TieredStore) -> None:
    tiers.tiers[2].store.put(items(*KEYS))
    assert get(tiers, b"a", b"c") == [True, True]
    assert [tier.store.contains(KEYS) for tier in tiers.tiers[:2]] == [[True, False, True]] * 2
    assert get(tiers, b"a", b"c") == [True, True]
    assert [tier.num_hits for tier in tiers.tiers] == [2, 0, 2]
    told = {name: (tier.hits, tier.failures, tier.held) for name, tier in tiers.count_tiers().items()}
    assert told == {"0-memory": (2, 0, Held()), "1-redis": (0, 0, Held()), "2-file": (2, 0, Held())}


def test_copies_into_faster_tiers_keep_their_end_and_are_in_the_readers_room(tiers: TieredStore) -> None:
    memory, server, files = (tier.store for tier in tiers.tiers)
    files.put(items(*KEYS))
    end = int(time.time()) + 1000
    out = [memoryview(bytearray(SIZE)) for _ in KEYS]
    terms = [Terms(end, owner=1, quota=SIZE), NO_TERMS, Terms(1, owner=1, quota=SIZE)]
    assert tiers.read_on_terms(KEYS, out, lambda index, stop: None, terms.__getitem__) == [True] * 3
    assert memory.contains(KEYS) == server.contains(KEYS) == [True, True, False], "what is over is not copied"
    assert isinstance(server, RedisStore)
    with redis_client(server) as client:
        assert 0 < client.pttl(b"pdkv:a") <= 1_000_000
        assert client.pttl(b"pdkv:b") == -1
    files.put(items(b"d"))
    assert tiers.read_on_terms([b"d"], out[:1], lambda index, stop: None, lambda index: terms[0]) == [True]
    assert memory.contains([*KEYS, b"d"]) == [False, True, False, True], "the quota is the reader's"


def redis_client(store: RedisStore) -> "Redis":
    import redis

    return redis.Redis(connection_pool=redis.ConnectionPool(store._connection_class, **store._arguments))


def test_terms_of_what_is_put_reach_every_tier(tiers: TieredStore) -> None:
    end = int(time.time()) + 1000
    tiers.put_on_terms(
        items(*KEYS), {b"a": Terms(end), b"b": Terms(owner=1, quota=SIZE), b"c": Terms(owner=1, quota=1)}
    )
    memory, server, files = (tier.store for tier in tiers.tiers)
    assert server.contains(KEYS) == files.contains(KEYS) == [True] * 3
    assert memory.contains(KEYS) == [False, False, False], "the batch begins with its last value, which does not fit"
    assert tiers.tiers[0].failures == {"store_full": 1}
    assert isinstance(server, RedisStore)
    with redis_client(server) as client:
        assert [client.pttl(b"pdkv:" + key) > 0 for key in KEYS] == [True, False, False]


def test_a_full_fast_tier_does_not_hinder(tmp_path: Path) -> None:
    """F7: a value that one tier has no room for is in the next."""
    with TieredStore([MemoryStore("small", SIZE - 1), FileStore(tmp_path)]) as store:
        store.put(items(*KEYS))
        assert get(store, *KEYS) == [True] * 3
        assert store.tiers[0].failures == {"store_full": 2}  # the put, and the promotion
        assert store.tiers[0].store.contains(KEYS) == [False] * 3


def test_a_dead_tier_costs_nobody_a_hit_and_is_counted(tiers: TieredStore, server: RedisServer) -> None:
    """F13: what is lost with a tier is counted, not hidden."""
    server.kill()
    tiers.put(items(*KEYS))
    tiers.tiers[0].store.delete(KEYS)
    assert get(tiers, *KEYS) == [True] * 3
    assert tiers.tiers[1].failures["store_unavailable"] == 1
    assert tiers.tiers[1].failures["skipped"] > 0


def test_a_stopped_tier_is_waited_for_once(tiers: TieredStore, server: RedisServer) -> None:
    with server.stopped(), impatient(tiers.tiers[1].store):
        for _ in range(20):
            assert get(tiers, b"a") == [False]
    assert tiers.tiers[1].failures["store_timeout"] == 1
    assert tiers.tiers[1].failures["skipped"] == 19
    assert {name: counts.failures for name, counts in tiers.count_tiers().items()} == {
        "0-memory": 0, "1-redis": 20, "2-file": 0
    }  # fmt: skip


def test_a_tier_that_is_back_is_used_again(server: RedisServer, tmp_path: Path) -> None:
    told: list[str] = []
    with TieredStore([FileStore(tmp_path), RedisStore(server.url)], retry_after_s=1e-9) as store:
        store.on_problem(lambda: told.append(store.problem))
        server.kill()
        store.put(items(b"a"))
        server.start()
        wait_until_true(lambda: len(told) > 1, "a probe found it")
        assert told[0].startswith("1-redis does not answer: ")
        assert told[1:] == [""]
        store.put(items(b"b"))
        assert store.tiers[1].store.contains([b"a", b"b"]) == [False, True]
        assert store.tiers[1].failures == {"store_unavailable": 1}


def test_if_all_tiers_fail_the_error_is_told(server: RedisServer) -> None:
    options = StoreOptions(operation_timeout_s=0.2, connect_timeout_s=0.2)
    stores = [RedisStore(server.url, options) for _ in range(2)]
    with TieredStore(stores, retry_after_s=1000) as store, server.stopped():
        for error in (StoreTimeout, StoreUnavailable):  # the second time they rest, and nothing is waited for
            with pytest.raises(error):
                get(store, b"a")
    with TieredStore([RedisStore(server.url), RedisStore(server.url)]) as store:
        server.kill()
        with pytest.raises(StoreUnavailable):
            store.put(items(b"a"))
        with pytest.raises(StoreUnavailable):
            store.contains([b"a"])


def test_a_delete_that_a_tier_missed_is_told(tiers: TieredStore, server: RedisServer) -> None:
    tiers.put(items(*KEYS))
    server.kill()
    for message in ("No such file|refused", "was not asked to delete"):
        with pytest.raises(StoreUnavailable, match=message):
            tiers.delete(KEYS)
        assert tiers.tiers[0].store.contains(KEYS) == [False] * 3
        assert tiers.tiers[2].store.contains(KEYS) == [False] * 3


def test_what_only_this_process_has_is_no_successful_put(server: RedisServer) -> None:
    """F10: a hand-off that no other process can read must not be called stored."""
    with TieredStore([MemoryStore("own"), RedisStore(server.url)], retry_after_s=1000) as store:
        store.put(items(*KEYS))
        server.kill()
        for _ in range(2):  # the second one leaves the dead tier alone
            with pytest.raises(StoreUnavailable):
                store.put(items(b"d"))
        assert store.contains(KEYS) == [True] * len(KEYS)


def test_what_is_there_for_all_is_told_from_what_this_process_has(server: RedisServer) -> None:
    redis = RedisStore(server.url)
    with TieredStore([MemoryStore("own"), redis]) as store:
        store.put(items(*KEYS))
        redis.delete(KEYS[:1])
        assert store.contains(KEYS) == [True] * len(KEYS)
        assert store.contains_for_all(KEYS) == [False] + [True] * (len(KEYS) - 1)


def test_reads_of_a_tier_are_measured_by_the_bytes_that_it_had(tiers: TieredStore) -> None:
    tiers.tiers[2].store.put(items(*KEYS))
    assert get(tiers, b"a", b"c") == [True, True]
    reads = {name: tier.read for name, tier in tiers.count_tiers().items()}
    assert [read.num_bytes for read in reads.values()] == [0, 0, 2 * SIZE]
    assert all(read.seconds > 0 for read in reads.values())


class Refusing(MemoryStore):
    """A server whose writes fail with this error, and that counts them."""

    medium = "store"
    num_puts = 0

    def __init__(self, name: str, error: StoreError) -> None:
        super().__init__(name)
        self.error = error

    def put_on_terms(self, items: Sequence[Item], terms: Mapping[bytes, Terms]) -> None:
        self.num_puts += 1
        raise self.error


@pytest.mark.parametrize("error", [StoreReadOnly("a replica"), StoreFull("no room"), StoreTimeout("slow")])
def test_a_tier_that_cannot_be_written_is_read(error: StoreError) -> None:
    """F57: And what would be sent in vain is not sent."""
    name = f"unwritable-{error.code}"
    with MemoryStore(name) as filler, TieredStore([Refusing(name, error)], retry_after_s=1000) as store:
        filler.put(items(b"a"))
        refusing = store.tiers[0].store
        assert isinstance(refusing, Refusing)
        for code in (error.code, StoreUnavailable.code):
            with pytest.raises(StoreError) as raised:
                store.put(items(b"b"))
            assert raised.value.code == code
            assert get(store, b"a") == [True]
        assert refusing.num_puts == 1
        assert not store.problem


def test_a_tier_that_answers_again_meanwhile_has_no_empty_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([StoreTimeout("late"), None])
    with TieredStore([MemoryStore("again")]) as store:
        monkeypatch.setattr(Tier, "away", property(lambda tier: next(answers)), raising=False)
        assert store.problem == "0-memory does not answer: late"
        assert not store.problem


def test_a_rest_doubles_until_a_call_succeeds() -> None:
    rest, lasted = Rest(1.0), []
    for _ in range(8):
        rest.begin(now := rest.until)
        rest.begin(now)  # beside the other one
        lasted.append(rest.until - now)
    assert lasted == [1, 2, 4, 8, 16, 32, 60, 60]
    rest.succeeded()
    rest.begin(now := rest.until)
    assert rest.until - now == 1


def test_a_silent_tier_is_hung_up_on(server: RedisServer) -> None:
    """F55: Whoever waits for it goes on at once, not at the call's deadline."""
    clock, redis = VirtualClock(), RedisStore(server.url, StoreOptions(operation_timeout_s=300))
    with TieredStore([MemoryStore("silent"), redis], clock=clock) as store, ThreadPoolExecutor(1) as pool:
        store.put(items(b"a"))
        with server.stopped():
            call = pool.submit(store.contains, [b"a", b"b"])
            wait_until_true(lambda: store.tiers[1].calls, "it is asked")
            for _ in range(2):  # the call is late, and then the probe
                clock.until_waiting()
                clock.advance(LATE_S)
            assert call.result() == [True, False]
            assert store.problem.startswith("1-redis does not answer: ")
            assert store.contains([b"a", b"b"]) == [True, False]
            store.keep(items(b"c"), {})
        clock.until_waiting()  # until it is asked again
        clock.advance(LATE_S)
        wait_until_true(lambda: not store.problem, "a probe found it")


class Hanging(MemoryStore):
    """A server that answers when it may, and cannot be hung up on."""

    medium = "store"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.may_answer = threading.Event()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        assert self.may_answer.wait(60.0)
        return super().contains(keys)


def test_a_tier_that_cannot_be_hung_up_on_is_left_alone() -> None:
    clock, hanging = VirtualClock(), Hanging("hanging")
    with TieredStore([hanging], clock=clock) as store, ThreadPoolExecutor(1) as pool:
        call = pool.submit(store.contains, [b"a"])
        wait_until_true(lambda: store.tiers[0].calls, "it is asked")
        for _ in range(2):  # the call is late, and then the probe
            clock.until_waiting()
            clock.advance(LATE_S)
        wait_until_true(lambda: store.problem, "it is left alone")
        hanging.may_answer.set()
        call.result()


class Down(MemoryStore):
    """A server that is down until it is up."""

    medium = "store"
    is_up = False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if not self.is_up:
            raise StoreUnavailable("down")
        return super().contains(keys)


def test_a_probe_for_which_there_is_no_thread_is_made_later() -> None:
    """The thread that makes probes ended with it: the store was left alone for good."""
    clock, down = VirtualClock(), Down("down")
    with TieredStore([down], clock=clock) as store:
        with pytest.raises(StoreUnavailable):
            store.contains([b"a"])
        down.is_up = True
        clock.until_waiting()
        with no_threads():
            clock.advance(LATE_S)
            wait_until_true(lambda: "no thread for pdkv-tier-probe" in store.problem, "it is tried")
            clock.until_waiting()
        clock.advance(2 * LATE_S)
        wait_until_true(lambda: not store.problem, "a probe found it")


def test_what_is_kept_reaches_slower_tiers_behind_the_callers_back(server: RedisServer) -> None:
    redis = RedisStore(server.url)
    with TieredStore([MemoryStore("behind"), redis]) as store:
        store.keep(items(*KEYS), {})
        wait_until_true(lambda: redis.contains(KEYS) == [True] * 3, "it is in the slower tier")


def test_what_a_hosts_own_memory_has_is_not_there_for_all(server: RedisServer, tmp_path: Path) -> None:
    """F58: Two hosts that share a Redis: it has evicted what one of them still has."""
    redis = RedisStore(server.url)
    with TieredStore([HostStore(tmp_path, StoreOptions(capacity=1 << 20)), redis], retry_after_s=1000) as store:
        store.put(items(b"a"))
        redis.delete([b"a"])
        assert store.contains([b"a"]) == [True]
        assert store.contains_for_all([b"a"]) == [False]
        server.kill()
        with pytest.raises(StoreUnavailable):
            store.put(items(b"b"))
