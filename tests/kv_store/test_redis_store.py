"""What is Redis's own: memory limits, times to live, passwords, errors in the middle of a batch."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from no_descriptors import no_descriptors
from store_servers import RedisServer, impatient

from pdkv.connectors.registry import plan_connector, probe_connector
from pdkv.errors import StoreError, StoreFull, StoreReadOnly, StoreTimeout, StoreUnavailable
from pdkv.kv_store.base import KVStore
from pdkv.kv_store.terms import Terms

if TYPE_CHECKING:
    import redis

Open = Callable[..., KVStore]
MIB = 1 << 20
WAIT_S = 20.0


def items(*names: bytes, size: int = MIB) -> list[tuple[bytes, memoryview]]:
    return [(name, memoryview(name.ljust(size, b"."))) for name in names]


def get(store: KVStore, *names: bytes, size: int = MIB) -> list[bool]:
    out = [memoryview(bytearray(size)) for _ in names]
    found = store.get(names, out)
    assert all(buffer == name.ljust(size, b".") for name, buffer, is_in in zip(names, out, found, strict=True) if is_in)
    return found


@pytest.fixture
def client(redis_url: str) -> Iterator["redis.Redis"]:
    import redis

    with redis.Redis.from_url(redis_url) as client:
        yield client


def test_a_full_server_is_told_and_what_it_took_stays(open_: Open) -> None:
    """F7, F10: no room is an answer; values that were taken before are whole, and the connection goes on."""
    with RedisServer("--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        store = open_(server.url)
        names = [b"%d" % number for number in range(20)]
        with pytest.raises(StoreFull, match="OOM command not allowed"):
            store.put(items(*names))
        found = store.contains(names)
        assert 0 < sum(found) < 20
        assert get(store, *names) == found
        store.delete(names)
        store.put(items(*names[:3]))
        assert get(store, *names[:3]) == [True] * 3


def test_an_engine_without_descriptors_has_a_store_that_is_unavailable(redis_url: str, open_: Open) -> None:
    """redis-py opens a file before the connection: that error was none of a store, as of a defect. Found by a soak."""
    store = open_(redis_url)
    store.put(items(b"a", size=10))
    client = open_(redis_url)  # which has no connection yet
    with no_descriptors(), pytest.raises(StoreUnavailable, match="Too many open files"):
        client.contains([b"a"])
    assert client.contains([b"a"]) == [True]


def test_what_the_server_evicts_is_a_miss(open_: Open) -> None:
    with RedisServer("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru") as server:
        store = open_(server.url)
        names = [b"%d" % number for number in range(20)]
        for name in names:
            store.put(items(name))
        assert 0 < sum(get(store, *names)) < 20


def test_a_time_to_live_goes_with_every_value(redis_url: str, client: "redis.Redis", open_: Open) -> None:
    open_(redis_url, ttl_s="100").put(items(b"mortal", b"mortal too", size=10))
    open_(redis_url).put(items(b"immortal", size=10))
    assert 0 < client.pttl(b"pdkv:mortal") <= 100_000
    assert 0 < client.pttl(b"pdkv:mortal too") <= 100_000
    assert client.pttl(b"pdkv:immortal") == -1


def test_a_value_whose_time_is_over_is_a_miss_and_can_be_put_again(
    redis_url: str, client: "redis.Redis", open_: Open
) -> None:
    store = open_(redis_url, ttl_s="100")
    store.put(items(b"over", size=10))
    client.pexpire(b"pdkv:over", 0)
    assert get(store, b"over", size=10) == [False]
    store.put(items(b"over", size=10))
    assert get(store, b"over", size=10) == [True]


def test_a_value_has_the_earlier_end_of_its_own_and_the_stores(
    redis_url: str, client: "redis.Redis", open_: Open
) -> None:
    now = time.time()
    ends = {b"soon": now + 50, b"late": now + 1e6, b"never": 0, b"far off": 2.0**64 - 4096, b"past": now - 1}
    terms = {name: Terms(int(end)) for name, end in ends.items()}
    for ttl_s, store in ((100, open_(redis_url, ttl_s="100")), (None, open_(redis_url))):
        store.put_on_terms(items(*ends, size=10), terms)
        left = {name: client.pttl(b"pdkv:" + name) for name in ends}
        assert 0 < left[b"soon"] <= 50_000
        assert 0 < left[b"late"] <= (100_000 if ttl_s else 1e9)
        assert left[b"never"] <= 100_000 if ttl_s else left[b"never"] == -1
        assert left[b"far off"] > 0
        assert left[b"past"] == -2, "it is not there"
        store.delete(list(ends))


def test_a_key_of_another_kind_is_an_error_of_that_call(redis_url: str, client: "redis.Redis", open_: Open) -> None:
    store = open_(redis_url)
    client.rpush(b"pdkv:list", b"x")
    store.put(items(b"beside", size=10))
    with pytest.raises(StoreError, match="WRONGTYPE"):
        get(store, b"beside", b"list", b"beside", size=10)
    assert get(store, b"beside", size=10) == [True]
    client.delete(b"pdkv:list")


def test_a_password_is_given_and_never_told(open_: Open) -> None:
    with RedisServer("--requirepass", "right") as server:
        address = server.url.removeprefix("unix://")
        store = open_(f"unix://:right@{address}")
        store.put(items(b"a", size=10))
        assert get(store, b"a", size=10) == [True]
        for url in (f"unix://:wrong@{address}", server.url):
            with pytest.raises(StoreUnavailable) as caught:
                get(open_(url), b"a")
            assert "wrong" not in str(caught.value)


def test_a_database_is_a_number_in_the_url(open_: Open) -> None:
    with RedisServer(tcp=True) as server:
        zero, five = open_(server.url), open_(server.url.removesuffix("/0") + "/5")
        zero.put(items(b"a", size=10))
        assert get(five, b"a", size=10) == [False]
        with pytest.raises(StoreUnavailable, match="DB index"):
            get(open_(server.url.removesuffix("/0") + "/99"), b"a")


def test_only_so_many_bytes_are_asked_for_at_a_time(redis_url: str, client: "redis.Redis", open_: Open) -> None:
    """F22: what the server must buffer for one slow reader is bounded, however large the batch."""
    store = open_(redis_url, max_bytes_in_flight="2MiB")
    names = [b"bounded %d" % number for number in range(50)]
    store.put(items(*names))
    client.config_set("client-output-buffer-limit", "normal 4mb 0 0")  # whoever has more to come is cut off
    try:
        assert get(store, *names) == [True] * 50
    finally:
        client.config_set("client-output-buffer-limit", "normal 0 0 0")
        store.delete(names)


def fail_over(address: Path, server: RedisServer) -> None:
    """From now on new connections to the address lead to that server."""
    address.unlink(missing_ok=True)
    address.symlink_to(server.url.removeprefix("unix://"))


@pytest.mark.parametrize("serves_stale", ["yes", "no"])
def test_after_a_failover_the_next_call_is_the_new_masters(tmp_path: Path, open_: Open, serves_stale: str) -> None:
    """F61: the old master keeps its connections. It answers READONLY to writes, or MASTERDOWN to everything."""
    import redis

    address = tmp_path / "redis"
    with RedisServer() as old, RedisServer() as new:
        fail_over(address, old)
        store = open_(f"unix://{address}")
        store.put(items(b"before", size=10))
        with redis.Redis.from_url(old.url) as client:
            client.config_set("replica-serve-stale-data", serves_stale)
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
        fail_over(address, new)
        store.put(items(b"after", b"later", size=10))
        assert get(store, b"after", b"later", size=10) == [True, True]
        with redis.Redis.from_url(new.url) as client:
            assert client.dbsize() == 2


def test_idle_connections_to_a_server_that_does_not_answer_are_not_tried_one_after_the_other(
    tmp_path: Path, open_: Open
) -> None:
    """F61: an old master that hangs costs one deadline, not one for each connection that there was."""
    address = tmp_path / "redis"
    with RedisServer() as old, RedisServer() as new:
        fail_over(address, old)
        store = open_(f"unix://{address}")
        pool = store._pool  # type: ignore[attr-defined]
        pool.run(lambda outer: pool.run(lambda inner: None, store._deadline()), store._deadline())  # type: ignore[attr-defined]
        assert len(pool._idle) == 2
        with old.stopped():
            fail_over(address, new)
            with impatient(store), pytest.raises(StoreTimeout):
                store.contains([b"a"])
            assert not pool._idle


def test_a_server_that_may_only_be_read_says_so_and_is_read(redis_url: str, client: "redis.Redis", open_: Open) -> None:
    """F62: nothing is wrong with what can be read there."""
    open_(redis_url).put(items(b"there", size=10))
    client.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+get", "+exists")
    reader = open_(redis_url.replace("://", "://reader:secret@"))
    for refused in (lambda: reader.put(items(b"new", size=10)), lambda: reader.delete([b"there"])):
        with pytest.raises(StoreReadOnly, match="NOPERM"):
            refused()
    assert get(reader, b"there", b"new", size=10) == [True, False]
    client.execute_command("ACL", "SETUSER", "reader", "-get")
    with pytest.raises(StoreUnavailable, match="NOPERM"):
        get(reader, b"there", size=10)
    client.execute_command("ACL", "DELUSER", "reader")
    client.delete(b"pdkv:there")


def test_a_replica_is_read_and_takes_no_writes(open_: Open) -> None:
    import redis

    with RedisServer() as server:
        store = open_(server.url)
        store.put(items(b"there", size=10))
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(StoreReadOnly, match="READONLY"):
            store.put(items(b"new", size=10))
        assert get(store, b"there", size=10) == [True]


@pytest.mark.parametrize("tiers", ["", "memory://above,"], ids=["alone", "behind_a_tier"])
def test_a_node_of_a_cluster_is_named_at_the_start(tmp_path: Path, tiers: str) -> None:
    """F63: each key that another node has failed, with the protocol's MOVED for all explanation."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/redis")
        listener.listen()

        def serve() -> None:
            """As a node that has the slot of no key but one."""
            connection, _ = listener.accept()
            with connection:
                while commands := connection.recv(4096).count(b"*"):
                    answers = [b":0", *[b"-MOVED 3999 10.0.0.2:6379"] * (commands - 1)]
                    connection.sendall(b"".join(b"%b\r\n" % answer for answer in answers[:commands]))

        thread = threading.Thread(target=serve)
        thread.start()
        problem = probe_connector(plan_connector("store", {"url": f"{tiers}unix://{tmp_path}/redis"}))
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert "MOVED 3999 10.0.0.2:6379: a node of a Redis Cluster" in problem
