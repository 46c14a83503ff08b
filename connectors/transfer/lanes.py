"""Threads for blocking I/O: a shared lane served by several threads, and private lanes for peers, made on demand.

Slow or stuck work in one lane does not hold up another. A private lane has one thread, which ends after a while without
work; their number is limited, and further lanes wait.
"""

import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pdkv.base.clock import MONOTONIC
from pdkv.base.service_thread import start_thread
from pdkv.errors import ConfigError, PdkvError, ServerBusy

logger = logging.getLogger(__name__)

Lane = Hashable
SHARED_LANE: Lane = None
"""The lane that `num_shared` threads serve together."""

DEVICE_THREADS = 4
"""Load threads for pools on a device: each waits for it most of the time."""

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class LaneConfig:
    """Numbers of threads and times of IOLanes."""

    num_shared: int = 1  # threads of the shared lane, started at once
    idle_s: float = 30.0  # seconds without work after which a private lane ends
    max_lanes: int = 64  # the most private lanes that run at a time
    thread_name: str = "pdkv-io"


class _Lane(Generic[Item]):
    """A queue and the threads that serve it; None in the queue: check whether to end."""

    def __init__(self, name: Lane) -> None:
        self.name = name
        self.items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self.num_threads = 0
        self.is_busy = False


@dataclass(frozen=True)
class _NoScratch:
    """Stands for the scratch of a thread with a failed `make_scratch`."""

    reason: Exception


class IOLanes(Generic[Item]):
    """Runs items on threads; those of one lane run in order.

    Args:
        run: called with an item and the thread's scratch; must not raise.
        refuse: called instead of `run`, on the same thread, when there is no scratch and why; must not raise.
        make_scratch, close_scratch: per-thread state, made and closed on the thread. If the state cannot be made, the
            next item tries again.
        do_idle_work: a little work for shared threads without an item; False: there is none.
    """

    def __init__(
        self,
        config: LaneConfig,
        run: Callable[[Item, Any], None],
        *,
        refuse: Callable[[Item, Exception], None],
        make_scratch: Callable[[Lane], Any],
        close_scratch: Callable[[Lane, Any], None],
        do_idle_work: Callable[[], bool],
    ) -> None:
        self._config = config
        self._run = run
        self._refuse = refuse
        self._make_scratch = make_scratch
        self._close_scratch = close_scratch
        self._do_idle_work = do_idle_work
        self._lock = threading.Lock()  # guards everything below; `run` is called without it
        self._stopping = False
        self._numbers = itertools.count()
        self._lanes: dict[Lane, _Lane[Item]] = {}
        self._waiting: deque[_Lane[Item]] = deque()  # lanes with work and without a thread
        self.threads: list[threading.Thread] = []

    def start(self, own: Iterable[Lane] = ()) -> None:
        """Start the shared lane's threads, and those of the private lanes known so far.

        Raises:
            ConfigError: the shared lane gets no thread.
        """
        with self._lock:
            shared = self._lanes[SHARED_LANE] = _Lane(SHARED_LANE)
            for _ in range(self._config.num_shared):
                if not self._start_thread(shared) and not shared.num_threads:
                    raise ConfigError(f"no thread for {self._config.thread_name}: there are too many")
            for name in own:
                self._lanes[name] = _Lane(name)
                self._waiting.append(self._lanes[name])
            self._start_waiting()

    def put(self, name: Lane, item: Item) -> None:
        """Queue an item; its lane starts as soon as the limit on lanes and a thread allow it."""
        with self._lock:
            lane = self._lanes.get(name)
            if lane is None:
                lane = self._lanes[name] = _Lane(name)
                self._waiting.append(lane)
            lane.items.put(item)
            self._start_waiting()

    def retire(self, names: Iterable[Lane]) -> None:
        """End private lanes after their current work: their peers are gone."""
        with self._lock:
            for name in names:
                lane = self._lanes.get(name)
                if lane is not None and name is not SHARED_LANE:
                    lane.items.put(None)

    @property
    def num_lanes(self) -> int:
        """Number of private lanes that have a thread now."""
        with self._lock:
            return self._num_running()

    def shutdown(self, timeout_s: float) -> None:
        """Let every thread end after its current item, and join them, for a limited time. Idempotent."""
        with self._lock:
            self._stopping = True
            threads = list(self.threads)
            for lane in self._lanes.values():
                for _ in range(lane.num_threads):
                    lane.items.put(None)
        deadline = MONOTONIC.now() + timeout_s
        for thread in threads:
            thread.join(max(deadline - MONOTONIC.now(), 0.0))
            if thread.is_alive():
                logger.error("thread %s does not end", thread.name)

    # --- under the lock -------------------------------------------------------------------------------------------

    def _num_running(self) -> int:
        return sum(lane.num_threads for lane in self._lanes.values() if lane.name is not SHARED_LANE)

    def _start_waiting(self) -> None:
        """Start waiting lanes; if there are too many, ask as many idle ones to end."""
        while self._waiting and not self._stopping and self._num_running() < self._config.max_lanes:
            if not self._start_thread(self._waiting[0]):
                return  # the next item, or a thread that ends, tries again
            self._waiting.popleft()
        if self._waiting:
            running = (lane for lane in self._lanes.values() if lane.name is not SHARED_LANE and lane.num_threads)
            idle = [lane for lane in running if not lane.is_busy and lane.items.empty()]
            for lane in idle[: len(self._waiting)]:
                lane.items.put(None)

    def _start_thread(self, lane: _Lane[Item]) -> bool:
        """Start a thread. Returns whether the system had room for it."""
        name = f"{self._config.thread_name}-{next(self._numbers)}"
        thread = threading.Thread(target=self._serve, args=(lane,), name=name, daemon=True)
        lane.num_threads += 1
        self.threads.append(thread)
        try:
            start_thread(thread)
        except ServerBusy as error:
            lane.num_threads -= 1
            self.threads.remove(thread)
            logger.warning("lane %s: %s", lane.name, error)
            return False
        return True

    def _thread_ends(self, lane: _Lane[Item]) -> None:
        lane.num_threads -= 1
        self.threads.remove(threading.current_thread())
        if lane.name is not SHARED_LANE:
            if lane.items.empty():
                del self._lanes[lane.name]
            else:
                self._waiting.append(lane)
        self._start_waiting()

    # --- threads --------------------------------------------------------------------------------------------------

    def _serve(self, lane: _Lane[Item]) -> None:
        """The loop of one thread."""
        scratch = self._try_to_make_scratch(lane)
        try:
            while (item := self._next(lane)) is not None:
                if isinstance(scratch, _NoScratch):
                    scratch = self._try_to_make_scratch(lane)
                if isinstance(scratch, _NoScratch):
                    self._refuse(item, scratch.reason)
                else:
                    self._run(item, scratch)
                del item  # a reference would keep its objects alive
        finally:
            try:
                if not isinstance(scratch, _NoScratch):
                    self._close_scratch(lane.name, scratch)
            finally:
                with self._lock:
                    self._thread_ends(lane)

    def _try_to_make_scratch(self, lane: _Lane[Item]) -> Any:
        try:
            return self._make_scratch(lane.name)
        except Exception as error:  # a lane must not be lost for good
            logger.warning("lane %s: %s", lane.name, error, exc_info=not isinstance(error, PdkvError))
            return _NoScratch(error)

    def _next(self, lane: _Lane[Item]) -> Item | None:
        """Wait for the lane's next item; None: the thread ends."""
        shared = lane.name is SHARED_LANE
        lane.is_busy = False
        while True:
            while shared and lane.items.empty() and not self._stopping and self._do_idle_work():
                pass
            try:
                item = lane.items.get(timeout=None if shared else 0 if self._waiting else self._config.idle_s)
            except queue.Empty:
                return None
            if item is not None:
                lane.is_busy = True
                return item
            if self._stopping or not shared:
                return None
