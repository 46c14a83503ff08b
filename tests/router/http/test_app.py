"""Everything around generation: health, models, topology, statuses of failures, clients that go away."""

import asyncio
import gc
import json
import math
import subprocess
import sys
import weakref
from typing import Any, cast

import pytest
from asgi_client import Exchange, begin, call
from coroutines import run
from fake_dispatcher import FakeDispatcher, say, tokens
from small_app import MAX_MODEL_LEN, MODEL, ids, make_app, served
from starlette.types import Message

from pdkv.config import AccessConfig, HttpLimits
from pdkv.errors import (
    EngineDied,
    EngineUnavailable,
    InvalidRequest,
    PdkvError,
    RequestAborted,
    RequestFailed,
    RequestTimeout,
)
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.router.http.app import create_app
from pdkv.router.http.endpoint import SERVER_SEND
from pdkv.router.http.read.text_pool import INLINE_BYTES
from pdkv.testing import VirtualClock
from pdkv.text import Tokenizer


def get(dispatcher: FakeDispatcher, path: str, method: str = "GET") -> tuple[int, dict]:
    reply = run(call(make_app(dispatcher), method, path))
    return reply.status, reply.json()


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_router_is_alive_before_its_engines_are_ready(path: str) -> None:
    dispatcher = FakeDispatcher()
    dispatcher.ready = False
    status, body = get(dispatcher, path)
    assert (status, body["error"]["code"]) == (503, "not_ready")
    assert get(dispatcher, "/live") == (200, {"status": "ok"})
    dispatcher.ready = True
    dispatcher.fallback.cause = "disaster"  # lately, and there is no other deployment
    assert get(dispatcher, path) == (200, {"status": "ok"})
    dispatcher.connector_problems = {"decode-0": "no answer"}
    degraded = {"status": "degraded", "connector_problems": {"decode-0": "no answer"}}
    assert get(dispatcher, path) == (200, degraded)  # they serve all the same


def test_models() -> None:
    dispatcher = FakeDispatcher()
    status, body = get(dispatcher, "/v1/models")
    assert (status, body["object"]) == (200, "list")
    [card] = body["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", MAX_MODEL_LEN)
    status, same = get(dispatcher, f"/v1/models/{MODEL}")
    assert (status, same | {"created": 0}) == (200, card | {"created": 0}), "each app was made at a time of its own"
    status, body = get(dispatcher, "/v1/models/org/other")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


def test_a_model_of_several_names_has_the_first_one_in_answers() -> None:
    dispatcher = FakeDispatcher(say(ids("x")))
    app = create_app(cast(Dispatcher, dispatcher), served(names=["ORG/a", "b"]))
    listed = run(call(app, "GET", "/v1/models", None)).json()["data"]
    assert [card["id"] for card in listed] == ["ORG/a", "b"]
    for name in ("ORG/a", "b"):
        assert run(call(app, "GET", f"/v1/models/{name}", None)).json()["id"] == name
        reply = run(call(app, "POST", "/v1/completions", {"model": name, "prompt": "x", "max_tokens": 1}))
        assert (reply.status, reply.json()["model"]) == (200, "ORG/a")
    reply = run(call(app, "POST", "/v1/completions", {"model": "c", "prompt": "x"}))
    assert (reply.status, "this server has 'ORG/a', 'b'" in reply.json()["error"]["message"]) == (404, True)


def test_engines_with_less_room_make_the_models_length_less() -> None:
    dispatcher = FakeDispatcher(say(ids("x")))
    dispatcher.max_model_len = 50
    app = make_app(dispatcher)
    reply = run(call(app, "POST", "/v1/completions", {"model": MODEL, "prompt": [5] * 60}))
    assert reply.status == 400
    assert "50 tokens" in reply.json()["error"]["message"]
    assert get(dispatcher, "/v1/models")[1]["data"][0]["max_model_len"] == 50


def test_topology() -> None:
    assert get(FakeDispatcher(), "/topology") == (200, FakeDispatcher().topology())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/nowhere", 404),
        ("GET", "/health/", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
    ],
)
def test_unknown_paths_and_methods_have_openais_shape(method: str, path: str, status: int) -> None:
    got, body = get(FakeDispatcher(), path, method)
    assert got == status
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert path in body["error"]["message"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        *((path, "rankings of text only") for path in ("/score", "/pooling", "/v1/audio/transcriptions")),
        ("/v1/messages", "not by Anthropic's"),
        ("/v1/load_lora_adapter", "without adapters"),
        ("/reset_prefix_cache", "--api-key-file"),
    ],
)
def test_what_other_servers_have_is_said_not_to_be_here(path: str, words: str) -> None:
    for method in ("GET", "POST"):
        status, body = get(FakeDispatcher(), path, method)
        assert (status, words in body["error"]["message"]) == (404, True), body
    assert "text only" not in get(FakeDispatcher(), "/v1/nothing")[1]["error"]["message"]


def test_server_info() -> None:
    status, body = get(FakeDispatcher(), "/server_info")
    assert (status, body["model"]["id"], body["tool_parser"], body["reasoning_parser"]) == (200, MODEL, None, None)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineUnavailable("none"), 503, "engine_unavailable"),
        (EngineDied("dead", request_id="r"), 503, "engine_died"),
        (RequestTimeout("slow", request_id="r"), 504, "timeout"),
        (RequestFailed("broken", request_id="r"), 500, "request_failed"),
        (RequestAborted("the engine gave up", request_id="r"), 503, "aborted"),
        (InvalidRequest("an engine refuses it"), 400, None),
    ],
)
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_failure_has_its_status(error: PdkvError, status: int, code: str | None, prompt: str | list[str]) -> None:
    app = make_app(FakeDispatcher(lambda _: [error]))
    reply = run(call(app, "POST", "/v1/completions", {"model": MODEL, "prompt": prompt}))
    assert (reply.status, reply.json()["error"]["code"]) == (status, code)
    assert reply.json()["error"]["message"] == str(error)
    assert reply.headers["x-request-id"]
    assert ("retry-after" in reply.headers) == (status == 503)


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"prompt": ["a", "b"]}, {"stream": True}])
def test_no_engine_is_503(fields: dict) -> None:
    dispatcher = FakeDispatcher()
    dispatcher.available = False
    body = {"model": MODEL, "prompt": "a", **fields}
    assert run(call(make_app(dispatcher), "POST", "/v1/completions", body)).status == 503


async def test_one_failed_choice_fails_the_request_and_aborts_the_others() -> None:
    dispatcher = FakeDispatcher()
    exchange, task = begin(make_app(dispatcher), "POST", "/v1/completions", {"model": MODEL, "prompt": ["a", "b"]})
    await dispatcher.next_generation(1)
    dispatcher.generations[0].put(tokens(*ids("x")))
    dispatcher.generations[1].put(RequestFailed("broken", request_id="r"))
    await task
    assert exchange.status == 500
    assert dispatcher.generations[0].aborted


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"prompt": ["a", "b"]}])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_deltas", [0, 1])
async def test_a_client_that_goes_away_aborts_everything(fields: dict, stream: bool, num_deltas: int) -> None:
    dispatcher = FakeDispatcher()
    body = {"model": MODEL, "prompt": "a", "stream": stream, **fields}
    exchange, task = begin(make_app(dispatcher), "POST", "/v1/completions", body)
    generation = await dispatcher.next_generation(0)
    if num_deltas:
        generation.put(tokens(*ids("x")))
        if stream:
            await exchange.wait_for_writes(1)
        if "n" in fields:
            await dispatcher.next_generation(1)
    exchange.disconnect()
    await task
    assert dispatcher.generations
    assert all(generation.aborted for generation in dispatcher.generations)
    assert len(exchange.writes) == (num_deltas if stream else 0)
    assert len(asyncio.all_tasks()) == 1  # nothing is left behind


async def test_a_client_that_goes_away_before_its_body_is_whole_starts_nothing() -> None:
    dispatcher = FakeDispatcher()
    exchange, task = begin(make_app(dispatcher), "POST", "/v1/completions", {"model": MODEL, "prompt": "a"})
    exchange._to_send = [{"type": "http.request", "body": b"{", "more_body": True}]
    exchange.disconnect()
    await task
    assert exchange.status == 0
    assert dispatcher.generations == []


async def test_a_finished_request_leaves_no_task_behind() -> None:
    app = make_app(FakeDispatcher(say(ids("ab"))))
    for fields in ({}, {"n": 3}, {"stream": True}, {"stream": True, "n": 3}):
        await call(app, "POST", "/v1/completions", {"model": MODEL, "prompt": "a", **fields})
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1


def test_a_client_bounds_the_whole_of_its_request_and_the_server_each_wait_for_a_token() -> None:
    """Router 1: the server's bound was one of the whole, was no option, and cut streams at 600 s."""
    dispatcher = FakeDispatcher(say(ids("ab")))
    app = make_app(dispatcher, limits=HttpLimits(request_timeout_s=60.0))
    body = {"model": MODEL, "prompt": "a"}
    for headers in ({}, {"x-pd-timeout-s": "0.5"}, {"x-pd-timeout-s": "900"}):
        run(call(app, "POST", "/v1/completions", body, headers))
    assert [request.stall_timeout_s for request in dispatcher.requests] == [60.0] * 3
    unbounded, short, long = (request.timeout_s for request in dispatcher.requests)
    assert unbounded == math.inf
    assert 0 < short < 0.5  # the rest of it went by in the router
    assert 60 < long < 900


@pytest.mark.parametrize("size", [0, INLINE_BYTES + 1], ids=["inline", "thread"])
@pytest.mark.parametrize("n", [1, 2])
def test_the_body_the_tokenizer_and_the_engines_share_one_deadline(
    size: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    monkeypatch.setattr("pdkv.router.http.server.deadline.MONOTONIC", clock)
    dispatcher = FakeDispatcher(say(ids("ab")))
    app = make_app(dispatcher)
    exchange = Exchange("POST", "/v1/completions", b"", {"x-pd-timeout-s": "10"})
    exchange._to_send[0]["body"] = json.dumps({"model": MODEL, "prompt": "a", "n": n}).encode().ljust(size)
    encode = Tokenizer.encode

    async def receive() -> Message:
        clock.advance(4.0 if exchange._to_send else 0.0)
        return await exchange.receive()

    def slow(self: Tokenizer, text: str, **options: bool) -> list[int]:
        clock.advance(3.0)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    run(app(exchange.scope, receive, exchange.send))  # type: ignore[arg-type]
    assert exchange.status == 200
    assert [request.timeout_s for request in dispatcher.requests] == [3.0] * n


def test_all_choices_share_the_deadline_of_their_request() -> None:
    dispatcher = FakeDispatcher(say(ids("ab")))
    body = {"model": MODEL, "prompt": "a", "n": 2}
    run(call(make_app(dispatcher), "POST", "/v1/completions", body, {"x-pd-timeout-s": "60"}))
    first, second = dispatcher.requests
    assert second.timeout_s < first.timeout_s


async def test_a_defect_is_500_in_openais_shape() -> None:
    class Broken(FakeDispatcher):
        def topology(self) -> dict:
            raise ZeroDivisionError

    exchange, task = begin(make_app(Broken()), "GET", "/topology")
    with pytest.raises(ZeroDivisionError):  # for the server's log
        await task
    assert (exchange.status, exchange.json()["error"]["code"]) == (500, "internal_error")


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_defect_of_an_endpoint_is_answered_where_nothing_was(is_begun: bool) -> None:
    def broken(_: Any) -> Any:
        raise ZeroDivisionError

    dispatcher = FakeDispatcher() if is_begun else FakeDispatcher(broken)
    exchange, task = begin(make_app(dispatcher), "POST", "/v1/completions", {"prompt": "a", "stream": True})
    if is_begun:
        (await dispatcher.next_generation(0)).put(tokens(*ids("x")))
        await exchange.wait_for_writes(1)
        dispatcher.generations[0].put(ZeroDivisionError())  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        await task
    assert exchange.status == (200 if is_begun else 500)
    assert is_begun or exchange.json()["error"]["code"] == "internal_error"


async def test_only_the_heads_of_answers_pass_what_stands_around_them_for_browsers() -> None:
    app = make_app(FakeDispatcher(say(ids("ab"))), access=AccessConfig(cors_origin=("https://a.example",)))
    headers = {"origin": "https://a.example"}
    exchange = await call(app, "POST", "/v1/completions", {"prompt": "a"}, headers)
    assert exchange.headers["access-control-allow-origin"] == "https://a.example"
    assert SERVER_SEND not in exchange.scope
    asked = await call(app, "OPTIONS", "/v1/completions", None, headers | {"access-control-request-method": "POST"})
    assert (asked.status, asked.headers["access-control-allow-origin"]) == (200, "https://a.example")


async def test_a_request_leaves_nothing_for_the_collector() -> None:
    app = make_app(FakeDispatcher(say(ids("ab"))), access=AccessConfig(cors_origin=("https://a.example",)))
    await call(app, "POST", "/v1/completions", {"prompt": "a"})  # what is made once
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(await call(app, "POST", "/v1/completions", {"prompt": "a"}))
        await asyncio.sleep(0)
        assert gone() is None  # its scope had its own `send`
    finally:
        gc.enable()


@pytest.mark.parametrize("path", ["/metrics", "/topology"])
def test_fresh_is_true_or_false(path: str) -> None:
    """Any word but "true" was taken for false."""
    for word in ("maybe", "", "2", "yes"):
        status, body = get(FakeDispatcher(), f"{path}?fresh={word}")
        assert (status, body["error"]["param"], repr(word) in body["error"]["message"]) == (400, "fresh", True)
    assert run(call(make_app(FakeDispatcher()), "GET", f"{path}?fresh=false")).status == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/docs"])
def test_a_page_has_a_head(path: str) -> None:
    assert run(call(make_app(FakeDispatcher()), "HEAD", path)).status == 200


def test_the_router_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, pdkv.router.http.app; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
