"""Status pages of the router: the model, its health, metrics, engines and API."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pdkv import __version__
from pdkv.base.clock import unix_time
from pdkv.errors import Draining
from pdkv.router.admission.tenants import TENANT
from pdkv.router.http.pages.page import Page, freshened
from pdkv.router.http.read.pool_choice import models_of
from pdkv.router.http.read.served_model import ServedModel
from pdkv.router.http.server.drain import Drain
from pdkv.router.http.server.errors import error_body, json_response
from pdkv.router.metrics.requests import Metrics

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Dispatcher


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pdkv"
    max_model_len: int


class ModelList(BaseModel):
    """The served model by each of its names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(BaseModel):
    """The version of pdkv."""

    version: str = __version__


class ServerInfo(Version):
    """The model and its parsers."""

    model: ModelCard
    tool_parser: str | None
    reasoning_parser: str | None


class ServerLoad(BaseModel):
    """Requests that generate now."""

    server_load: int


class StatusPages:
    """Read-only endpoints that generate nothing."""

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
        """All status pages; those that monitors poll are bare ASGI."""
        told: dict[str, Any] = {"tags": ["server"], "dependencies": freshened(self._dispatcher), "response_model": None}
        return [
            Route("/live", self._live),
            Route("/ready", self._health),
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Page("/v1/models", self._models, tags=["models"]),
            Page("/v1/models/{name:path}", self._one_model, tags=["models"]),
            Page("/version", self._version, tags=["server"]),
            Page("/load", self._load, tags=["server"]),
            Page("/metrics", self._render_metrics, response_class=PlainTextResponse, **told),
            Page("/topology", self._topology, response_class=JSONResponse, **told),
            Page("/server_info", self._server_info, tags=["server"]),
        ]

    async def _live(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def _health(self, request: Request) -> Response:
        if self._drain.draining:
            text = f"the server is stopping: {self._drain.num_requests} requests are still running"
            return json_response(error_body(text, status=503, code=Draining.code), status=503)
        fault = self._dispatcher.fault
        if fault:
            return json_response(error_body(fault, status=503, code="not_ready"), status=503)
        problems, there = self._dispatcher.connector_problems, self._dispatcher.fallback
        takes_over = there.engine is not None and there.cause == "disaster"
        told = {"connector_problems": problems} | ({"fallback": there.cause} if takes_over else {})
        told |= {"pools": faults} if (faults := self._dispatcher.pools.faults) else {}
        return json_response({"status": "degraded"} | told if any(told.values()) else {"status": "ok"})

    async def _models(self, request: Request) -> ModelList:
        """The served models, by each of their names."""
        usable = self._model().usable(models_of(request.scope.get(TENANT)))
        return ModelList(data=[self._model_card(name, model) for model in usable for name in model.names])

    async def _one_model(self, name: str, request: Request) -> ModelCard:
        """One model."""
        return self._model_card(name, self._model().named(name, models_of(request.scope.get(TENANT))))

    def _model_card(self, name: str, model: ServedModel) -> ModelCard:
        return ModelCard(id=name, created=self._created, max_model_len=model.max_model_len)

    async def _version(self) -> Version:
        """The version of pdkv."""
        return Version()

    async def _server_info(self) -> ServerInfo:
        """The model and its parsers."""
        model = self._model()
        parsers = model.tool_parser, model.reasoning_parser
        tools, reasoning = (None if kind is None else kind.__name__ for kind in parsers)
        return ServerInfo(model=self._model_card(model.name, model), tool_parser=tools, reasoning_parser=reasoning)

    async def _load(self) -> ServerLoad:
        """How many requests generate now."""
        pools = self._metrics.pools.values()
        return ServerLoad(server_load=self._metrics.in_flight + sum(pool.in_flight for pool in pools))

    async def _render_metrics(self) -> Response:
        """Figures for Prometheus."""
        return Response(await self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _topology(self) -> Response:
        """Engines, their load and their KV blocks."""
        return json_response(self._dispatcher.topology())
