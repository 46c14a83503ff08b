"""Where large bodies are decoded and tokenized, and large replies encoded: threads, so that the loop goes on."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pdkv.router.http.budget import SMALL_BYTES, ByteBudget, Held

T = TypeVar("T")

INLINE_BYTES = 2_000
"""Bodies up to this size are worked on by the caller: it takes some milliseconds at most."""


class TextPool:
    """Two queues with a thread each, and one budget for the bytes in both.

    Bodies of more than SMALL_BYTES have the second one, so that no other waits behind them. Where the budget is used
    up, work waits in front of its queue.
    Replies have a thread of their own, and no budget: what they say is here already.
    Work that nobody waits for any more leaves its queue; what has begun is told by its `cancelled`, and ends with the
    piece at hand.
    """

    def __init__(self, max_queued_bytes: int, largest: int = 0) -> None:
        """`largest`: what one body may have."""
        self._budget = ByteBudget(max_queued_bytes, "the texts to be tokenized", largest=largest)
        self._short = ThreadPoolExecutor(1, "text-short")
        self._long = ThreadPoolExecutor(1, "text-long")
        self._replies = ThreadPoolExecutor(1, "text-replies")

    @property
    def held(self) -> int:
        """Bytes that wait or are worked on."""
        return self._budget.held

    async def run(self, size: int, work: Callable[[Callable[[], bool]], T]) -> T:
        """The result of `work(cancelled)` on a body of `size` bytes; cancel the caller to give it up.

        Raises whatever `work` raises.
        """
        held = Held()
        try:
            if not self._budget.try_take(held, size):
                await self._budget.wait(held, size)
            cancelled = threading.Event()
            lane = self._long if size > SMALL_BYTES else self._short
            future = lane.submit(work, cancelled.is_set)
        except BaseException:  # it was given up, or the pool is closed, since the router is stopping
            self._budget.give(held)
            raise
        future.add_done_callback(lambda _: self._budget.give(held))
        try:
            return await asyncio.wrap_future(future)
        finally:
            cancelled.set()
            del future, work  # a failure's traceback holds this frame, which must not hold the failure and the body

    async def encode(self, work: Callable[[], T]) -> T:
        """The result of `work`, a piece of a reply; cancel the caller to drop it from the queue."""
        return await asyncio.wrap_future(self._replies.submit(work))

    def close(self) -> None:
        """Drop what waits; what runs ends with its piece."""
        for lane in (self._short, self._long, self._replies):
            lane.shutdown(wait=False, cancel_futures=True)
