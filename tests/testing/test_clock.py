"""pdkv.testing.VirtualClock beside the machine's clock: the same promises, and no time passes."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.testing import VirtualClock, VirtualLoop, VirtualUvloop
from pdkv.testing import clock as module

Run = Callable[[Callable[[], bool]], Future[bool]]

DAY_S = 86400.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def run() -> Iterator[Run]:
    with ThreadPoolExecutor() as threads:
        yield threads.submit


def test_a_wait_for_an_event_ends_when_the_clock_is_moved_to_its_time(clock: VirtualClock, run: Run) -> None:
    waiting = run(lambda: clock.wait(threading.Event(), clock.now() + DAY_S))
    clock.until_waiting()
    clock.advance(DAY_S - 1)
    assert not waiting.done()
    clock.advance(1)
    assert waiting.result(60) is False


def test_a_wait_for_an_event_ends_with_the_event(clock: VirtualClock, run: Run) -> None:
    event = threading.Event()
    waiting = run(lambda: clock.wait(event, clock.now() + DAY_S))
    clock.until_waiting()
    event.set()
    assert waiting.result(60) is True
    assert clock.now() == 1000.0


def test_a_wait_whose_time_has_come_returns_at_once(clock: VirtualClock) -> None:
    event = threading.Event()
    assert not clock.wait(event, clock.now())
    event.set()
    assert clock.wait(event, clock.now() - 1)


@pytest.mark.parametrize("make", [VirtualClock, lambda: MONOTONIC])
def test_a_condition_that_is_met_ends_its_wait(make: Callable[[], Clock], run: Run) -> None:
    clock, condition, items = make(), threading.Condition(), []

    def wait() -> bool:
        with condition:
            return clock.wait_for(condition, lambda: bool(items), clock.now() + DAY_S)

    waiting = run(wait)
    with condition:
        condition.notify_all()  # of nothing: the wait goes on
    with condition:
        items.append(1)
        condition.notify_all()
    assert waiting.result(60)


def test_a_condition_that_is_not_met_ends_its_wait_at_its_time(clock: VirtualClock, run: Run) -> None:
    condition = threading.Condition()

    def wait() -> bool:
        with condition:
            return clock.wait_for(condition, lambda: False, clock.now() + DAY_S)

    waiting = run(wait)
    clock.until_waiting()
    clock.advance(DAY_S)
    assert waiting.result(60) is False


def test_a_pause_takes_virtual_time(clock: VirtualClock, run: Run) -> None:
    sleeping = run(lambda: clock.sleep(DAY_S) is None)
    clock.until_waiting()
    clock.advance(DAY_S)
    assert sleeping.result(60)


def test_planned_calls_come_in_the_order_of_their_times(clock: VirtualClock) -> None:
    seen = []
    clock.call_at(clock.now() + 3, lambda: seen.append(("late", clock.now())))
    clock.call_at(clock.now() + 2, lambda: seen.append(("first", clock.now())))
    clock.call_at(clock.now() + 2, lambda: seen.append(("second", clock.now())))
    clock.call_at(clock.now() + 2, lambda: seen.append(("never", clock.now()))).cancel()
    clock.advance(2.5)
    assert seen == [("first", 1002.0), ("second", 1002.0)]
    clock.advance(2.5)
    assert seen[2:] == [("late", 1003.0)]
    assert clock.now() == 1005.0


def test_a_planned_call_may_plan_the_next(clock: VirtualClock) -> None:
    times = []

    def tick() -> None:
        times.append(clock.now())
        clock.call_at(clock.now() + 1, tick)

    clock.call_at(clock.now() + 1, tick)
    clock.advance(3)
    assert times == [1001.0, 1002.0, 1003.0]


def test_a_call_planned_on_an_event_loop_is_made_there(clock: VirtualClock) -> None:
    async def plan() -> threading.Thread:
        called = asyncio.Event()
        made_on: list[threading.Thread] = []
        clock.call_at(clock.now() + DAY_S, lambda: (made_on.append(threading.current_thread()), called.set()))
        await asyncio.to_thread(clock.advance, DAY_S)
        await asyncio.wait_for(called.wait(), 60)
        return made_on[0]

    assert asyncio.run(plan()) is threading.current_thread()


def test_the_machines_clock_calls_on_the_loop() -> None:
    async def plan() -> bool:
        called = asyncio.Event()
        MONOTONIC.call_at(MONOTONIC.now(), called.set)
        return await asyncio.wait_for(called.wait(), 60)

    assert asyncio.run(plan())


def test_threads_that_do_not_come_are_said(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REAL_LIMIT_S", 0.01)
    with pytest.raises(TimeoutError, match="0 threads are waiting on this clock, expected 2"):
        clock.until_waiting(2)


@pytest.mark.parametrize("loop_factory", [VirtualLoop, VirtualUvloop])
def test_timers_of_an_event_loop_count_by_the_clock_of_a_test(loop_factory: type[VirtualLoop]) -> None:
    async def main() -> None:
        loop, seen = asyncio.get_running_loop(), []
        assert isinstance(loop, loop_factory)
        began = loop.time()
        loop.call_later(DAY_S, seen.append, "late")
        loop.call_at(began + 1, seen.append, "first")
        loop.call_later(2, seen.append, "never").cancel()
        loop.call_later(0, seen.append, "now")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(DAY_S / 2):
                await loop.clock.passing(asyncio.Event().wait(), DAY_S)
        assert (seen, loop.time()) == (["now", "first"], began + DAY_S / 2)
        with pytest.raises(TimeoutError, match="no end within 60 s of the clock"):
            await loop.clock.passing(asyncio.Event().wait(), within_s=60.0)
        waiting = asyncio.ensure_future(asyncio.sleep(0))
        assert await asyncio.wait({waiting}, timeout=DAY_S) == ({waiting}, set())
        assert await asyncio.to_thread(threading.current_thread) is not threading.current_thread()
        loop.clock.advance(DAY_S / 2)
        assert seen == ["now", "first", "late"]
        really = asyncio.Event()
        loop.call_really_later(0.0, really.set)
        await really.wait()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
