"""Engines whose pools lie in host memory, and on devices."""

from collections.abc import Iterator

import pytest
from shared_memory_rig import Engines, closing_engines
from twin_pools import use_twin_pools


@pytest.fixture(params=["cpu", "cuda"])
def make_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    """With pools in host memory, and on devices."""
    use_twin_pools(monkeypatch)
    with closing_engines(request.param) as engines:
        yield engines
