"""Where large bodies are decoded and tokenized, and large replies encoded: threads, so that the loop goes on."""

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
"""Bodies up to this size are worked on by the caller: it takes some milliseconds at most."""

_BASE_S, _S_PER_BYTE = 0.005, 1e-6
"""A processor's time that a text may take, twice as much as was measured. What takes longer makes a schema."""

_SCHEMA_S = 0.1
"""What a schema is thought to take."""

Work = Callable[[Callable[[], bool]], T]
"""Done on a thread; what it is given says whether it is to end, which it does with RequestAborted."""


class _Lane:
    """One thread. Turns go by key, and what a key's work took of a processor counts for its next turns."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._queue: FairQueue[tuple[Future[Any], Callable[[], Any], Turns, float]] = FairQueue()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], T], key: str, seconds: float) -> "Future[T]":
        """The result of `work`, of which it is thought that it takes so many seconds."""
        future, turns = Future[T](), Turns()
        with self._lock:
            item = (future, work, turns, seconds)
            self._thread.submit(self._run_next)
            self._queue.push(item, tenant=key, turns=turns, priority=0, cost=seconds)
        return future

    def _run_next(self) -> None:
        with self._lock:
            if not self._queue:  # it was closed
                return
            future, work, turns, seconds = self._queue.pop()
        began = time.thread_time()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        with self._lock:
            self._queue.settle(turns, time.thread_time() - began - seconds, 1.0)
        del future, work  # a failure's traceback holds this frame, which must not hold the failure and the body

    def close(self) -> None:
        """Drop what waits; what runs ends with its piece."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            while self._queue:
                self._queue.pop()[0].cancel()


class TextPool:
    """Three queues with a thread each, whose turns go by key: nobody waits behind all that another has sent.

    Bodies of more than SMALL_BYTES have the second one, so that no other waits behind them. The third is for what takes
    longer than its text explains: schemas. It is begun there anew.
    Replies have a thread of their own: what they say is here already.
    Work that nobody waits for any more leaves its queue; what has begun is told by its `cancelled`, and ends with the
    piece at hand.
    """

    def __init__(self) -> None:
        self._short, self._long, self._schemas = (_Lane(f"text-{name}") for name in ("short", "long", "schemas"))
        self._replies = ThreadPoolExecutor(1, "text-replies")
        self.held = 0
        """Bytes that wait or are worked on."""

    async def run(self, size: int, work: Work[T], key: str = "") -> T:
        """The result of `work(cancelled)` on a body of `size` bytes of `key`; cancel the caller to give it up.

        Raises whatever `work` raises.
        """
        cancelled = threading.Event()
        seconds = _BASE_S + size * _S_PER_BYTE
        self.held += size
        try:
            try:
                lane = self._long if size > SMALL_BYTES else self._short
                return await _result(lane, functools.partial(_on_text, work, cancelled, seconds), key, seconds)
            except RequestAborted:  # by its own time: its caller has not left
                pass
            return await _result(self._schemas, functools.partial(work, cancelled.is_set), key, _SCHEMA_S)
        finally:
            cancelled.set()
            self.held -= size
            del work  # a failure's traceback holds this frame: it must not hold the body

    async def encode(self, work: Callable[[], T]) -> T:
        """The result of `work`, a piece of a reply; cancel the caller to drop it from the queue."""
        return await asyncio.wrap_future(self._replies.submit(work))

    def close(self) -> None:
        """Drop what waits; what runs ends with its piece."""
        self._replies.shutdown(wait=False, cancel_futures=True)
        for lane in (self._short, self._long, self._schemas):
            lane.close()


def _on_text(work: Work[T], cancelled: threading.Event, seconds: float) -> T:
    end = time.thread_time() + seconds
    return work(lambda: cancelled.is_set() or time.thread_time() > end)


async def _result(lane: _Lane, work: Callable[[], T], key: str, seconds: float) -> T:
    future = lane.submit(work, key, seconds)
    try:
        return await asyncio.wrap_future(future)
    finally:
        del future, work  # as above
