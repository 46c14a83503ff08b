"""The description of the API: valid, and true to what is sent back; no request of its shape, or near it, is a 5xx."""

import functools
import json
import re
from collections.abc import Callable
from typing import Any, cast

import pytest
from asgi_client import call
from coroutines import run
from fake_dispatcher import FakeDispatcher, say
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reply_check import check
from small_app import MODEL, eos, ids, make_app
from starlette.routing import Route

from pdkv.router.http.pages import status_pages
from pdkv.router.http.pages.openapi import OPERATIONS, ErrorReply, Health
from pdkv.router.http.pages.tokenize import DetokenizeReply, TokenizeReply
from pdkv.router.http.read.bodies import ChatBody, CompletionBody
from pdkv.router.http.responses_api.protocol import ResponsesBody

USER = [{"role": "user", "content": "x"}]


@functools.cache
def openapi() -> dict[str, Any]:
    return cast(FastAPI, make_app(FakeDispatcher())).openapi()


def answering() -> FakeDispatcher:
    return FakeDispatcher(say([*ids("ab"), eos()]))


def test_it_is_valid_openapi() -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    document = run(call(make_app(FakeDispatcher()), "GET", "/openapi.json")).json()
    validator.validate(document)
    assert document["openapi"].startswith("3.1")
    assert document == json.loads(json.dumps(openapi()))
    assert [of["name"] for of in document["paths"]["/metrics"]["get"]["parameters"]] == ["fresh"]


def test_every_route_is_described() -> None:
    routes = [route for route in make_app(FakeDispatcher()).routes if isinstance(route, Route)]
    served = {
        (method, re.sub(":path", "", route.path))
        for route in routes
        for method in route.methods or ()
        if method != "HEAD"
    }
    own = ("/docs", "/openapi.json", "/admin", "/dashboard")
    described = {(method.upper(), path) for path, item in openapi()["paths"].items() for method in item}
    assert described == {(method, path) for method, path in served if not path.startswith(own)}


def test_every_field_of_a_body_is_in_the_schema() -> None:
    schemas = openapi()["components"]["schemas"]
    for body in (CompletionBody, ChatBody, ResponsesBody):
        assert set(schemas[body.__name__]["properties"]) == set(body.__struct_fields__)
        assert schemas[body.__name__]["additionalProperties"] is False
    assert schemas["ChatBody"]["properties"]["store"]["anyOf"][0]["enum"] == [False]
    assert schemas["ChatBody"]["required"] == ["messages"]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    app = make_app(FakeDispatcher())
    page = run(call(app, "GET", "/docs"))
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    html = page.body.decode()
    assert "://" not in html
    assert "url: 'openapi.json'" in html
    pytest.importorskip("fastapi_offline")
    for file in re.findall(r'(?:src|href)="([^"]*)"', html):
        reply = run(call(app, "GET", f"/{file}"))
        assert (reply.status, len(reply.body) > 1000) == (200, True), file
    for wanted in ("bytes=a-b", "bytes=99999999-", "bytes=0-1"):  # all of it, which is never wrong
        assert run(call(app, "GET", f"/{file}", headers={"range": wanted})).status == 200
    for path in ("/docs/redoc.standalone.js", "/docs/../pyproject.toml", "/docs/__init__.py"):
        assert run(call(app, "GET", path)).status == 404


@pytest.mark.parametrize("extras", [{}, {"return_token_ids": True, "n": 2}, {"prompt_logprobs": 1, "stop": "b"}])
@pytest.mark.parametrize("logprobs", [False, True])
def test_whole_replies_have_openai_s_types(extras: dict[str, Any], logprobs: bool) -> None:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion
    from openai.types.responses import Response

    app = make_app(answering())
    asked: dict[str, Any] = {"logprobs": 2} if logprobs else {}
    body = {"prompt": "xy", **asked, **extras}
    Completion.model_validate(run(call(app, "POST", "/v1/completions", body)).json())
    asked = {"logprobs": True, "top_logprobs": 2} if logprobs else {}
    body = {"messages": USER, **asked, **extras}
    ChatCompletion.model_validate(run(call(app, "POST", "/v1/chat/completions", body)).json())
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2} if logprobs else {}
    Response.model_validate(run(call(app, "POST", "/v1/responses", {"input": "x", **asked})).json())


@pytest.mark.parametrize("continuous", [False, True])
def test_chunks_have_openai_s_type(continuous: bool) -> None:
    from openai.types.chat import ChatCompletionChunk

    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": continuous}}
    body = {"messages": USER, "logprobs": True, "return_token_ids": True, **options}
    events = run(call(make_app(answering()), "POST", "/v1/chat/completions", body)).events()
    assert events.pop() == "[DONE]"
    for event in events:
        ChatCompletionChunk.model_validate(event)


def test_other_replies_have_their_types() -> None:
    dispatcher = FakeDispatcher()
    app = make_app(dispatcher)
    for path, kind in (
        ("/v1/models", status_pages.ModelList),
        (f"/v1/models/{MODEL}", status_pages.ModelCard),
        ("/v1/models/other", ErrorReply),
        ("/health", Health),
        ("/version", status_pages.Version),
        ("/load", status_pages.ServerLoad),
        ("/nowhere", ErrorReply),
    ):
        check(run(call(app, "GET", path)).json(), kind)
    dispatcher.connector_problems = {"decode-1": "no store"}
    check(run(call(app, "GET", "/health")).json(), Health)
    dispatcher.ready = False
    check(run(call(app, "GET", "/health")).json(), ErrorReply)
    check(run(call(app, "POST", "/tokenize", {"prompt": "x", "return_token_strs": True})).json(), TokenizeReply)
    check(run(call(app, "POST", "/detokenize", {"tokens": [5]})).json(), DetokenizeReply)
    check(run(call(app, "POST", "/detokenize", {"tokens": "x"})).json(), ErrorReply)


STRANGE = st.sampled_from(
    [None, True, -1, 2**63, 1e308, "", "\ud7ff\x00é😀", [], [[]], {}, {"type": "text"}, [{"a": []}]]
)
EXAMPLES = 60
TEXTS = st.sampled_from(["", "x", "Hello é", "</s>", "a" * 300])


def values(schema: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """What a schema allows, by small values."""
    if "$ref" in schema:
        return values(openapi()["components"]["schemas"][schema["$ref"].rpartition("/")[2]], depth)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of([values(option, depth) for option in schema["anyOf"]])
    match schema.get("type"):
        case "object" if "properties" in schema:
            return objects(schema, depth)
        case "object":
            item = schema.get("additionalProperties")
            names = st.sampled_from(["5", "enable_thinking", "messages", "x"])
            return st.dictionaries(names, values(item, depth + 1) if isinstance(item, dict) else STRANGE, max_size=2)
        case "array":
            size = min(3 - min(depth, 2), schema.get("maxItems", 3))
            return st.lists(values(schema.get("items", {}), depth + 1), max_size=size)
        case "string":
            return TEXTS
        case "integer":
            return st.sampled_from([0, 1, 2, 5, -1, 128, 2**31, 2**63 - 1, -(2**63)])
        case "number":
            return st.sampled_from([0, 0.5, 1.0, -2, 2, 1e-9, 1e300])
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return STRANGE


def objects(schema: dict[str, Any], depth: int) -> st.SearchStrategy[dict[str, Any]]:
    """All that is required, and a few of the others: requests with everything are refused at once."""
    properties = schema["properties"]
    required = {name: values(properties[name], depth) for name in schema.get("required", ())}
    others = sorted(set(properties) - set(required))

    def with_some(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({**required, **{name: values(properties[name], depth) for name in names}})

    return st.lists(st.sampled_from(others), max_size=4, unique=True).flatmap(with_some) if others else with_some([])


def requests(path: str) -> st.SearchStrategy[Any]:
    [operation] = [op for op in OPERATIONS if op.path == path and op.method == "post"]
    bodies = st.one_of([values({"$ref": f"#/{kind.__name__}"}) for kind in operation.bodies])

    def spoilt(body: dict[str, Any]) -> st.SearchStrategy[Any]:
        names = st.sampled_from([*sorted(body), "mood"])
        return st.tuples(names, STRANGE).map(lambda change: {**body, change[0]: change[1]})

    return st.one_of(bodies, bodies, bodies.flatmap(spoilt))


def check_no_server_error(path: str, send: Callable[[Any], Any], body: Any) -> None:
    exchange = send(body)
    assert exchange.status in (200, 400, 404), (body, exchange.body)
    if exchange.status != 200:
        check(exchange.json(), ErrorReply)
        assert exchange.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]
)
def test_no_request_of_the_schema_is_a_server_error(path: str) -> None:
    app = make_app(answering())

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(requests(path))
    def check_one(body: Any) -> None:
        check_no_server_error(path, lambda b: run(call(app, "POST", path, b)), body)

    check_one()
