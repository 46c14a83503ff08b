"""A front's HTTP application: texts here, everything else by the dispatcher."""

from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from pdkv.config import RouterConfig
from pdkv.router.fronts.remote import RemoteDesk
from pdkv.router.http.app import for_browsers, generating, model_provider, on_texts, serve, share
from pdkv.router.http.read.served_model import ServedModel
from pdkv.router.http.server.budget import ByteBudget
from pdkv.router.http.server.drain import Drain
from pdkv.router.metrics.requests import ENDPOINTS, Totals
from pdkv.router.metrics.tracing import Tracer


class FrontApp:
    """ASGI: POST endpoints by path, and a desk for all other requests."""

    def __init__(
        self, desk: RemoteDesk, served: ServedModel, config: RouterConfig, bodies: ByteBudget,
        tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
        """The caller closes the tracer."""
        self.drain = Drain(desk)
        shared = share(desk, model_provider(lambda: desk.news, served), Totals(), config, bodies, self.drain, tracer)
        self.pool = shared.pool
        desk.held = lambda: (
            bodies.held, bodies.num_waiting, self.pool.held, *(tracer.counts.values() if tracer is not None else (0, 0))
        )  # fmt: skip
        endpoints = {path: endpoint for path, endpoint in generating(shared).items() if path in ENDPOINTS}
        self._desk, self._has_browsers = desk, bool(config.access.cors_origin)
        self._endpoints: Mapping[str, ASGIApp] = for_browsers({**endpoints, **on_texts(shared)}, config.access)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        assert scope["type"] == "http", "there is no lifespan"
        endpoint = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        if endpoint is None:
            await self._desk.forward(scope, receive, send)
            return
        await serve(endpoint, scope, receive, send, self._has_browsers)
