"""What survives a whole collection is looked at again when the router is idle; then cycles that died are freed."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from pdkv.router.garbage import MAX_FROZEN_S, ShortCollections


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.itself = self


class Router:
    """What the collections ask."""

    def __init__(self) -> None:
        self.running, self.begun, self.now = 1, 1, 0.0
        self.collections = ShortCollections(lambda: (self.running, self.begun), lambda: self.now)

    def run(self) -> None:
        """Start it, in a loop that is over at once: its timer is called by hand."""

        async def main() -> None:
            gc.freeze()
            self.collections.start()

        asyncio.run(main())


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router()
    yield router
    router.collections.close()
    router.collections.close()
    gc.unfreeze()


def test_survivors_are_not_looked_at_again(router: Router) -> None:
    router.run()
    frozen = gc.get_freeze_count()
    nodes = [Node() for _ in range(1000)]
    gc.collect()
    assert gc.get_freeze_count() >= frozen + 1000
    assert not any(found is nodes[0] for found in gc.get_objects(generation=2))


def test_cycles_that_died_are_freed_when_nothing_runs(router: Router) -> None:
    router.run()
    node = Node()
    died = weakref.ref(node)
    gc.collect()
    del node
    gc.collect()
    router.collections.look()
    assert died() is not None, "a request runs"
    router.running, router.begun = 0, 2
    router.collections.look()
    assert died() is not None, "one has begun since the last look, and ended"
    router.collections.look()
    assert died() is None
    assert gc.get_freeze_count() > 1000, "what survived is frozen again"


def test_a_router_that_is_never_idle_looks_at_everything_by_and_by(router: Router) -> None:
    router.run()
    node = Node()
    died = weakref.ref(node)
    gc.collect()
    del node
    for now in (1.0, MAX_FROZEN_S):
        router.now = now
        router.collections.look()
        assert died() is not None
    router.now = MAX_FROZEN_S + 1.0
    router.collections.look()
    assert died() is None
