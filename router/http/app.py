"""The router's HTTP application: OpenAI's API, health, metrics and topology."""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pdkv import __version__
from pdkv.base.limits import clip
from pdkv.config import AccessConfig, HttpApi, HttpLimits
from pdkv.models.config import ModelConfig
from pdkv.parsers.registry import find_reasoning_parser, find_tool_parser
from pdkv.router.admission.admission_queue import Admission
from pdkv.router.admission.api_keys import KeyRing
from pdkv.router.admission.tenants import Tenant
from pdkv.router.generations.operations import Operations
from pdkv.router.http.answer.completions import WholeCompletion
from pdkv.router.http.answer.replies import ReplyForms
from pdkv.router.http.answer.sse import ChunkEncoder
from pdkv.router.http.endpoint import GenerateEndpoint, Prepare
from pdkv.router.http.pages.admin import admin_routes
from pdkv.router.http.pages.cache_pages import CachePages
from pdkv.router.http.pages.docs_page import docs_routes
from pdkv.router.http.pages.openapi import openapi
from pdkv.router.http.pages.status_pages import StatusPages
from pdkv.router.http.pages.tokenize import TextEndpoint, detokenize, tokenize
from pdkv.router.http.read.decoding import CHAT, COMPLETION
from pdkv.router.http.read.intake import Intake
from pdkv.router.http.read.job import Job, prepare_chat, prepare_completion
from pdkv.router.http.read.served_model import Cancelled, ServedModel
from pdkv.router.http.read.text_pool import TextPool
from pdkv.router.http.responses_api.prepare import RESPONSES, Kept, prepare_responses
from pdkv.router.http.responses_api.replies import ResponseEvents, WholeResponse
from pdkv.router.http.responses_api.store import ResponseStore
from pdkv.router.http.server.access_log import AccessLogged
from pdkv.router.http.server.auth import RESET_PATH, Authenticate, PlainPaths
from pdkv.router.http.server.budget import ByteBudget
from pdkv.router.http.server.drain import Drain
from pdkv.router.http.server.errors import error_body, json_response
from pdkv.router.http.server.unwound import Deferred, Unwound
from pdkv.router.metrics.held import held_metrics
from pdkv.router.metrics.instruments import NO_INSTRUMENTS, Instruments
from pdkv.router.metrics.keys import key_metrics
from pdkv.router.metrics.requests import Endpoint, Metrics
from pdkv.text import Tokenizer

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Dispatcher


def create_app(
    dispatcher: "Dispatcher",
    tokenizer: Tokenizer,
    model_config: ModelConfig,
    served_model_name: str,
    max_model_len: int | None = None,
    *,
    aliases: Sequence[str] = (),
    limits: HttpLimits | None = None,
    api: HttpApi | None = None,
    bodies: ByteBudget | None = None,
    admission: Admission | None = None,
    keys: KeyRing | None = None,
    access: AccessConfig | None = None,
    sampling_defaults: Mapping[str, Any] | None = None,
    logits_processors: Sequence[str] = (),
    drain: Drain | None = None,
    operations: Operations | None = None,
    instruments: Instruments = NO_INSTRUMENTS,
) -> Starlette:
    """The ASGI application in front of a dispatcher, which the caller connects and closes. Its `state` has the
    `caches` and `figures` that `create_admin_app` takes.

    Args:
        served_model_name: that of answers and metrics.
        max_model_len: longest prompt + output in tokens; None: the model's. Engines with less make it less.
        aliases: other names of the model.
        limits: bounds of bodies and of waits (default: the options').
        api: how requests are read (default: the options').
        sampling_defaults: fields of SamplingParams that requests get where they say nothing (`read_sampling_defaults`).
        logits_processors: names of those that engines have.
        instruments: what else looks on; started and closed by the caller.
        bodies: the budget of bodies' bytes, where others take of it, too.
        admission: the queue in front of the dispatcher (default: one with the options' defaults).
        keys: API keys that clients need (default: they need none).
        access: the rest of who may do what.
        drain: counts the requests that generate (default: over `admission`).
        operations: where there are `keys`, what those with `admin` may have done.
    """
    limits, api = limits or HttpLimits(), api or HttpApi()
    bodies = bodies or body_budget(limits)
    admission = admission or Admission(dispatcher)
    drain = drain or Drain(admission)
    _ = tokenizer.max_token_chars  # of 150,000 tokens it takes a tenth of a second: not within the first request
    metrics = Metrics(dispatcher, served_model_name, instruments, admission)
    if keys is not None:
        metrics.register(lambda: key_metrics(keys.tenants))
    served = ServedModel(
        names=(served_model_name, *aliases),
        tokenizer=tokenizer,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        max_model_len=model_config.num_positions if max_model_len is None else max_model_len,
        sampling_defaults=sampling_defaults or {},
        tool_parser=find_tool_parser(api.tool_parser, tokenizer.chat_template_source, api.tool_parser_plugin),
        reasoning_parser=find_reasoning_parser(api.reasoning_parser),
        stops_in_thoughts=api.stop_in_reasoning,
        logits_processors=tuple(logits_processors),
        takes_templates=api.trust_request_chat_template,
    )
    model = _model_provider(dispatcher, served)
    caches = CachePages(dispatcher, model, keys)
    pool = TextPool()
    held = {
        "open_requests": lambda: drain.num_requests,
        "body_bytes": lambda: bodies.held,
        "waiting_bodies": lambda: bodies.num_waiting,
        "text_bytes": lambda: pool.held,
        "open_generations": lambda: dispatcher.num_running,
    }
    metrics.register(lambda: held_metrics(held))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        pool.close()

    shared = _Shared(admission, model, Intake(limits, bodies, pool), limits, api)
    routes = [
        *_generating(shared, drain, metrics, pool, instruments),
        *_on_texts(shared),
        *StatusPages(dispatcher, model, metrics, drain).routes(),
        *docs_routes(),
        *(admin_routes(dispatcher, operations, caches) if keys is not None and operations is not None else ()),
    ]
    app = _App(
        title="pdkv",
        version=__version__,
        openapi_url=None,  # both are routes of our own
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # to the host that the client names
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(AccessLogged), *_middleware(keys, access or AccessConfig())],
        exception_handlers={HTTPException: _http_error, Exception: _internal_error},
    )
    app.state.caches, app.state.figures = caches, metrics.figures
    return app


class _Shared(NamedTuple):
    """What endpoints have in common."""

    admission: Admission
    model: Callable[[], ServedModel]
    intake: Intake
    limits: HttpLimits
    api: HttpApi


def _generating(
    shared: _Shared, drain: Drain, metrics: Metrics, pool: TextPool, instruments: Instruments
) -> list[Route]:
    ignores_unknown = shared.api.ignores_unknown

    def completion(body: bytes | bytearray, model: ServedModel, cancelled: Cancelled, _: Tenant) -> Job:
        return prepare_completion(COMPLETION.decode(body, ignore_unknown=ignores_unknown), model, cancelled)

    def chat(body: bytes | bytearray, model: ServedModel, cancelled: Cancelled, _: Tenant) -> Job:
        return prepare_chat(CHAT.decode(body, ignore_unknown=ignores_unknown), model, cancelled)

    def respond(body: bytes | bytearray, model: ServedModel, cancelled: Cancelled, tenant: Tenant) -> Job:
        kept = Kept(responses, tenant.keeper) if tenant.digest and responses.keep_s else None
        return prepare_responses(RESPONSES.decode(body, ignore_unknown=ignores_unknown), model, cancelled, kept)

    def route(path: str, name: Endpoint, prepare: Prepare, forms: ReplyForms) -> Route:
        endpoint = GenerateEndpoint(
            name,
            prepare,
            forms,
            admission=shared.admission,
            model=shared.model,
            metrics=metrics,
            limits=shared.limits,
            intake=shared.intake,
            pool=pool,
            answers=answers,
            tracer=instruments.tracer,
        )
        return Route(path, Deferred(drain.counted(endpoint)), methods=["POST"])

    limits = shared.limits
    responses = ResponseStore(limits.max_kept_responses, limits.keep_responses_s, limits.max_body_bytes)
    answers = ByteBudget(shared.limits.max_answer_memory, "the answers that are held (--max-answer-memory)")
    completions = ReplyForms(ChunkEncoder, WholeCompletion)
    return [
        route("/v1/completions", "completions", completion, completions),
        route("/v1/chat/completions", "chat_completions", chat, completions),
        route("/v1/responses", "responses", respond, ReplyForms(ResponseEvents, WholeResponse)),
    ]


def _on_texts(shared: _Shared) -> list[Route]:
    return [
        Route("/tokenize", TextEndpoint(tokenize, **shared._asdict()), methods=["POST"]),
        Route("/detokenize", TextEndpoint(detokenize, **shared._asdict()), methods=["POST"]),
    ]


class _App(FastAPI):
    """FastAPI over bare ASGI endpoints: no pydantic between a request and its engines, and a description of our own.

    Its own layers around each request, which nothing here needs, cost a quarter of a small request's CPU: left out.
    """

    __call__ = Starlette.__call__

    def build_middleware_stack(self) -> ASGIApp:
        return Unwound(Starlette.build_middleware_stack(self), _internal_error)

    def openapi(self) -> dict[str, Any]:
        return openapi()


def _middleware(keys: KeyRing | None, access: AccessConfig) -> list[Middleware]:
    """The outermost first: a browser asks about its origin without a key."""
    found = [Middleware(PlainPaths)]
    if access.cors_origin:
        found.append(
            Middleware(
                CORSMiddleware, allow_origins=access.cors_origin, allow_methods=["GET", "POST"], allow_headers=["*"]
            )
        )
    if keys is not None:
        found.append(Middleware(Authenticate, keys=keys, protect_metrics=access.protect_metrics))
    return found


def body_budget(limits: HttpLimits) -> ByteBudget:
    """Of all bodies that are received or not yet tokenized."""
    memory = limits.max_body_memory
    return ByteBudget(memory, "the bodies (--max-body-memory)", largest=limits.max_body_bytes, unread=memory // 4)


def _model_provider(dispatcher: "Dispatcher", model: ServedModel) -> Callable[[], ServedModel]:
    """The model as it is served now: engines that come up may allow less than was asked for."""
    limit = model.max_model_len
    by_limit = {limit: model}

    def current() -> ServedModel:
        engines_limit = dispatcher.max_model_len
        now = limit if engines_limit is None else min(limit, engines_limit)
        if now not in by_limit:
            by_limit[now] = model.with_max_model_len(now)
        return by_limit[now]

    return current


_TEXT_ALONE = "this server generates text only (completions, chat, responses)"
_OTHERS = (
    "/v1/embeddings /embeddings /score /v1/score /rerank /v1/rerank /v2/rerank /pooling /classify "
    "/v1/audio/ /v1/images/ /v1/moderations /v1/realtime"
)
_NOT_HERE = {
    **dict.fromkeys(_OTHERS.split(), _TEXT_ALONE),
    "/v1/messages": f"{_TEXT_ALONE} by OpenAI's API, not by Anthropic's",
    "/v1/load_lora_adapter": "this server serves one model, without adapters",
    "/v1/unload_lora_adapter": "this server serves one model, without adapters",
    RESET_PATH: "it takes a server with API keys (--api-key-file) and an admin's; without, see `pd cache clear`",
}
"""What other servers have, and why it is not there."""


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    message = f"{request.method} {clip(path)}: {error.detail}"  # its url trusts the Host header
    if error.status_code == 404:
        message += next((f": {why}" for start, why in _NOT_HERE.items() if path.startswith(start)), "")
    response = json_response(error_body(message, status=error.status_code), status=error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _internal_error(request: Request, error: Exception) -> Response:
    """A defect of the router; the server logs the exception itself."""
    return json_response(error_body("internal error", status=500, code="internal_error"), status=500)
