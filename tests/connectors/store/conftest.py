"""Engines on one faulty store, for the tests of store connectors; other modules make their own."""

from collections.abc import Iterator

import pytest
from store_rig import FaultyStore, Made, MakeEngine, engines


@pytest.fixture(autouse=True)
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what lies in pieces as small as those of the rig's pools is read straight into them."""
    monkeypatch.setattr("pdkv.connectors.transfer.units.LEAST_PLACE_BYTES", 4 << 10)


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
