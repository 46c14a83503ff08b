"""Threads that decode and tokenize large bodies and encode large replies, so that the event loop goes on."""

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from pdkv.errors import RequestAborted
from pdkv.router.admission.fair_queue import FairQueue, Turns
from pdkv.router.http.server.budget import SMALL_BYTES

T = TypeVar("T")

INLINE_BYTES = 2_000
"""Bodies up to this size are processed by the caller: it takes some milliseconds at most."""

_BASE_S, _S_PER_BYTE = 0.005, 1e-6
"""Processor seconds that a text may take, twice as much as was measured. Only a schema takes longer."""

_SCHEMA_S = 0.1
"""Processor seconds assumed for a schema."""

_SLICE_S, _PAUSE_S = 0.002, 0.006
"""A schema's processor seconds at a time, and how long it leaves the interpreter to others after them."""

Work = Callable[[Callable[[], bool]], T]
"""A function run on a thread; its argument says whether it is cancelled, and it then raises RequestAborted."""


class _Lane:
    """One thread. Keys take turns, and the processor time of a key's work counts against its next turns."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._queue: FairQueue[tuple[Future[Any], Callable[[], Any], Turns, float]] = FairQueue()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], T], key: str, seconds: float) -> "Future[T]":
        """The future result of `work`, which runs in its turn and is estimated to take `seconds`."""
        future, turns = Future[T](), Turns()
        with self._lock:
            item = (future, work, turns, seconds)
            self._thread.submit(self._run_next)
            self._queue.push(item, tenant=key, turns=turns, priority=0, cost=seconds)
        return future

    def _run_next(self) -> None:
        with self._lock:
            if not self._queue:  # the lane was closed
                return
            future, work, turns, seconds = self._queue.pop()
        began = time.thread_time()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        with self._lock:
            self._queue.settle(turns.flow, time.thread_time() - began - seconds, 1.0)
        del future, work  # a failure's traceback holds this frame, which must not hold the failure and the body

    def close(self) -> None:
        """Drop waiting work; running work ends after its current piece."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            while self._queue:
                self._queue.pop()[0].cancel()


class TextPool:
    """Three queues with a thread each, in which keys take turns, so that no client waits behind everything another has
    sent.

    Bodies of more than SMALL_BYTES use the second queue, so that no others wait behind them. The third is for work that
    takes longer than its size suggests, such as schemas; it is started again there. Replies have a separate thread,
    since their results are already computed. Cancelled work leaves its queue; if it has started, it notices `cancelled`
    and ends after its current piece.
    """

    def __init__(self) -> None:
        self._short, self._long, self._schemas = (_Lane(f"text-{name}") for name in ("short", "long", "schemas"))
        self._replies = ThreadPoolExecutor(1, "text-replies")
        self.held = 0
        """Bytes that wait or are being processed."""

    async def run(self, size: int, work: Work[T], key: str = "") -> T:
        """The result of `work(cancelled)` on a body of `size` bytes of `key`; cancel the caller to give it up.

        Raises what `work` raises.
        """
        cancelled = threading.Event()
        seconds = _BASE_S + size * _S_PER_BYTE
        self.held += size
        try:
            try:
                lane = self._long if size > SMALL_BYTES else self._short
                return await _result(lane, functools.partial(_on_text, work, cancelled, seconds), key, seconds)
            except RequestAborted:  # by its own deadline: its caller has not left
                pass
            return await _result(self._schemas, functools.partial(_on_schema, work, cancelled), key, _SCHEMA_S)
        finally:
            cancelled.set()
            self.held -= size
            del work  # a failure's traceback holds this frame, which must not hold the body

    async def encode(self, work: Callable[[], T]) -> T:
        """The result of `work`, which encodes a part of a reply; cancel the caller to drop it from the queue."""
        return await asyncio.wrap_future(self._replies.submit(work))

    def close(self) -> None:
        """Drop waiting work; running work ends after its current piece."""
        self._replies.shutdown(wait=False, cancel_futures=True)
        for lane in (self._short, self._long, self._schemas):
            lane.close()


def _on_text(work: Work[T], cancelled: threading.Event, seconds: float) -> T:
    end = time.thread_time() + seconds
    return work(lambda: cancelled.is_set() or time.thread_time() > end)


def _on_schema(work: Work[T], cancelled: threading.Event) -> T:
    """`work`, which pauses between slices: beside a thread that never waits, each system call of the event loop costs
    it a switch of threads.
    """
    end = time.thread_time() + _SLICE_S

    def pause() -> bool:
        nonlocal end
        if time.thread_time() > end:
            cancelled.wait(_PAUSE_S)
            end = time.thread_time() + _SLICE_S
        return cancelled.is_set()

    return work(pause)


async def _result(lane: _Lane, work: Callable[[], T], key: str, seconds: float) -> T:
    future = lane.submit(work, key, seconds)
    try:
        return await asyncio.wrap_future(future)
    finally:
        del future, work  # as above
