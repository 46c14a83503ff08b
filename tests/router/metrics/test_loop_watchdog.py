"""What holds the event loop is counted and named, on the router's kind of loop; what does not, is not."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, cast

import pytest
import uvloop

from pdkv.router.metrics.loop_watchdog import MAX_PLACES, LoopWatchdog, _place_of


def watched(hold: Callable[[LoopWatchdog], None], factory: Callable[[], asyncio.AbstractEventLoop]) -> LoopWatchdog:
    """A watchdog of 20 ms, after `hold` was one callback of its loop."""
    watchdog = LoopWatchdog(0.02)

    async def main() -> None:
        watchdog.start()
        before = watchdog.lag.count
        asyncio.get_running_loop().call_soon(hold, watchdog)
        async with asyncio.timeout(30):
            while watchdog.lag.count < before + 2:
                await asyncio.sleep(0.001)
        watchdog.close()
        watchdog.close()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    return watchdog


def compute(watchdog: LoopWatchdog) -> None:
    """Until the watchdog's thread has seen it, and its threshold of CPU is used up."""
    began, cpu = time.monotonic(), time.thread_time()
    while time.monotonic() < began + 20:
        used = time.thread_time() - cpu > 2 * watchdog.threshold_s
        if used and watchdog._samples and time.monotonic() > began + 0.1:
            return


def wait(watchdog: LoopWatchdog) -> None:
    """A lock that nobody gives up, as a blocking call has it, until the watchdog's thread has seen it."""
    lock = threading.Lock()
    lock.acquire()
    for _ in range(100):
        lock.acquire(timeout=0.1)
        if watchdog._samples:
            return


class Keeper(threading.Thread):
    """Computes until it is told to stop; where it is, is known to the watchdog as pdkv's."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = threading.Event()
        code = "def keep(stop):\n    while not stop():\n        sum(range(1000))\n"
        self._globals: dict[str, Any] = {"__name__": "pdkv.keeper"}
        exec(code, self._globals)

    def run(self) -> None:
        self._globals["keep"](self.stop.is_set)


def test_a_thread_that_keeps_the_interpreter_is_named() -> None:
    keeper = Keeper()

    def wait_for_keeper(watchdog: LoopWatchdog) -> None:
        keeper.start()
        used = time.process_time()
        while time.process_time() - used < 4 * watchdog.threshold_s:
            time.sleep(0.005)  # costs no CPU: the other thread's counts alone

    try:
        watchdog = watched(wait_for_keeper, uvloop.new_event_loop)
        assert watchdog.stalls["keeper.keep", "threads"]
    finally:
        keeper.stop.set()
        keeper.join()


def test_a_stall_in_which_nobody_here_computed_is_no_thread_s() -> None:
    watchdog = LoopWatchdog(0.02)
    watchdog._samples = [("a", 1), ("b", 2)]
    watchdog._count(0.03, 0.001, 0.002)
    assert watchdog.stalls == {("a", "waiting"): 1}


@pytest.mark.parametrize("factory", [uvloop.new_event_loop, asyncio.new_event_loop])
@pytest.mark.parametrize(("hold", "kind"), [(compute, "busy"), (wait, "waiting")])
def test_a_callback_that_holds_the_loop_is_named(
    hold: Callable[[LoopWatchdog], None], kind: str, factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    watchdog = watched(hold, factory)
    found = [(place, k) for place, k in watchdog.stalls if place.endswith(hold.__name__)]
    assert found == [(hold.__qualname__, kind)]
    assert watchdog.longest_s >= watchdog.threshold_s


def test_places_are_bounded() -> None:
    watchdog = LoopWatchdog(0.02)
    for number in range(MAX_PLACES + 10):
        watchdog._samples = [(f"place-{number}", 1)]
        watchdog._count(0.03, 0.03)
    assert len(watchdog.stalls) == MAX_PLACES + 1
    assert watchdog.stalls["other", "busy"] == 10


def test_many_callbacks_in_a_row_are_a_crowd() -> None:
    watchdog = LoopWatchdog(0.02)
    watchdog._samples = [("a", 1), ("b", 2), ("a", 3)]
    watchdog._count(0.03, 0.03)
    assert watchdog.stalls == {("a", "crowd"): 1}


def test_a_stack_that_unwinds_while_it_is_looked_at_is_no_error() -> None:
    class Unwinding:
        """A frame whose caller is there when it is asked for first, and has gone when it is asked for again."""

        f_globals: ClassVar = {"__name__": "pdkv.unwinding"}
        f_code = sys._getframe().f_code

        def __init__(self) -> None:
            self._caller: FrameType | None = sys._getframe()

        @property
        def f_back(self) -> FrameType | None:
            caller, self._caller = self._caller, None
            return caller

    found = _place_of(cast(FrameType, Unwinding()))
    assert found is not None
    assert found[0] == f"unwinding.{sys._getframe().f_code.co_qualname}.<locals>.Unwinding"
