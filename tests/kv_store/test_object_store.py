"""Object stores: what their servers have no part in."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
from bare_s3 import bare_s3
from no_threads import no_threads

from pdkv.errors import StoreUnavailable

pytest.importorskip("obstore")
from pdkv.kv_store.memory_store import MemoryStore
from pdkv.kv_store.object_store import ObjectStore, _LoopThread
from pdkv.kv_store.registry import open_store
from pdkv.kv_store.tiers import TieredStore

WAIT_S = 20.0


async def nothing() -> None:
    pass


def test_a_call_that_is_queued_when_the_store_is_closed_ends() -> None:
    """The loop has not begun it yet."""
    loop, may_go_on, errors = _LoopThread(), threading.Event(), []
    loop.run(nothing(), "closed")
    assert loop._loop is not None
    loop._loop.call_soon_threadsafe(may_go_on.wait, WAIT_S)

    def call() -> None:
        try:
            loop.run(asyncio.sleep(1000), "closed")
        except StoreUnavailable as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    while not loop._num_calls:
        threading.Event().wait(0.001)
    loop.close()
    may_go_on.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert errors == ["closed"]


def test_where_there_is_no_thread_a_call_fails_and_the_next_one_gets_one() -> None:
    """It waited for the first one's, without a deadline."""
    loop = _LoopThread()
    with no_threads(), pytest.raises(StoreUnavailable, match="no thread for pdkv-objects: can't start new thread"):
        loop.run(nothing(), "closed")
    loop.run(nothing(), "closed")
    loop.close()


def test_a_process_ends_though_a_thread_of_obstore_is_still_handing_over_a_result() -> None:
    """Held up there on purpose, into the interpreter's end, which is made to take longer: there that thread would be
    ended inside Rust, and the process by SIGABRT.
    """
    script = """if True:
        import asyncio, sys, threading, time
        from pdkv.kv_store.registry import open_store

        wake_up = asyncio.SelectorEventLoop._write_to_self
        is_held_up = threading.Event()

        def wake_up_late(loop):
            is_of_obstore = isinstance(threading.current_thread(), threading._DummyThread)
            if is_of_obstore:
                is_held_up.set()
            wake_up(loop)
            if is_of_obstore:
                time.sleep(0.2)

        class EndsLate:
            def __del__(self, sleep=time.sleep):
                sleep(1)

        sys.ends_late = EndsLate()
        asyncio.SelectorEventLoop._write_to_self = wake_up_late
        print(open_store(sys.argv[1]).contains([b"k"]), is_held_up.is_set())
    """
    with bare_s3() as server:
        ran = subprocess.run([sys.executable, "-P", "-c", script, server.url], stdout=subprocess.PIPE, text=True)
    assert (ran.returncode, ran.stdout.split()) == (0, ["[False]", "True"])


@pytest.fixture
def num_heads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many objects each call has asked for; the requests are made all the same."""
    asked: list[int] = []
    contains = ObjectStore.contains

    def count(store: ObjectStore, keys: Sequence[bytes]) -> list[bool]:
        asked.append(len(keys))
        return contains(store, keys)

    monkeypatch.setattr(ObjectStore, "contains", count)
    return asked


def test_a_long_prefix_is_found_in_few_requests(num_heads: list[int]) -> None:
    keys = [b"%d" % number for number in range(500)]
    with bare_s3() as server, open_store(server.url, {"operation_timeout_s": "60"}) as store:
        assert store.count_prefixes([keys])[0] == 0
        assert num_heads == [8]
        store.put([(key, memoryview(b"value")) for key in keys[:137]])
        assert store.count_prefixes([keys[:137]])[0] == 137
        assert num_heads == [8, 8]
        num_heads.clear()
        assert store.count_prefixes([keys])[0] == 137
        assert sum(num_heads) <= 32


def test_many_prefixes_are_looked_for_at_once(num_heads: list[int]) -> None:
    """What several prompts begin with is asked for once a round."""
    first = [b"%d" % number for number in range(40)]
    chains = [[*first, *(b"%d-%d" % (prompt, number) for number in range(60))] for prompt in range(20)]
    with bare_s3() as server, open_store(server.url, {"operation_timeout_s": "60"}) as store:
        store.put([(key, memoryview(b"value")) for key in [*first, *chains[7][40:], *chains[3][40:45]]])
        assert store.count_prefixes(chains) == [100 if i == 7 else 45 if i == 3 else 40 for i in range(20)]
        assert len(num_heads) <= 4
        assert store.count_prefixes([[], [b"none"], first]) == [0, 0, 40]


def test_below_another_tier_a_bucket_is_asked_for_a_part_of_what_that_lacks(num_heads: list[int]) -> None:
    keys = [b"%d" % number for number in range(100)]
    values = [(key, memoryview(b"value")) for key in keys]
    with bare_s3() as server, TieredStore([MemoryStore("above"), open_store(server.url)]) as store:
        memory, bucket = (tier.store for tier in store.tiers)
        memory.put(values[:20])
        assert store.count_prefixes([keys])[0] == 20
        bucket.put(values)
        num_heads.clear()
        assert store.asks_key_by_key
        assert store.count_prefixes([keys])[0] == 100
        assert num_heads == [8]


def test_values_of_large_models_are_read_eight_at_a_time() -> None:
    """F65: a value of 64 tokens of an 8B model is a little larger than 8 MiB, which was all that could be under way."""
    size, names = (8 << 20) + 64, [b"%d" % number for number in range(8)]
    with bare_s3(reads_at_once=8) as server, open_store(server.url, {"operation_timeout_s": "60"}) as store:
        for name in names:
            store.put([(name, memoryview(name.ljust(size)))])
        out = [memoryview(bytearray(size)) for _ in names]
        assert store.get(names, out) == [True] * 8
        assert all(buffer == name.ljust(size) for name, buffer in zip(names, out, strict=True))
        assert server.most_reads == 8


def test_a_server_without_conditional_puts_is_put_to_without_them(caplog: pytest.LogCaptureFixture) -> None:
    """F66: it answers 501 to the condition that an object is new. Said once; afterwards nothing is asked for twice."""
    items = [(b"%d" % number, memoryview(b"value")) for number in range(20)]
    with bare_s3(has_conditions=False) as server, open_store(server.url, {"operation_timeout_s": "60"}) as store:
        store.put(items[:10])
        refused = server.num_refused
        store.put(items)
        assert store.contains([key for key, _ in items]) == [True] * 20
        assert len(server.objects) == 20
        assert server.num_refused == refused > 0
    assert caplog.text.count("without a condition") == 1
