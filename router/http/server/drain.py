"""A stop without losses: running requests are answered to their end, while admission lets nothing new begin."""

import contextlib
from collections.abc import Iterator

from pdkv.router.admission.desk import Desk
from pdkv.router.generations.changes import Changes


class Drain:
    """Counts requests from their headers to the last byte of their answers."""

    def __init__(self, desk: Desk) -> None:
        self.num_requests = 0
        self._desk = desk
        self._changes = Changes()

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return bool(self._desk.draining)

    def begin(self) -> None:
        """Refuse requests from now on. Idempotent."""
        self._desk.drain("the server is stopping")

    async def wait_idle(self, timeout_s: float) -> bool:
        """Return True once all requests that had begun are answered; False if they are not within `timeout_s`."""
        return await self._changes.wait_for(lambda: self.num_requests == 0, timeout_s)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """A request counts for the block."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1
            self._changes.notify()
