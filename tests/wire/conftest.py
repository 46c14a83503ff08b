"""Fixtures of the wire's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from wire_rig import KEY, Context, make_card

from pdkv.wire.engine_server import EngineServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EngineServer]:
    server = EngineServer(f"ipc://{tmp_path}/e", make_card())
    yield server
    server.close()


@pytest.fixture
def keyed_server() -> Iterator[EngineServer]:
    """For routers that have KEY."""
    server = EngineServer("tcp://127.0.0.1:0", make_card(), key=KEY)
    yield server
    server.close()


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)
