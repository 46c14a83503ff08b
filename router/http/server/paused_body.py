"""A body that is not read for a while, since there is no memory for it."""

import asyncio
import select
from collections.abc import Callable

PAUSE_BODY = "pdkv.pause_body"
"""Key of an ASGI scope that holds the PauseBody of a server that supports it."""

ASK = "pdkv.ask"
"""Key of an ASGI scope under which an application puts a function that sends a client of a response that has begun
something to skip.
"""

CHECK_S = 1.0
"""Seconds between checks of its client, at most: while nothing is read, the event loop does not notice that it has
left.
"""

_LEFT = getattr(select, "POLLRDHUP", 0)  # elsewhere it is noticed at the next read

CLOSED = select.POLLHUP | select.POLLERR
"""The signs of a client that has closed, and not just ended its input."""

_FIRST_CHECK_S = 1 / 16


class PausedBody:
    """Stops reading from a connection until the application receives again; ends it if the client has left."""

    def __init__(
        self, connection: asyncio.Transport, num_bytes: int, on_left: Callable[[], None], signs: int = _LEFT
    ) -> None:
        """`on_left` is called by `left`; `signs` say that its client has left, as select.poll has them."""
        self.num_bytes = num_bytes
        """Bytes of the body that have already arrived."""
        self._connection = connection
        self._on_left: Callable[[], None] | None = on_left
        self._loop = asyncio.get_running_loop()
        self._signs = signs
        self._wait_s = _FIRST_CHECK_S if signs == CLOSED else CHECK_S
        self._timer = self._loop.call_later(self._wait_s, self._look)

    def left(self) -> None:
        """Note that the connection is gone. Idempotent."""
        on_left = self._on_left
        self.end()
        if on_left is not None:
            on_left()

    def end(self) -> None:
        """Resume reading: there is memory, and the application continues. Idempotent."""
        self._on_left = None
        self._timer.cancel()

    def _look(self) -> None:
        if self._signs and not self._connection.is_closing():
            poll = select.poll()
            poll.register(self._connection.get_extra_info("socket").fileno(), self._signs)
            if poll.poll(0):
                self._connection.abort()
            else:
                self._wait_s = min(2 * self._wait_s, CHECK_S)
                self._timer = self._loop.call_later(self._wait_s, self._look)


PauseBody = Callable[[Callable[[], None]], PausedBody]
"""Stops reading from a connection until its application receives. Calls its argument if the client leaves first."""
