"""Mooncake's store with the master and lenders of its wheel: what they do to values, and what its client may do."""

import dataclasses
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest
from store_servers import MooncakeServer, StoreServer, mooncake_binaries, mooncake_libraries

from pdkv.errors import StoreError, StoreFull, StoreTimeout, StoreUnavailable
from pdkv.kv_store.base import KVStore
from pdkv.kv_store.mooncake_store import MooncakeStore
from pdkv.kv_store.registry import open_store

pytestmark = pytest.mark.processes

Open = Callable[..., KVStore]
MIB = 1 << 20
_WAIT_S = 60


@pytest.fixture(scope="module")
def server() -> Iterator[MooncakeServer]:
    """Made for a busy machine: what stands still for long, lender or reader, loses nothing by that."""
    flags = "--put_start_discard_timeout_sec=1", "--default_kv_lease_ttl=60000"
    with MooncakeServer(32 * MIB, *flags) as running:
        yield running


@pytest.fixture
def store(server: MooncakeServer, open_: Open) -> KVStore:
    return open_(server.url)


def put(store: KVStore, key: bytes, size: int = MIB) -> None:
    store.put([(key, value(key, size))])


def value(key: bytes, size: int = MIB) -> memoryview:
    return memoryview(random.Random(key).randbytes(size))


def get(store: KVStore, key: bytes, size: int = MIB) -> bool:
    out = memoryview(bytearray(size))
    found = store.get([key], [out])[0]
    assert not found or out == value(key, size)
    return found


def until(condition: Callable[[], bool]) -> None:
    """Wait for what other processes do; a failure of the store on the way is none of the test."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        with suppress(StoreError):
            if condition():
                return
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def succeeds(call: Callable[..., object], *arguments: object) -> bool:
    call(*arguments)
    return True


def client_of(store: KVStore) -> "subprocess.Popen[bytes]":
    assert isinstance(store, MooncakeStore)
    process = store._host._process
    assert process is not None
    return process


def test_values_of_a_lender_that_died_are_misses_and_another_takes_its_place(
    open_: Open, key: Callable[[int], bytes]
) -> None:
    with MooncakeServer(16 * MIB, "--client_ttl=2") as server:
        store = open_(server.url)
        until(lambda: succeeds(put, store, key(0)))
        server.lender.kill()
        assert not get(store, key(0))  # whether or not the master knows by then
        until(lambda: store.contains([key(0)]) == [False])
        with pytest.raises(StoreFull, match="full, or nothing is"):
            put(store, key(1))
        server.lender.start()
        until(lambda: succeeds(put, store, key(1)) and get(store, key(1)))


def test_a_lender_that_stands_still_is_a_timeout(
    server: MooncakeServer, open_: Open, key: Callable[[int], bytes]
) -> None:
    """The values of others are read meanwhile, and its own when it goes on or are gone."""
    store = open_(server.url, operation_timeout_s="0.5")
    until(lambda: succeeds(put, store, key(0)))
    with server.lender.stopped():
        with pytest.raises(StoreTimeout):
            get(store, key(0))
        until(lambda: store.contains([key(0)]) == [True])
    until(lambda: succeeds(put, store, key(1)) and get(store, key(1)))


def test_full_is_said_and_what_is_old_goes(server: MooncakeServer, store: KVStore, key: Callable[[int], bytes]) -> None:
    """More than there is room for: no put that fails leaves anything, no value is another's."""
    refused = []
    for number in range(48):
        try:
            put(store, key(number))
        except StoreFull:
            refused.append(number)
    with pytest.raises(StoreFull):
        put(store, key(1000), 33 * MIB)
    there = store.contains([key(number) for number in range(48)])
    assert 10 < sum(there) <= 32
    assert not any(there[number] for number in refused)
    assert not get(store, key(1000), 33 * MIB)
    assert [get(store, key(number)) for number in range(48)] == there, "looking a key up keeps its value"
    store.delete([key(number) for number in range(48)])


def test_a_client_that_is_killed_is_replaced(server: MooncakeServer, open_: Open, key: Callable[[int], bytes]) -> None:
    """Whether it idles or has a call: nothing is raised, and its successor finds the value. On a busy machine the first
    transfer may fail, which is a miss.
    """
    store = open_(server.url, operation_timeout_s="60")
    until(lambda: succeeds(put, store, key(0)) and get(store, key(0)))  # it is not evicted for a while
    client_of(store).kill()
    client_of(store).wait()
    get(store, key(0))
    until(lambda: get(store, key(0)))
    client_of(store).send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(get, store, key(0))
        client_of(store).kill()
        reading.result()
    until(lambda: get(store, key(0)))


def test_a_client_that_dies_as_it_is_given_a_connection_is_replaced(
    server: MooncakeServer, open_: Open, key: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sockets are closed before it can be waited for."""
    store = open_(server.url, operation_timeout_s="60")
    until(lambda: succeeds(put, store, key(0)))
    first = client_of(store)
    first.kill()
    first.wait()
    monkeypatch.setattr(first, "poll", lambda: None)
    store.contains([key(0)])
    assert client_of(store) is not first


def test_a_client_that_dies_with_a_connection_in_its_queue_is_replaced(
    server: MooncakeServer, open_: Open, key: Callable[[int], bytes]
) -> None:
    store = open_(server.url, operation_timeout_s="60")
    assert isinstance(store, MooncakeStore)
    until(lambda: succeeds(put, store, key(0)))
    first, control = client_of(store), store._host._control
    store._pool._drop_idle()
    store._host._control, queue = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ThreadPoolExecutor(1) as pool, closing(control), queue:
        pool.submit(lambda: (select.select([queue], [], []), queue.close()))
        store.contains([key(0)])
    assert client_of(store) is not first


def test_a_writer_killed_in_mid_value_leaves_nothing_visible(
    server: MooncakeServer, store: KVStore, open_: Open, key: Callable[[int], bytes]
) -> None:
    """F10: half a value is never found, and the key can be put when the master has given it up."""
    writer = open_(server.url, operation_timeout_s="0.5")
    until(lambda: succeeds(put, writer, key(0)))
    with server.lender.stopped():
        with pytest.raises(StoreTimeout):
            put(writer, key(1))
        client_of(writer).kill()
    assert store.contains([key(1)]) == [False]
    assert not get(store, key(1))
    until(lambda: succeeds(put, store, key(1)) and get(store, key(1)))


@pytest.mark.slow
def test_a_client_of_which_many_calls_hang_is_replaced(
    open_: Open, key: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that passed its deadline holds a thread of the client and an arena for as long as the library likes."""
    with MooncakeServer(16 * MIB) as server, ThreadPoolExecutor(16) as pool:
        store = open_(server.url)
        until(lambda: succeeds(put, store, key(0)))
        first = client_of(store)
        with server.lender.stopped(), monkeypatch.context() as hurry:  # what must succeed has a minute
            short = dataclasses.replace(store.options, operation_timeout_s=1.0)  # type: ignore[attr-defined]
            hurry.setattr(store, "options", short)
            until(lambda: first.poll() is not None or any(pool.map(lambda _: get(store, key(0)), range(16))))
        assert first.wait(_WAIT_S) == 0
        until(lambda: get(store, key(0)))
        assert client_of(store) is not first


def test_a_server_of_something_else_is_unavailable(server: MooncakeServer, open_: Open) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):  # the test is over
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(ConnectionError):
                        connection.sendall(b"HTTP/1.1 400 Bad\r\n\r\n" * 3)
                        connection.recv(1024)

        thread = threading.Thread(target=serve)
        thread.start()
        store = open_(f"mooncake://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(StoreUnavailable, match="does not answer as Mooncake's master does"):
            store.contains([b"key"])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(_WAIT_S)


def test_a_library_that_cannot_be_loaded_is_named_and_not_tried_again(
    server: MooncakeServer, open_: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine without RDMA's user space, which this one may have."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise ImportError('libibverbs.so.1: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    store = open_(server.url)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"libibverbs.so.1: cannot open, .*: apt install libibverbs1"):
            store.contains([b"key"])
        monkeypatch.delenv("PYTHONPATH", raising=False)


ENGINE = """
import sys
from pdkv.kv_store.registry import open_store
store = open_store(sys.argv[1], {"operation_timeout_s": "60"})
store.contains([b"key"])
print(store._host._process.pid, flush=True)
sys.stdin.readline()
"""


def test_the_client_ends_with_its_engine(server: MooncakeServer) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-P", "-c", ENGINE, server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    pid = int(engine.stdout.readline())
    pidfd = os.pidfd_open(pid)
    engine.kill()
    engine.communicate()
    with closing(os.fdopen(pidfd)):
        ended, _, _ = select.select([pidfd], [], [], _WAIT_S)
        assert ended, "it lives on"


@pytest.mark.slow
def test_clients_meet_at_a_metadata_server_too() -> None:
    """As older clusters do, by the master's own HTTP server."""
    directory = mooncake_binaries()
    with mooncake_libraries():
        ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]
        numbers = [port.getsockname()[1] for port in ports]
        for port in ports:
            port.close()
        metadata = f"http://127.0.0.1:{numbers[2]}/metadata"
        master = [
            f"{directory}/mooncake_master", f"--rpc_port={numbers[0]}", f"--metrics_port={numbers[1]}",
            "--enable_http_metadata_server=true", f"--http_metadata_server_port={numbers[2]}", "--logtostderr",
        ]  # fmt: skip
        lender = [
            f"{directory}/mooncake_client", f"--master_server_address=127.0.0.1:{numbers[0]}", "--host=127.0.0.1",
            f"--metadata_server={metadata}", f"--port={numbers[3]}", f"--http_port={numbers[4]}",
            f"--global_segment_size={16 * MIB}", "--logtostderr",
        ]  # fmt: skip
        url = f"mooncake://127.0.0.1:{numbers[0]}"
        with (
            StoreServer(url, master, "admin server started"),
            StoreServer(url, lender, "Starting real client service"),
            open_store(url, {"metadata_server": metadata}) as store,
        ):
            put(store, b"key")
            assert get(store, b"key")
