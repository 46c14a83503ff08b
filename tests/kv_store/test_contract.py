"""What every store does, whatever lies behind it."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from rows import check_each
from store_servers import PATIENT

from pdkv.errors import StoreUnavailable
from pdkv.kv_store.base import PART_BYTES, KVStore, Scattered
from pdkv.kv_store.registry import open_store
from pdkv.kv_store.terms import NO_TERMS

Key = Callable[[int], bytes]
MIB = 1 << 20


def value(number: int, size: int = 3000) -> memoryview:
    return memoryview(random.Random(number).randbytes(size))


def buffers(count: int, size: int = 3000) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in range(count)]


def put(store: KVStore, keys: Sequence[bytes], size: int = 3000) -> None:
    store.put([(key, value(number, size)) for number, key in enumerate(keys)])


@pytest.fixture(scope="module")
def mooncake_store(mooncake_url: str) -> Iterator[KVStore]:
    """Of all tests: each client is a process that takes long to start."""
    with open_store(mooncake_url, PATIENT) as store:
        yield store


@pytest.fixture
def store(store_url: str, open_: Callable[..., KVStore], request: pytest.FixtureRequest) -> KVStore:
    if store_url.startswith("mooncake:"):
        shared: KVStore = request.getfixturevalue("mooncake_store")
        return shared
    return open_(store_url)


def test_what_was_put_is_read_in_one_batch(store: KVStore, key: Key) -> None:
    keys = [key(number) for number in range(20)]
    put(store, keys)
    out = buffers(20)
    assert store.contains(keys) == [True] * 20
    assert store.get(keys, out) == [True] * 20
    assert out == [value(number) for number in range(20)]


def test_a_batch_says_per_key_what_is_there(store: KVStore, key: Key) -> None:
    put(store, [key(0)])
    out = buffers(3)
    keys = [key(1), key(0), key(2)]
    assert store.contains(keys) == [False, True, False]
    assert store.get(keys, out) == [False, True, False]
    assert out[1] == value(0)


def test_how_many_keys_in_a_row_are_there(store: KVStore, key: Key) -> None:
    put(store, [key(number) for number in range(13)], 100)

    def check(num_asked: int) -> None:
        keys = [key(number) for number in range(num_asked)]
        assert store.count_prefixes([keys])[0] == min(num_asked, 13)
        assert store.count_prefixes([[key(1000), *keys]])[0] == 0

    check_each([0, 1, 5, 13, 14, 30, 200], check)


def test_values_come_straight_into_several_buffers_where_a_store_can_do_that(store: KVStore, key: Key) -> None:
    """It tells how far they are; what it does not find so is there for the other reads."""
    size = PART_BYTES + 5000
    put(store, [key(0), key(1)], size)
    sizes = [1, 4096, 0, 7, PART_BYTES, size - PART_BYTES - 4104]
    keys = [key(1), key(7), key(0), key(0)]
    out = [*(Scattered(*(memoryview(bytearray(n)) for n in sizes)) for _ in range(3)), Scattered(*buffers(1, size - 1))]
    told: dict[int, list[int]] = {index: [] for index in range(4)}

    def arrived(index: int, stop: int) -> None:
        got = b"".join(out[index].stretch(0, stop))
        assert got == value(0 if index == 2 else 1, size)[:stop]
        told[index].append(stop)

    found = store.read_scattered(keys, out, arrived, lambda index: NO_TERMS)
    assert found == [store.can_scatter, False, store.can_scatter, False]
    for index in (0, 2):
        assert not store.can_scatter or told[index] == sorted(told[index])[-2:] == [PART_BYTES, size]
    whole = buffers(1, size)
    assert store.get([key(1)], whole) == [True]
    assert whole[0] == value(1, size)


def test_read_gives_what_get_gives_and_tells_of_bytes_that_are_there(store: KVStore, key: Key) -> None:
    size = 2 * PART_BYTES + 5
    put(store, [key(0), key(1)], size)
    keys, out = [key(1), key(7), key(0)], buffers(3, size)
    expected = [value(1, size), None, value(0, size)]
    told: list[list[int]] = [[], [], []]

    def arrived(index: int, stop: int) -> None:
        wanted = expected[index]
        assert wanted is not None
        assert out[index][:stop] == wanted[:stop]
        told[index].append(stop)

    assert store.read(keys, out, arrived) == [True, False, True]
    assert [out[0], out[2]] == [expected[0], expected[2]]
    for stops in told:
        assert stops == sorted(stops)
        assert not stops or (stops[-1] == size and len(stops) > 1), stops


def test_an_empty_batch_does_nothing(store: KVStore) -> None:
    assert store.contains([]) == []
    assert store.get([], []) == []
    store.put([])
    store.delete([])


def test_values_of_any_size(store: KVStore, key: Key) -> None:
    def check(size: int) -> None:
        keys = [key(2 * size), key(2 * size + 1)]
        put(store, keys, size)
        out = buffers(2, size)
        assert store.get(keys, out) == [True, True]
        assert out == [value(0, size), value(1, size)]

    check_each([0, 1, 511, 512, 16 * 1024 - 1, 16 * 1024, 3 * MIB + 1], check)


def test_a_buffer_of_another_size_is_a_miss_and_harms_nothing(store: KVStore, key: Key) -> None:
    def check(size: int) -> None:
        keys = [key(2 * size), key(2 * size + 1)]
        put(store, keys)
        out = [*buffers(1, size), *buffers(1)]
        assert store.get(keys, out) == [False, True]
        assert out[1] == value(1)
        assert store.get(keys[:1], buffers(1)) == [True]

    check_each([0, 2999, 3001, MIB], check)


def test_a_key_that_exists_is_left_as_it_is(store: KVStore, key: Key) -> None:
    put(store, [key(0)])
    store.put([(key(0), value(7)), (key(1), value(8))])
    out = buffers(2)
    assert store.get([key(0), key(1)], out) == [True, True]
    assert out == [value(0), value(8)]


def test_a_deleted_key_is_gone_and_can_be_put_again(store: KVStore, key: Key) -> None:
    put(store, [key(0), key(1)])
    store.delete([key(0), key(5)])
    assert store.contains([key(0), key(1)]) == [False, True]
    assert store.get([key(0)], buffers(1)) == [False]
    assert store.get([key(0)], buffers(1, 0)) == [False]
    store.put([(key(0), value(9))])
    out = buffers(1)
    assert store.get([key(0)], out) == [True]
    assert out[0] == value(9)


def test_the_buffers_belong_to_the_caller_after_put(store: KVStore, key: Key) -> None:
    """F9: what is written into them later does not reach the store."""
    source = bytearray(value(0))
    store.put([(key(0), memoryview(source))])
    source[:] = bytes(len(source))
    out = buffers(1)
    assert store.get([key(0)], out) == [True]
    assert out[0] == value(0)


def test_keys_are_bytes_of_any_kind_and_length(store: KVStore, key: Key) -> None:
    keys = [key(0) + tail for tail in (b"", b"\r\n$5\r\n", b"\0", b" ", b"/../x", bytes(range(256)))]
    put(store, keys)
    out = buffers(len(keys))
    assert store.get(keys, out) == [True] * len(keys)
    assert out == [value(number) for number in range(len(keys))]


def test_a_batch_passes_a_bound_in_flight_of_which_it_is_many_times(
    store_url: str, open_: Callable[..., KVStore], key: Key
) -> None:
    """F7, F22: a bounded part of a batch is under way at a time, and the batch goes on."""
    store = open_(
        store_url, **({"max_bytes_in_flight": "2MiB"} if "://127" in store_url or "unix" in store_url else {})
    )
    keys = [key(number) for number in range(24)]
    source = value(3, MIB)
    store.put([(one, source) for one in keys])
    out = buffers(24, MIB)
    assert store.get(keys, out) == [True] * 24
    assert all(buffer == source for buffer in out)
    store.delete(keys)


def test_threads_share_a_store(store: KVStore, key: Key) -> None:
    everyone = threading.Barrier(6)

    def work(worker: int) -> list[bool]:
        keys = [key(100 * worker + number) for number in range(10)]
        everyone.wait(timeout=20)
        store.put([(one, value(worker, 70_000)) for one in keys])
        out = buffers(10, 70_000)
        return [*store.get(keys, out), *(buffer == value(worker, 70_000) for buffer in out)]

    with ThreadPoolExecutor(6) as threads:
        assert all(all(found) for found in threads.map(work, range(6)))


def test_two_stores_at_one_place_see_the_same_values(store_url: str, open_: Callable[..., KVStore], key: Key) -> None:
    writer, reader = open_(store_url), open_(store_url)
    put(writer, [key(0)])
    out = buffers(1)
    assert reader.contains([key(0)]) == [True]
    assert reader.get([key(0)], out) == [True]
    assert out[0] == value(0)


def test_another_process_finds_what_was_put(store_url: str, store: KVStore, key: Key) -> None:
    """F8: keys mean the same in a process with another hash seed."""
    if store_url.startswith(("memory://", "rediss://", "redis://")):
        pytest.skip("memory of one process, or names as at another address")
    put(store, [key(0)])
    script = (
        "import sys; from pdkv.kv_store.registry import open_store; out = memoryview(bytearray(3000))\n"
        "print(open_store(sys.argv[1]).get([bytes.fromhex(sys.argv[2])], [out]), bytes(out).hex())"
    )
    reply = subprocess.run(
        [sys.executable, "-P", "-c", script, store_url, key(0).hex()],
        env={**os.environ, "PYTHONHASHSEED": "12345"}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    assert reply.stdout.split() == ["[True]", value(0).hex()]


def test_a_closed_store_says_so(store_url: str, open_: Callable[..., KVStore], key: Key) -> None:
    store = open_(store_url)
    store.close()
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.get([key(0)], buffers(1))
    with pytest.raises(StoreUnavailable, match="closed"):
        store.put([(key(0), value(0))])
