"""What tests of NIXL agents share."""

from collections.abc import Iterator

import pytest
from nixl_peer import Listening
from nixl_rig import own_agent


@pytest.fixture
def own() -> Iterator[Listening]:
    """An agent of this process with one region."""
    own = own_agent()
    yield own
    own.close()
