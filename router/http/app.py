"""The router's HTTP application: OpenAI's API, health, metrics and topology."""

import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI
from prometheus_client.core import Metric
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pdkv import __version__
from pdkv.config import AccessConfig, HttpApi, HttpLimits, RouterConfig
from pdkv.errors import Unauthorized
from pdkv.models.config import ModelConfig
from pdkv.models.pooling_config import BY_LAST_TOKEN, Pooling
from pdkv.parsers.registry import find_reasoning_parser, find_tool_parser
from pdkv.router.admission.admission_queue import Admission
from pdkv.router.admission.api_keys import KeyRing
from pdkv.router.admission.desk import Desk
from pdkv.router.admission.tenants import Tenant
from pdkv.router.generations.operations import Operations
from pdkv.router.http.answer.completions import WholeCompletion
from pdkv.router.http.answer.pooled import WholePooled
from pdkv.router.http.answer.replies import ReplyForms
from pdkv.router.http.answer.sse import ChunkEncoder
from pdkv.router.http.endpoint import SERVER_SEND, GenerateEndpoint, Prepare
from pdkv.router.http.pages.admin import AdminPages
from pdkv.router.http.pages.cache_pages import CachePages
from pdkv.router.http.pages.dashboard_page import dashboard_routes
from pdkv.router.http.pages.docs_page import docs_routes
from pdkv.router.http.pages.openapi import with_endpoints
from pdkv.router.http.pages.page import ERROR_HANDLERS, HeadAsGet
from pdkv.router.http.pages.status_pages import StatusPages
from pdkv.router.http.pages.tokenize import TextEndpoint, detokenize, tokenize
from pdkv.router.http.read.decoding import CHAT, COMPLETION, EMBEDDING, RERANK, BodyDecoder
from pdkv.router.http.read.intake import Intake, Shared
from pdkv.router.http.read.job import Job, prepare_chat, prepare_completion
from pdkv.router.http.read.pool_choice import Body, prepare_for
from pdkv.router.http.read.pooled_job import prepare_embedding, prepare_rerank
from pdkv.router.http.read.served_model import Cancelled, ServedModel
from pdkv.router.http.read.text_pool import TextPool
from pdkv.router.http.responses_api.prepare import RESPONSES, Kept, prepare_responses
from pdkv.router.http.responses_api.replies import ResponseEvents, WholeResponse
from pdkv.router.http.responses_api.store import ResponseStore
from pdkv.router.http.server.access_log import AccessLogged
from pdkv.router.http.server.auth import Authenticate, PlainPaths, authenticate
from pdkv.router.http.server.budget import ByteBudget
from pdkv.router.http.server.drain import Drain
from pdkv.router.metrics.exposition import gauge
from pdkv.router.metrics.extras import key_metrics, scaler_metrics
from pdkv.router.metrics.loop_watchdog import LoopWatchdog
from pdkv.router.metrics.overview import Overview
from pdkv.router.metrics.recorder import Recorder
from pdkv.router.metrics.requests import Metrics, Totals
from pdkv.router.metrics.tracing import Tracer
from pdkv.router.request import PoolNews
from pdkv.router.scaling.scaler import Scaler
from pdkv.text import Tokenizer

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Dispatcher

B = TypeVar("B", bound=Body)


def create_app(
    dispatcher: "Dispatcher",
    served: ServedModel,
    *,
    config: RouterConfig | None = None,
    bodies: ByteBudget | None = None,
    admission: Admission | None = None,
    keys: KeyRing | None = None,
    operations: Operations | None = None,
    tracer: Tracer | None = None,
    watchdog: LoopWatchdog | None = None,
    recorder: Recorder | None = None,
) -> FastAPI:
    """The ASGI application in front of a dispatcher, which the caller connects and closes. Its `state` has the
    `caches`, `figures` and `scaler` that `LauncherPages` take, the `bodies` and the `drain`.

    Args:
        served: the model (`served_model`); answers and metrics use the first of its names.
        config: the router's options (default: their default values).
        bodies: the budget for bodies, if it is shared with others.
        admission: the queue in front of the dispatcher (default: one as `config` says).
        keys: API keys that clients need (default: they need none).
        operations: the operations that keys with `admin` may request, if there are `keys`.
        tracer, watchdog, recorder: observers, which the caller starts and closes.
    """
    config = config or RouterConfig()
    bodies = bodies or body_budget(config.http)
    admission = admission or Admission(dispatcher, config.admission)
    drain, name = Drain(admission), served.names[0]
    metrics = Metrics(dispatcher, name, tracer=tracer, watchdog=watchdog, admission=admission)
    for other in served.others:
        of_pool = dispatcher.pools.at(other.pool)
        queue = admission.pools[other.pool] = Admission(of_pool, config.admission)
        queue.anonymous = admission.anonymous
        metrics.pools[other.pool] = Metrics(of_pool, other.name, admission=queue)
    if keys is not None:
        metrics.register(lambda: key_metrics(keys.tenants))
    if recorder is not None:
        metrics.register(recorder.metrics)
    model = model_provider(dispatcher.pools.news, served)
    shared = share(admission, model, metrics, config, bodies, drain, tracer, recorder)
    caches, pool = CachePages(dispatcher, model, keys), shared.pool
    metrics.register(functools.partial(_held, dispatcher, drain, bodies, pool))
    scaler = None
    if config.autoscaling.autoscale and operations is not None:
        scaler = Scaler(config.autoscaling, dispatcher, admission, operations)
        metrics.register(functools.partial(scaler_metrics, scaler))
    overview = Overview(dispatcher, metrics, name, shows_requests=keys is not None)
    pages = [*StatusPages(dispatcher, model, metrics, drain).routes(), *docs_routes(), *dashboard_routes(overview)]
    if keys is not None and operations is not None:
        pages += AdminPages(dispatcher, operations, caches, scaler).routes()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        pool.close()

    texts = (Route(path, endpoint, methods=["POST"]) for path, endpoint in on_texts(shared).items())
    app = _App(generating(shared), [*texts, *pages], lifespan, keys, config.access)
    app.state.caches, app.state.figures, app.state.bodies, app.state.drain = caches, metrics.figures, bodies, drain
    app.state.admission, app.state.metrics, app.state.scaler = admission, metrics, scaler
    return app


def share(
    desk: Desk,
    model: Callable[[], ServedModel],
    metrics: Totals,
    config: RouterConfig,
    bodies: ByteBudget,
    drain: Drain,
    tracer: Tracer | None = None,
    recorder: Recorder | None = None,
) -> Shared:
    """What the endpoints of a process have in common; the caller closes its `pool`."""
    for served in (model(), *model().others):  # for 150,000 tokens it takes 0.1 s: not in the first request
        _ = served.tokenizer.max_token_chars
    limits, pool = config.http, TextPool()
    answers = ByteBudget(limits.max_answer_memory, "the answers that are held (--max-answer-memory)")
    intake = Intake(limits, bodies, pool)
    return Shared(desk, model, metrics, limits, config.api, intake, pool, answers, drain, tracer, recorder)


def served_model(
    tokenizer: Tokenizer,
    model_config: ModelConfig,
    names: Sequence[str],
    max_model_len: int | None = None,
    *,
    api: HttpApi | None = None,
    sampling_defaults: Mapping[str, Any] | None = None,
    logits_processors: Sequence[str] = (),
    lacks: Mapping[str, str] = {},
    pooling: Pooling = BY_LAST_TOKEN,
) -> ServedModel:
    """The model as requests may use it.

    Args:
        names: the model's names.
        max_model_len: longest prompt + output in tokens; None: the model's. Engines with a lower limit reduce it.
        api: the options of the API (default: their default values).
        sampling_defaults: fields of SamplingParams for parameters that requests leave out (`read_sampling_defaults`).
        logits_processors: names of the engines' logits processors.
        lacks: fields that requests cannot have, and an engine that lacks each.
        pooling: how prompts become embeddings (`read_pooling`).
    """
    api = api or HttpApi()
    return ServedModel(
        names=names,
        tokenizer=tokenizer,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        max_model_len=model_config.num_positions if max_model_len is None else max_model_len,
        sampling_defaults=sampling_defaults or {},
        tool_parser=find_tool_parser(api.tool_parser, tokenizer.chat_template_source, api.tool_parser_plugin),
        reasoning_parser=find_reasoning_parser(api.reasoning_parser),
        stops_in_thoughts=api.stop_in_reasoning,
        logits_processors=tuple(logits_processors),
        lacks=lacks,
        takes_templates=api.trust_request_chat_template,
        pooling=pooling,
    )


def _held(dispatcher: "Dispatcher", drain: Drain, bodies: ByteBudget, pool: TextPool) -> Iterator[Metric]:
    """What requests hold: at rest each number is zero."""
    text = "Requests to generate, from their headers to the last byte of their answers."
    yield gauge("pdkv_open_requests", text, drain.num_requests)
    yield gauge("pdkv_body_bytes", "Bodies that are read or worked on.", bodies.held)
    yield gauge("pdkv_waiting_bodies", "Bodies that wait for room to be read.", bodies.num_waiting)
    yield gauge("pdkv_text_bytes", "Texts that wait to be tokenized, or are.", pool.held)
    yield gauge("pdkv_open_generations", "Choices that have begun and are not over.", dispatcher.pools.num_running)


def generating(shared: Shared) -> dict[str, ASGIApp]:
    """Endpoints by path."""
    limits, ignores_unknown = shared.limits, shared.api.ignores_unknown
    responses = ResponseStore(limits.max_kept_responses, limits.keep_responses_s, limits.max_body_bytes)

    def by(decoder: BodyDecoder[B], prepare: Callable[[B, ServedModel, Cancelled], Job]) -> Prepare:
        def read(body: bytes | bytearray, model: ServedModel, cancelled: Cancelled, tenant: Tenant | None) -> Job:
            request = decoder.decode(body, ignore_unknown=ignores_unknown)
            return prepare_for(request, model, tenant, lambda chosen: prepare(request, chosen, cancelled))

        return read

    def respond(body: bytes | bytearray, model: ServedModel, cancelled: Cancelled, tenant: Tenant | None) -> Job:
        kept = Kept(responses, tenant.keeper) if tenant is not None and responses.keep_s else None
        return prepare_responses(RESPONSES.decode(body, ignore_unknown=ignores_unknown), model, cancelled, kept, tenant)

    completions, events = ReplyForms(ChunkEncoder, WholeCompletion), ReplyForms(ResponseEvents, WholeResponse)
    pooled = ReplyForms(ChunkEncoder, WholePooled)  # which are never streamed
    ranking = GenerateEndpoint("rerank", by(RERANK, prepare_rerank), pooled, shared)
    return {
        "/v1/completions": GenerateEndpoint("completions", by(COMPLETION, prepare_completion), completions, shared),
        "/v1/chat/completions": GenerateEndpoint("chat_completions", by(CHAT, prepare_chat), completions, shared),
        "/v1/responses": GenerateEndpoint("responses", respond, events, shared),
        "/v1/embeddings": GenerateEndpoint("embeddings", by(EMBEDDING, prepare_embedding), pooled, shared),
        "/v1/rerank": ranking,
        "/rerank": ranking,
    }


def on_texts(shared: Shared) -> dict[str, ASGIApp]:
    """Endpoints without an engine, by path."""
    return {"/tokenize": TextEndpoint(tokenize, shared), "/detokenize": TextEndpoint(detokenize, shared)}


async def serve(endpoint: ASGIApp, scope: Scope, receive: Receive, send: Send, has_browsers: bool) -> None:
    """Serve one request at an endpoint of `for_browsers`, whose bodies go past what is added for browsers."""
    if has_browsers:
        scope[SERVER_SEND] = send
    try:
        await endpoint(scope, receive, send)
    finally:
        scope.pop(SERVER_SEND, None)  # it knows the scope: only the collector would find the two


def for_browsers(endpoints: Mapping[str, ASGIApp], access: AccessConfig) -> Mapping[str, ASGIApp]:
    """Endpoints for pages of other origins, too, if there are any that may."""
    if not access.cors_origin:
        return endpoints
    return {path: CORSMiddleware(endpoint, **_browsers(access)) for path, endpoint in endpoints.items()}


def _browsers(access: AccessConfig) -> dict[str, Any]:
    return {"allow_origins": access.cors_origin, "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}


class _App(FastAPI):
    """FastAPI with pages, and beside it endpoints that generate, bare: its layers around a request cost a quarter of a
    small one's CPU, and each would be resumed for every token of a stream. They serve what an endpoint does not take.
    """

    def __init__(
        self,
        endpoints: Mapping[str, ASGIApp],
        routes: Sequence[BaseRoute],
        lifespan: Callable[..., Any],
        keys: KeyRing | None,
        access: AccessConfig,
    ) -> None:
        """`endpoints`: POST endpoints by path; they write their own access lines."""
        layers = [Middleware(AccessLogged), Middleware(PlainPaths)]
        self._keys, self._has_browsers = keys, bool(access.cors_origin)
        self._endpoints = for_browsers(endpoints, access)
        if access.cors_origin:  # asks about its origin without a key
            layers.append(Middleware(CORSMiddleware, **_browsers(access)))
        if keys is not None:
            layers.append(Middleware(Authenticate, keys=keys, protect_metrics=access.protect_metrics))
        super().__init__(
            title="pdkv",
            version=__version__,
            description="Disaggregated prefill/decode serving behind OpenAI's API with vLLM's extras.",
            openapi_url=None,  # both are our own routes
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,  # to the host that the client names
            routes=[*(Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()), *routes],
            lifespan=lifespan,
            middleware=[*layers, Middleware(HeadAsGet)],
            exception_handlers=ERROR_HANDLERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None or not self._admits(scope):
            await super().__call__(scope, receive, send)
            return
        await serve(endpoint, scope, receive, send, self._has_browsers)

    def _admits(self, scope: Scope) -> bool:
        """Whether the request has a key, where it needs one; why not, `Authenticate` says."""
        try:
            if self._keys is not None:
                authenticate(scope, self._keys)
        except Unauthorized:
            return False
        return True

    def openapi(self) -> dict[str, Any]:
        """The pages as FastAPI describes them, and the bare endpoints."""
        if self.openapi_schema is None:
            self.openapi_schema = with_endpoints(super().openapi())
        return self.openapi_schema


def body_budget(limits: HttpLimits) -> ByteBudget:
    """The budget for all bodies that are being received or are not yet tokenized."""
    memory = limits.max_body_memory
    return ByteBudget(memory, "the bodies (--max-body-memory)", largest=limits.max_body_bytes, unread=memory // 4)


def model_provider(news: Callable[[], PoolNews], model: ServedModel) -> Callable[[], ServedModel]:
    """A function that returns the served model with those of pools: engines that come up may allow less than was asked
    for. `news`: what holds now.
    """

    @functools.lru_cache(maxsize=8)
    def changed(now: PoolNews) -> ServedModel:
        models = [
            each if most is None else dataclasses.replace(each, max_model_len=min(each.max_model_len, most))
            for each, most in zip_longest((model, *model.others), now.lengths)
        ]
        return dataclasses.replace(models[0], others=models[1:], shares=dict(now.shares), down=now.down)

    return lambda: changed(news())
