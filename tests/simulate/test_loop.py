"""Virtual time: the order of calls, tasks, and what ends a run."""

import asyncio

import pytest

from pdkv.errors import PdkvError
from pdkv.simulate.loop import VirtualTime


def test_calls_are_made_in_the_order_of_time_and_then_of_number() -> None:
    loop, made = VirtualTime(), []

    async def main() -> None:
        for at, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (3.0, "cancelled")):
            handle = loop.call_at(at, lambda name=name: made.append((loop.time(), name)))
        handle.cancel()
        await asyncio.sleep(5)

    loop.run(main())
    assert made == [(1.0, "a"), (1.0, "b"), (2.0, "c")]
    assert loop.time() == 5.0


def test_a_run_in_which_nothing_is_left_to_happen_fails() -> None:
    loop = VirtualTime()
    with pytest.raises(PdkvError, match="stands still"):
        loop.run(asyncio.wait_for(loop.create_future(), None))


def test_an_error_in_a_call_ends_the_run() -> None:
    loop = VirtualTime()

    async def main() -> None:
        loop.call_later(1.0, lambda: 1 / 0)
        await asyncio.sleep(5)

    with pytest.raises(ZeroDivisionError):
        loop.run(main())
