"""The OpenAPI description of bare endpoints, made from the types of their bodies.

Replies to prompts are OpenAI's, whose description is not repeated here.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from pdkv.router.http.pages.page import ERROR, MAY_NEED_KEY
from pdkv.router.http.pages.tokenize import DetokenizeReply, TokenizeReply
from pdkv.router.http.read.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    RerankBody,
    TokenizeChatBody,
    TokenizeTextBody,
)
from pdkv.router.http.responses_api.protocol import ResponsesBody

Struct = type[msgspec.Struct]

_JSON = "application/json"
_ERRORS = {
    "400": "a field, the JSON or the length is invalid; `param` names the field",
    "401": "no API key, or one that is not known, where the server has keys",
    "404": "another model",
    "408": "the body did not arrive in time",
    "413": "a body of more than --max-body-bytes",
    "415": "a content type other than application/json",
    "429": "the queue is full, or a key's limit is reached; with retry-after",
    "500": "the request failed in an engine",
    "503": "no engine, too much is in progress, or the server is stopping; with retry-after",
    "504": "the deadline passed",
}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Details of an error."""

    message: str
    type: str  # such as invalid_request_error, rate_limit_error, server_error
    param: str | None = None  # the field at fault
    code: str | None = None


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every status from 400 on, and the last event of a stream that failed."""

    error: ErrorDetail


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of a server that can serve requests; a degraded server computes KV that it would have loaded."""

    status: Literal["ok", "degraded"]
    connector_problems: dict[str, str] | None = None


class Operation(NamedTuple):
    """One endpoint."""

    method: str
    path: str
    summary: str
    reply: Struct | None  # None: an object as OpenAI's API has it
    bodies: Sequence[Struct] = ()  # one of these types
    streams: bool = False
    errors: Sequence[str] = ()
    tag: str = "server"


_OF_BODIES = ("400", "401", "404", "408", "413", "415", "503")


def _generates(path: str, summary: str, body: Struct, *, streams: bool = True) -> Operation:
    return Operation("post", path, summary, None, [body], streams, tuple(_ERRORS), "generation")


def _of_tokens(path: str, summary: str, whole: Struct, *bodies: Struct) -> Operation:
    return Operation("post", path, summary, whole, bodies, errors=_OF_BODIES, tag="tokens")


OPERATIONS = (
    _generates("/v1/completions", "Complete prompts", CompletionBody),
    _generates("/v1/chat/completions", "Answer a conversation", ChatBody),
    _generates("/v1/responses", "Answer a conversation of items", ResponsesBody),
    _generates("/v1/embeddings", "Embed texts", EmbeddingBody, streams=False),
    _generates("/v1/rerank", "Rank documents for a query", RerankBody, streams=False),
    _generates("/rerank", "As /v1/rerank", RerankBody, streams=False),
    _of_tokens("/tokenize", "Tokens of a text or of a conversation", TokenizeReply, TokenizeTextBody, TokenizeChatBody),
    _of_tokens("/detokenize", "The text of tokens", DetokenizeReply, DetokenizeBody),
    Operation("get", "/live", "Whether the router runs", reply=Health),
    Operation("get", "/ready", "As /health", reply=Health, errors=("503",)),
    Operation("get", "/health", "Whether requests can be served", reply=Health, errors=("503",)),
    Operation("get", "/ping", "As /health", reply=Health, errors=("503",)),
    Operation("post", "/ping", "As /health", reply=Health, errors=("503",)),
)
"""The endpoints that are no pages."""


def with_endpoints(document: dict[str, Any]) -> dict[str, Any]:
    """The document as OpenAPI 3.1, with the descriptions of `OPERATIONS` added."""
    types = {kind for of in OPERATIONS for kind in (*of.bodies, of.reply) if kind is not None} | {ErrorReply}
    ordered = sorted(types, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    refs = dict(zip(ordered, schemas, strict=True))
    for operation in OPERATIONS:
        document["paths"].setdefault(operation.path, {})[operation.method] = _describe(operation, refs)
    parts = document.setdefault("components", {})
    parts.setdefault("schemas", {}).update(components)
    parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": "--api-key-file"}}
    return document


def _one_of(kinds: Sequence[Struct], refs: dict[Struct, dict[str, Any]]) -> dict[str, Any]:
    schemas = [refs[kind] for kind in kinds]
    return schemas[0] if len(schemas) == 1 else {"oneOf": schemas}


def _describe(operation: Operation, refs: dict[Struct, dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {_JSON: {"schema": refs[operation.reply] if operation.reply else {"type": "object"}}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    failed = {_JSON: ERROR}
    described: dict[str, Any] = {
        "operationId": operation.method + operation.path.replace("/", "_"),
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": {
            "200": {"description": "OK", "content": content},
            **{status: {"description": _ERRORS[status], "content": failed} for status in operation.errors},
        },
    }
    if "401" in operation.errors:
        described["security"] = MAY_NEED_KEY
    if operation.bodies:
        schema = _one_of(operation.bodies, refs)
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return described
