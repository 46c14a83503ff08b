"""Endpoints beside generation that clients of vLLM ask: tokens, version, load, ping."""

import asyncio
from typing import Any

import pytest
from asgi_client import Exchange, begin, call
from coroutines import clock, run
from coroutines import run as run_on_loop
from fake_dispatcher import FakeDispatcher, tokens
from small_app import MAX_MODEL_LEN, MODEL, ids, make_app, tokenizer

from pdkv import __version__
from pdkv.config import HttpApi, HttpLimits
from pdkv.router.http.read.text_pool import INLINE_BYTES
from pdkv.router.http.server.budget import ByteBudget, Held
from pdkv.testing import VirtualLoop


def post(path: str, body: Any, **options: Any) -> Exchange:
    return run(call(make_app(FakeDispatcher(), **options), "POST", path, body))


def test_a_text_is_tokenized_as_a_prompt_is() -> None:
    token_ids = tokenizer().encode("Hello é")
    expected = {"count": len(token_ids), "max_model_len": MAX_MODEL_LEN, "tokens": token_ids, "token_strs": None}
    assert post("/tokenize", {"prompt": "Hello é"}).json() == expected
    assert post("/tokenize", {"model": MODEL, "prompt": "Hello é", "add_special_tokens": False}).json() == expected
    strings = post("/tokenize", {"prompt": "Hello é", "return_token_strs": True}).json()["token_strs"]
    assert "".join(strings) == "HelloĠÃ©"


def test_a_conversation_is_rendered_first() -> None:
    body = post("/tokenize", {"messages": [{"role": "user", "content": "Hello"}]}).json()
    assert tokenizer().decode(body["tokens"]) == "user: Hello\n"
    assert body["count"] == len(body["tokens"])


def test_detokenizing_is_the_way_back() -> None:
    text = "a <s> é 😀"
    token_ids = post("/tokenize", {"prompt": text}).json()["tokens"]
    assert post("/detokenize", {"model": MODEL, "tokens": token_ids}).json() == {"prompt": text}
    assert post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_a_long_text_is_tokenized_off_the_event_loop() -> None:
    text = "ab " * INLINE_BYTES
    body = post("/tokenize", {"prompt": text}, max_model_len=10_000).json()
    assert body["tokens"] == tokenizer().encode(text)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "mood": 1}, 400, "mood"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "x" * 3_000_000}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "king", "content": ""}]}, 400, "messages[0].role"),
        ("/tokenize", {"messages": [], "prompt": "x"}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [5, 100_000]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5] * (MAX_MODEL_LEN + 1)}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": "other"}, 404, "model"),
        ("/detokenize", b"[", 400, None),
        ("/tokenize", b"[" * 100_000, 400, None),
    ],
)
def test_what_cannot_be_is_named(path: str, body: Any, status: int, param: str | None) -> None:
    reply = post(path, body)
    assert (reply.status, reply.json()["error"]["param"]) == (status, param), reply.body[:500]


def test_answers_have_the_requests_id() -> None:
    app = make_app(FakeDispatcher())
    for body, status in (({"prompt": "x"}, 200), ({"prompt": 5}, 400)):
        reply = run(call(app, "POST", "/tokenize", body, {"x-request-id": "mine"}))
        assert (reply.status, reply.headers["x-request-id"]) == (status, "mine")


def test_bounds_are_those_of_every_body() -> None:
    limits = HttpLimits(max_body_bytes=100)
    reply = post("/tokenize", {"prompt": "x" * 200}, limits=limits)
    assert (reply.status, reply.headers["connection"]) == (413, "close")
    full = ByteBudget(0, "the bodies")
    asyncio.run(full.wait(Held(), 1))  # the one that may be more

    async def ask() -> Exchange:
        return await clock().passing(
            call(make_app(FakeDispatcher(), bodies=full), "POST", "/tokenize", {"prompt": "x"})
        )

    reply = run_on_loop(ask(), VirtualLoop)
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")


def test_unknown_fields_are_dropped_where_the_server_says_so() -> None:
    api = HttpApi(unknown_fields="ignore")
    for path, body in (
        ("/tokenize", {"prompt": "x", "mood": 1}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x", "mood": 1}], "mood": 1}),
        ("/detokenize", {"tokens": [5], "mood": 1}),
    ):
        assert post(path, body, api=api).status == 200


def test_version_and_ping() -> None:
    dispatcher = FakeDispatcher()
    app = make_app(dispatcher)
    assert run(call(app, "GET", "/version")).json() == {"version": __version__}
    for method in ("GET", "POST"):
        assert run(call(app, method, "/ping")).status == 200
    dispatcher.ready = False
    for method in ("GET", "POST"):
        assert run(call(app, method, "/ping")).status == 503


async def test_load_is_the_number_of_requests_that_have_not_ended() -> None:
    dispatcher = FakeDispatcher()
    app = make_app(dispatcher)

    async def load() -> int:
        number: int = (await call(app, "GET", "/load")).json()["server_load"]
        return number

    assert await load() == 0
    _, task = begin(app, "POST", "/v1/completions", {"prompt": "x"})
    generation = await dispatcher.next_generation(0)
    assert await load() == 1
    generation.put(tokens(*ids("a"), end="stop"))
    await task
    assert await load() == 0
