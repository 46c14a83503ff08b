"""Object stores: what their servers have no part in."""

import asyncio
import threading

import pytest

from pdkv.errors import StoreUnavailable

pytest.importorskip("obstore")
from pdkv.kv_store.object_store import _LoopThread

WAIT_S = 20.0


async def nothing() -> None:
    pass


def test_a_call_that_is_queued_when_the_store_is_closed_ends() -> None:
    """The loop has not begun it yet."""
    loop, may_go_on, errors = _LoopThread(), threading.Event(), []
    loop.run(nothing(), "closed")
    assert loop._loop is not None
    loop._loop.call_soon_threadsafe(may_go_on.wait, WAIT_S)

    def call() -> None:
        try:
            loop.run(asyncio.sleep(1000), "closed")
        except StoreUnavailable as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    while not loop._num_calls:
        threading.Event().wait(0.001)
    loop.close()
    may_go_on.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert errors == ["closed"]
