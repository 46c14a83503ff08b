"""A stop without a loss: what has begun is answered to its end, while admission lets nothing new begin."""

import contextlib
from collections.abc import Iterator

from pdkv.router.admission.admission_queue import Admission
from pdkv.router.generations.changes import Changes


class Drain:
    """Counts the requests that are being answered, from their headers to the last byte of their answers."""

    def __init__(self, admission: Admission) -> None:
        self.num_requests = 0
        self._admission = admission
        self._changes = Changes()

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken."""
        return bool(self._admission.draining)

    def begin(self) -> None:
        """From now on requests are refused. Idempotent."""
        self._admission.drain("the server is stopping")

    async def wait_idle(self, timeout_s: float) -> bool:
        """Return True when all requests that had begun are answered, False when they are not within `timeout_s`."""
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
