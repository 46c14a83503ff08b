"""Sends many commands ahead of their replies, within a limit on the bytes in flight."""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdkv.kv_store.base import Buffer
from pdkv.kv_store.connections import Channel, Deadline


class Command(NamedTuple):
    """One command, and the bytes of a value that travel with it or with its reply."""

    buffers: Sequence[bytes | Buffer]
    num_bytes: int = 0


class ByteBudget:
    """Bytes in flight over all calls of a store. One value larger than the limit may travel alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._freed = threading.Condition()

    def acquire(self, num_bytes: int, deadline: Deadline) -> None:
        """Take bytes, waiting for others to be given back.

        Raises:
            StoreTimeout: not enough bytes were given back by the deadline.
        """
        with self._freed:
            while not self._take(num_bytes):
                deadline.wait(self._freed)

    def try_acquire(self, num_bytes: int) -> bool:
        """Take bytes if there are enough."""
        with self._freed:
            return self._take(num_bytes)

    def release(self, num_bytes: int) -> None:
        """Give bytes back."""
        with self._freed:
            self._used -= num_bytes
            self._freed.notify_all()

    def _take(self, num_bytes: int) -> bool:
        if self._used and self._used + num_bytes > self.limit:
            return False
        self._used += num_bytes
        return True


def run_pipeline(
    channel: Channel,
    commands: Sequence[Command],
    receive: Callable[[int], None],
    *,
    budget: ByteBudget,
    max_commands: int,
) -> None:
    """Send commands ahead and call `receive(index)` to read each reply, in order.

    A new burst goes out when half of the last one has been answered, so that the server always has work. A call with
    nothing in flight waits for the budget, one with replies to read never does: two calls cannot block each other.
    """
    sent = held = 0
    try:
        for index in range(len(commands)):
            if sent - index <= max_commands // 2 and held <= budget.limit // 2:
                burst: list[bytes | Buffer] = []
                while sent < len(commands) and sent - index < max_commands:
                    size = commands[sent].num_bytes
                    if sent == index:
                        budget.acquire(size, channel.deadline)
                    elif not budget.try_acquire(size):
                        break
                    held += size
                    burst.extend(commands[sent].buffers)
                    sent += 1
                channel.send(burst)
            receive(index)
            held -= commands[index].num_bytes
            budget.release(commands[index].num_bytes)
    finally:
        budget.release(held)
