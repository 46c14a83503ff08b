"""What the router says of itself: the model, its health, its figures, its engines, its API."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdkv import __version__
from pdkv.base.clock import unix_time
from pdkv.errors import Draining
from pdkv.router.http.pages.openapi import encoded_openapi
from pdkv.router.http.read.served_model import ServedModel, unknown_model
from pdkv.router.http.server.drain import Drain
from pdkv.router.http.server.errors import describe_error, error_body, json_response
from pdkv.router.metrics.requests import Metrics

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Dispatcher


async def freshen(request: Request, dispatcher: "Dispatcher") -> None:
    """?fresh=true: the engines say first how they are, those that answer soon."""
    if request.query_params.get("fresh") == "true":
        await dispatcher.fresh_reports()


class StatusPages:
    """Requests that generate nothing and change nothing."""

    def __init__(
        self, dispatcher: "Dispatcher", model: Callable[[], ServedModel], metrics: Metrics, drain: Drain
    ) -> None:
        """Args:
        model: the model as it is served now.
        """
        self._dispatcher = dispatcher
        self._model = model
        self._metrics = metrics
        self._drain = drain
        self._created = int(unix_time())

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/version", self._version),
            Route("/load", self._load),
            Route("/metrics", self._render_metrics),
            Route("/topology", self._topology),
            Route("/openapi.json", self._openapi),
            Route("/server_info", self._server_info),
        ]

    async def _health(self, request: Request) -> Response:
        if self._drain.draining:
            text = f"the server is stopping: {self._drain.num_requests} requests still run"
            return json_response(error_body(text, status=503, code=Draining.code), status=503)
        fault = self._dispatcher.fault
        if fault:
            return json_response(error_body(fault, status=503, code="not_ready"), status=503)
        problems = self._dispatcher.connector_problems
        return json_response({"status": "degraded", "connector_problems": problems} if problems else {"status": "ok"})

    async def _models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_card(name) for name in self._model().names]})

    async def _one_model(self, request: Request) -> Response:
        name, model = request.path_params["name"], self._model()
        if name not in model.names:
            status, body = describe_error(unknown_model(name, model))
            return json_response(body, status=status)
        return json_response(self._model_card(name))

    def _model_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "pdkv",
            "max_model_len": self._model().max_model_len,
        }

    async def _version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def _server_info(self, request: Request) -> Response:
        model = self._model()
        parsers = {"tool_parser": model.tool_parser, "reasoning_parser": model.reasoning_parser}
        names = {name: None if kind is None else kind.__name__ for name, kind in parsers.items()}
        return json_response({"version": __version__, "model": self._model_card(model.name), **names})

    async def _load(self, request: Request) -> Response:
        return json_response({"server_load": self._metrics.in_flight})

    async def _render_metrics(self, request: Request) -> Response:
        await freshen(request, self._dispatcher)
        text = await self._metrics.render()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _topology(self, request: Request) -> Response:
        await freshen(request, self._dispatcher)
        return json_response(self._dispatcher.topology())

    async def _openapi(self, request: Request) -> Response:
        data = await asyncio.to_thread(encoded_openapi)  # the first time it takes some 30 ms
        return Response(data, media_type="application/json")
