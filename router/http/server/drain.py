"""A stop without a loss: what has begun is answered to its end, while admission lets nothing new begin."""

from starlette.types import ASGIApp, Receive, Scope, Send

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

    def counted(self, endpoint: ASGIApp) -> ASGIApp:
        """The endpoint, whose requests count."""
        return _Counted(self, endpoint)

    def _enter(self) -> None:
        self.num_requests += 1

    def _leave(self) -> None:
        self.num_requests -= 1
        assert self.num_requests >= 0, "more requests were answered than came"
        self._changes.notify()


class _Counted:
    """An ASGI application; starlette's Route takes an object for one, and a function for something else."""

    def __init__(self, drain: Drain, endpoint: ASGIApp) -> None:
        self._drain = drain
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._drain._enter()
        try:
            await self._endpoint(scope, receive, send)
        finally:
            self._drain._leave()
