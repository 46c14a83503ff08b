"""A router's connections to engines where it can open nothing more: none is lost for good."""

import asyncio
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from no_descriptors import no_descriptors
from wire_rig import TIMEOUT_S, Context, Listener, make_card

from pdkv.router.engines import engine_client
from pdkv.router.engines.beats import BeatReader
from pdkv.router.engines.engine_client import EngineClient, make_context
from pdkv.router.http.server import connections

ENGINE = """
import sys
import msgspec
from pdkv.wire.kv import EngineCard
from pdkv.wire.engine_server import EngineServer

server = EngineServer(sys.argv[1], msgspec.msgpack.decode(bytes.fromhex(sys.argv[2]), type=EngineCard))
while True:
    server.poll(None)
    list(server.receive())
"""


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """Of an engine in a process of its own, so that this one's descriptors are the router's."""
    endpoint = f"ipc://{tmp_path}/engine"
    card = msgspec.msgpack.encode(make_card()).hex()
    with subprocess.Popen([sys.executable, "-c", ENGINE, endpoint, card]) as engine:
        yield endpoint
        engine.kill()


def test_a_router_has_sockets_for_thousands_of_engines() -> None:
    """By ZeroMQ's default the 257th engine could not be connected: each has four sockets."""
    with make_context() as context:
        assert context.get(zmq.MAX_SOCKETS) >= 4 * 10_000


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_an_engine_is_connected_again_after_descriptors_ran_out(endpoint: str, context: Context) -> None:
    """F44: the attempt that failed was the last one, and the engine was lost until the router's restart."""
    listener = Listener()
    client = EngineClient("decode-0", endpoint, router_id="r", context=context)
    with no_descriptors():
        client.connect(listener)
        assert client._reconnect is not None
    await listener.until(lambda: len(listener.cards) == 1)
    client._lost("the test says so")
    assert client._reconnect is not None
    client._reconnect.cancel()
    with no_descriptors():
        client._open()
    await listener.until(lambda: len(listener.cards) == 2)
    client.close()


def connect_with(num_free: int, client: EngineClient, listener: Listener) -> bool:
    """Connect a client where so many descriptors are left; whether that failed."""
    highest, limits = max(map(int, os.listdir("/proc/self/fd"))), resource.getrlimit(resource.RLIMIT_NOFILE)
    holes = [os.open("/dev/null", os.O_RDONLY) for _ in range(highest + 1 - num_open())]
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + num_free, limits[1]))
    try:
        client.connect(listener)
        return client._socket is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for hole in holes:
            os.close(hole)


async def test_an_attempt_that_gets_some_descriptors_keeps_none_of_them(
    endpoint: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket may come into being, and its monitor may not."""
    monkeypatch.setattr(engine_client, "RECONNECT_S", 1e6)
    context.socket(zmq.PAIR).close()  # the context has its own descriptors
    failed = []
    for num_free in range(5):
        before, client = num_open(), EngineClient("decode-0", endpoint, router_id="r", context=context)
        failed.append(connect_with(num_free, client, Listener()))
        if not failed[-1]:
            client.close()
        async with asyncio.timeout(TIMEOUT_S):
            while num_open() > before:  # the context's thread closes sockets
                await asyncio.sleep(0)
        client.close()
    assert failed[:2] == [True, True]  # else there is nothing to see


async def test_beats_are_subscribed_to_again_after_descriptors_ran_out(
    endpoint: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beats that were expected and never came made the engine a suspect for ever."""
    num_failed = 0

    def fail_twice(*args: Any) -> BeatReader:
        nonlocal num_failed
        if num_failed < 2:
            num_failed += 1
            raise zmq.ZMQError(errno.EMFILE)
        return BeatReader(*args)

    monkeypatch.setattr(engine_client, "BeatReader", fail_twice)
    listener = Listener()
    client = EngineClient("decode-0", endpoint, router_id="r", context=context)
    client.connect(listener)
    await listener.until(lambda: bool(listener.beats))
    client.close()


async def test_an_engine_takes_no_more_descriptors_than_are_kept_for_it(endpoint: str, context: Context) -> None:
    context.socket(zmq.PAIR).close()  # the context has its own descriptors
    before = num_open()
    listener = Listener()
    client = EngineClient("decode-0", endpoint, router_id="r", context=context)
    client.connect(listener)
    await listener.until(lambda: bool(listener.beats))
    assert num_open() - before <= connections._RESERVED_PER_ENGINE
    client.close()
