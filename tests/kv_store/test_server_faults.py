"""Servers that stop, die, come back or talk nonsense; writers that are killed in mid-value."""

import contextlib
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from store_servers import LMCacheServer, MooncakeServer, RedisServer, S3Server, StoreServer, hold_port, impatient
from traffic import wait_until_true

from pdkv.errors import StoreTimeout, StoreUnavailable
from pdkv.kv_store.base import KVStore
from pdkv.kv_store.registry import open_store

Open = Callable[..., KVStore]
SIZE = 100_000
_WAIT_S = 20

# Connects, says so, and puts a value that does not fit into the socket's buffers to a server that does not read.
STALLED_WRITER = """
import sys
from pdkv.kv_store.registry import open_store
store = open_store(sys.argv[1])
store.contains([b"key"])
print("connected", flush=True)
sys.stdin.readline()
send = type(store._pool._idle[0]).send
def send_and_say(channel, buffers):
    if sum(len(buffer) for buffer in buffers) > 1 << 20:
        channel._sock.sendmsg([*buffers[:1], memoryview(buffers[1])[: 1 << 20]])
        print("sent", flush=True)
        sys.stdin.readline()
    send(channel, buffers)
type(store._pool._idle[0]).send = send_and_say
store.put([(b"key", memoryview(bytes(50 << 20)))])
"""


SERVERS = ("redis", "redis_tcp", "lmcache", "mooncake", "s3")


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    make = {"redis": RedisServer, "redis_tcp": lambda: RedisServer(tcp=True), "lmcache": LMCacheServer}
    make |= {"mooncake": MooncakeServer, "s3": S3Server}
    with make[request.param]() as running:
        yield running


@pytest.fixture
def store(server: StoreServer, open_: Open) -> KVStore:
    """Only within `impatient` its calls pass their deadline."""
    return open_(server.url)


def put(store: KVStore, key: bytes) -> None:
    store.put([(key, memoryview(key.ljust(SIZE)))])


def get(store: KVStore, key: bytes) -> bool:
    out = memoryview(bytearray(SIZE))
    found = store.get([key], [out])[0]
    assert not found or out == key.ljust(SIZE)
    return found


CALLS: dict[str, Callable[[KVStore], object]] = {
    "contains": lambda store: store.contains([b"a"]),
    "get": lambda store: get(store, b"a"),
    "put": lambda store: put(store, b"new"),
    "put_large": lambda store: store.put([(b"large", memoryview(bytes(50 << 20)))]),
    "delete": lambda store: store.delete([b"a"]),
}


def test_a_call_that_is_hung_up_ends_and_later_ones_are_made(server: StoreServer, open_: Open) -> None:
    """F55: Long before its own deadline. Mooncake's client cannot end one."""
    if isinstance(server, MooncakeServer):
        pytest.skip("its calls are its library's own")
    store = open_(server.url, operation_timeout_s="300")
    put(store, b"a")
    with ThreadPoolExecutor() as pool:
        with server.stopped():
            call = pool.submit(get, store, b"a")

            def is_over() -> bool:
                store.hang_up()  # it may not have begun before
                return call.done()

            wait_until_true(is_over, "it ends")
            assert isinstance(call.exception(), StoreUnavailable)
        assert get(store, b"a")


def test_a_call_behind_the_last_hang_up_is_refused(server: StoreServer, open_: Open) -> None:
    """F55: It would wait for its own deadline: no later hang-up ends it."""
    if isinstance(server, MooncakeServer):
        pytest.skip("its calls are its library's own")
    store = open_(server.url, operation_timeout_s="300")
    put(store, b"a")
    store.hang_up(for_good=True)
    with server.stopped(), pytest.raises(StoreUnavailable):
        get(store, b"a")


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "not_connected"])
def test_a_stopped_server_is_a_timeout_and_works_again_when_it_goes_on(
    server: StoreServer, store: KVStore, connected: bool
) -> None:
    """F7: every call ends by its deadline, whatever it waits for, and the store stays usable."""
    for call in CALLS.values():
        if connected:
            put(store, b"a")
        with server.stopped(), impatient(store), pytest.raises(StoreTimeout):
            call(store)
    store.put([(b"after", memoryview(b"x"))])
    assert store.contains([b"after"]) == [True]


@pytest.mark.parametrize(
    "server",
    [pytest.param(name, marks=pytest.mark.slow) if name == "lmcache" else name for name in SERVERS],  # starts slowly
    indirect=True,
)
def test_a_dead_server_is_unavailable_and_its_restart_is_not_seen_by_its_users(
    server: StoreServer, open_: Open
) -> None:
    """F5: A call under way ends, those of while it is dead are refused, and the next one connects again; what the
    server forgot is a miss.
    """
    store, idle, busy = open_(server.url), open_(server.url), open_(server.url)
    slow = isinstance(server, MooncakeServer)  # its client tries again and again
    for each in (store, idle, busy):
        put(each, b"a")
    with ThreadPoolExecutor(1) as pool, impatient(busy, 1.0 if slow else 60.0):
        with server.stopped():
            call = pool.submit(CALLS["put_large"], busy)
            server.kill()
        assert isinstance(call.exception(), StoreUnavailable)
    try:
        for name in ("get", "put") if slow or isinstance(server, S3Server) else CALLS:
            with (
                impatient(store, 0.5 if slow else 60.0),
                pytest.raises(StoreUnavailable, match=r"refused|No such file"),
            ):
                CALLS[name](store)
    finally:
        server.start()
    for each in (idle, store, busy):
        if each is idle:
            assert not get(each, b"a")
        put(each, b"a")
        assert get(each, b"a")


def test_close_ends_calls_that_wait(server: StoreServer, store: KVStore) -> None:
    put(store, b"a")
    with ThreadPoolExecutor(1) as pool, server.stopped():
        call = pool.submit(CALLS["put_large"], store)
        store.close()
        assert isinstance(call.exception(_WAIT_S), StoreUnavailable)


def test_a_writer_killed_in_mid_value_leaves_nothing_visible(server: StoreServer, store: KVStore) -> None:
    """F10: half a value is never found, and the key can be put afterwards."""
    if isinstance(server, S3Server | MooncakeServer):
        pytest.skip("its requests are its library's own")
    writer = subprocess.Popen(
        [sys.executable, "-P", "-c", STALLED_WRITER, server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    assert writer.stdout.readline() == "connected\n"
    writer.stdin.write("go\n")
    writer.stdin.flush()
    assert writer.stdout.readline() == "sent\n"
    writer.kill()
    writer.communicate(timeout=_WAIT_S)
    out = memoryview(bytearray(50 << 20))
    assert store.contains([b"key"]) == store.get([b"key"], [out]) == [False]
    put(store, b"key")
    assert get(store, b"key")
    store.delete([b"key"])


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad\r\n\r\n" * 3, b"\0" * 64, b"x" * 40_000, b":--5\r\n" * 9, b""], ids=range(5)
)
@pytest.mark.parametrize("scheme", ["redis", "lmcache"])
def test_a_server_of_something_else_is_unavailable(scheme: str, answer: bytes, open_: Open) -> None:
    """F17: garbage is an error of that call."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = open_(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", operation_timeout_s="60")

        def serve() -> None:
            with contextlib.suppress(OSError):  # the test is over
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(ConnectionError):
                        connection.recv(1024)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(StoreUnavailable):
            store.get([b"key"], [memoryview(bytearray(100))])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(_WAIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("scheme", ["redis", "lmcache"])
def test_nobody_there_is_unavailable(scheme: str) -> None:
    with (
        hold_port() as held,
        open_store(f"{scheme}://127.0.0.1:{held.getsockname()[1]}") as store,
        pytest.raises(StoreUnavailable, match="refused"),
    ):
        store.contains([b"key"])


def test_a_host_that_does_not_exist_is_unavailable() -> None:
    with open_store("lmcache://no.such.host.invalid:1") as store, pytest.raises(StoreUnavailable):
        store.contains([b"key"])


def half_a_put(server: StoreServer, header: bytes) -> None:
    """What a foreign client leaves that is shut down in the middle of a value."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(header + b"half")
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1024):
            pass


def test_a_value_that_lmcache_keeps_broken_is_a_miss_and_can_be_put(server: StoreServer, store: KVStore) -> None:
    """F10: the LMCache server keeps the key of half a value, and ends the connection of whoever gets it."""
    if not isinstance(server, LMCacheServer):
        pytest.skip("others keep nothing that is broken")
    from pdkv.kv_store.lmcache_store import PUT, encode_request, value_name

    put(store, b"whole 1")
    put(store, b"whole 2")
    half_a_put(server, encode_request(PUT, value_name(b"broken"), SIZE, (SIZE, 0, 0, 0)))
    keys = [b"whole 1", b"broken", b"whole 2", b"broken"]
    assert store.contains(keys) == [True, False, True, False]
    assert store.get(keys, [memoryview(bytearray(SIZE)) for _ in keys]) == [True, False, True, False]
    assert store.get([b"broken"], [memoryview(bytearray(5))]) == [False]
    put(store, b"broken")
    assert store.contains(keys) == [True] * 4
    assert all(get(store, key) for key in keys)


LMCACHE_SAYS = """
import struct, sys
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.protocol import ClientCommand, ClientMetaMessage, ServerMetaMessage, ServerReturnCode
import torch
meta = ClientMetaMessage.deserialize(bytes.fromhex(sys.argv[1]))
print(meta.command == ClientCommand.PUT, meta.length, meta.fmt == MemoryFormat.BINARY, meta.dtype == torch.uint8,
      tuple(meta.shape), meta.key.to_string(), ClientMetaMessage.packlength())
shape = torch.Size((1, 2, 3, 4))
print(ServerMetaMessage(ServerReturnCode.SUCCESS, 7, MemoryFormat.BINARY, torch.uint8, shape).serialize().hex())
print(int(ClientCommand.GET), int(ClientCommand.EXIST), int(ServerReturnCode.FAIL))
"""


@pytest.mark.slow
def test_our_headers_are_those_of_lmcache() -> None:
    """What its own classes read out of a request, and write as an answer."""
    from pdkv.kv_store import lmcache_store as ours

    request = ours.encode_request(ours.PUT, ours.value_name(b"key"), 123, (123, 0, 0, 0))
    reply = subprocess.run(
        [sys.executable, "-P", "-c", LMCACHE_SAYS, request.hex()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if reply.returncode:
        pytest.skip("lmcache is not installed")
    first, answer, numbers = reply.stdout.splitlines()[-3:]
    assert first == f"True 123 True True (123, 0, 0, 0) {ours.value_name(b'key')} {len(request)}"
    assert ours.decode_answer(bytes.fromhex(answer)) == ours.Answer(ours.SUCCESS, 7, ours.Kind(shape=(1, 2, 3, 4)))
    assert numbers == f"{ours.GET} {ours.EXIST} {ours.FAIL}"
    assert struct.calcsize("9i150s") == len(request)
