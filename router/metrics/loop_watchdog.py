"""Counts and names whatever blocks the event loop. Off by default: it costs two hundred wake-ups a second.

The loop beats four times per threshold. A beat that is late by the threshold counts as a stall, and a thread that looks
at the loop's stack while a beat is overdue gives it a name. If another thread of the process kept the interpreter to
itself, the watching thread could not look either; then the late beat looks at what the other threads are doing.
"""

import asyncio
import logging
import sys
import threading
import time
from collections import Counter
from types import FrameType

from pdkv.base.clock import MONOTONIC
from pdkv.base.log_limit import LogLimit
from pdkv.base.service_thread import ServiceThread
from pdkv.router.generations.timeline import SHORT_S
from pdkv.router.histogram import Histogram

MAX_PLACES = 64
"""The most different names that are counted separately."""

_LOOP_MODULES = {"asyncio.runners", "asyncio.base_events", "asyncio.events", "selectors"}
"""Modules whose frames belong to the loop itself; uvloop has none above asyncio.Runner's."""

logger = logging.getLogger(__name__)


class LoopWatchdog:
    """Watches one event loop. `stalls` counts by (place, kind).

    A place is the innermost function of pdkv that ran. Kinds: "busy": one callback that computed; "crowd": many
    callbacks in a row; "threads": other threads of this process computed instead, and the place is one of theirs;
    "waiting": a callback waited for something other than the loop, or the process got no processor.
    """

    def __init__(self, threshold_s: float) -> None:
        self.threshold_s = threshold_s
        self.stalls: Counter[tuple[str, str]] = Counter()
        self.lag = Histogram(SHORT_S)
        self.longest_s = 0.0
        self._period_s = threshold_s / 4
        self._due = 0.0
        self._cpu = self._process_cpu = 0.0
        self._samples: list[tuple[str, object]] = []  # since the last beat: place, and the callback's frame
        self._loop_thread = 0
        self._thread = ServiceThread(self._watch, lambda: None, "pdkv-loop-watchdog")
        self._handle: asyncio.TimerHandle | None = None
        self._log_limit = LogLimit()

    def start(self) -> None:
        """Watch the running event loop, on whose thread this is called."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._beat_again()
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._handle is not None:
            self._handle.cancel()
        self._thread.stop()

    def _beat_again(self) -> None:
        self._samples.clear()
        self._cpu, self._process_cpu = time.thread_time(), time.process_time()
        self._due = MONOTONIC.now() + self._period_s
        self._handle = self._loop.call_later(self._period_s, self._beat)

    def _beat(self) -> None:
        late_s = MONOTONIC.now() - self._due
        self.lag.observe(max(late_s, 0.0))
        if late_s >= self.threshold_s:
            cpu_s = time.thread_time() - self._cpu
            self._count(late_s, cpu_s, time.process_time() - self._process_cpu - cpu_s)
        self._beat_again()

    def _count(self, late_s: float, cpu_s: float, others_cpu_s: float = 0.0) -> None:
        """Count a stall in which the loop's thread and the other threads computed for this long."""
        samples = list(self._samples)
        places = Counter(place for place, _ in samples)
        place = places.most_common(1)[0][0] if places else "unknown"
        if cpu_s >= self.threshold_s:
            kind = "crowd" if len({id(callback) for _, callback in samples}) > 1 else "busy"
        elif others_cpu_s >= self.threshold_s:
            kind, place = "threads", self._other_place()
        else:
            kind = "waiting"
        if (place, kind) not in self.stalls and len(self.stalls) >= MAX_PLACES:
            place = "other"
        self.stalls[place, kind] += 1
        self.longest_s = max(self.longest_s, late_s)
        if self._log_limit.passes():
            text = "the event loop was held up for %.0f ms (%.0f ms of CPU) in %s: %s"
            logger.warning(text, late_s * 1e3, cpu_s * 1e3, place, kind)

    def _other_place(self) -> str:
        """The place of a thread that is neither the loop's nor this watchdog's."""
        own = (self._loop_thread, self._thread.ident)
        places = (_own_place(frame) for ident, frame in sys._current_frames().items() if ident not in own)
        return next(filter(None, places), "unknown")

    def _watch(self, stopping: threading.Event) -> None:
        while not MONOTONIC.wait(stopping, MONOTONIC.now() + self._period_s):
            if MONOTONIC.now() - self._due > self._period_s:
                frame = sys._current_frames().get(self._loop_thread)
                sample = _place_of(frame) if frame is not None else None
                if sample is not None:
                    self._samples.append(sample)


def _place_of(innermost: FrameType) -> tuple[str, FrameType] | None:
    """The innermost function of pdkv on a stack, and the frame of its callback, which is unique as long as it is kept;
    None: the loop waits.
    """
    if _module(innermost) in _LOOP_MODULES:
        return None
    outermost = innermost
    # Asked once each: the thread runs on meanwhile, and a frame that has returned no longer has a caller.
    while (caller := outermost.f_back) is not None and _module(caller) not in _LOOP_MODULES:
        outermost = caller
    return _own_place(innermost) or innermost.f_code.co_qualname, outermost


def _own_place(innermost: FrameType) -> str | None:
    """The innermost function of pdkv between a frame and the loop's own; None: there is none."""
    frame: FrameType | None = innermost
    while frame is not None and (module := _module(frame)) not in _LOOP_MODULES:
        if module.split(".")[0] == "pdkv":
            return f"{module.removeprefix('pdkv.')}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
