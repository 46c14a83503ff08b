"""Engines on one faulty store, for the tests of store connectors; other modules make their own."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache

import pytest
from store_rig import FaultyStore, Made, MakeEngine, engines
from store_servers import SERVERS, SharedServer


@pytest.fixture(autouse=True)
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what lies in pieces as small as those of the rig's pools is read straight into them."""
    monkeypatch.setattr("pdkv.connectors.transfer.units.LEAST_PLACE_BYTES", 4 << 10)


@pytest.fixture(scope="session")
def shared_server() -> Iterator[SharedServer]:
    """shared_server(kind): one of `SERVERS` that no test kills; each uses keys of its own."""
    with ExitStack() as running:
        yield cache(lambda kind: running.enter_context(SERVERS[kind]()))


@pytest.fixture
def made() -> Iterator[Made]:
    with engines() as pair:
        yield pair


@pytest.fixture
def store(made: Made) -> FaultyStore:
    return made[0]


@pytest.fixture
def make(made: Made) -> MakeEngine:
    return made[1]
