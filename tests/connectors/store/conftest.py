"""Engines on one faulty store, for the tests of store connectors; other modules make their own."""

from collections.abc import Iterator

import pytest
from store_rig import FaultyStore, Made, MakeEngine, engines


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
