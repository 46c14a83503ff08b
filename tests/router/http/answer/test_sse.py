"""Streams: what each event holds, one write per step, and how a stream ends when something fails."""

import asyncio
from typing import Any

import pytest
from asgi_client import Exchange, begin, call
from coroutines import run
from fake_dispatcher import FakeDispatcher, logprob, say, tokens
from small_app import MODEL, eos, ids, make_app, tokenizer

from pdkv.base.trace_context import new_trace
from pdkv.errors import EngineDied, RequestTimeout
from pdkv.router.http.answer import exchange as exchanges


def stream(dispatcher: FakeDispatcher, **fields: Any) -> Exchange:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    body = {"model": MODEL, "stream": True, **fields}
    if "messages" not in fields:
        body.setdefault("prompt", "Hello")
    return run(call(make_app(dispatcher), "POST", path, body))


USER = [{"role": "user", "content": "x"}]


def test_a_streamed_completion() -> None:
    reply = stream(FakeDispatcher(say([*ids("aé"), eos()])))
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, done = reply.events()
    assert done == "[DONE]"
    assert len({chunk.pop("id") for chunk in chunks}) == 1
    assert all(isinstance(chunk.pop("created"), int) for chunk in chunks)
    choice = {"index": 0, "logprobs": None, "finish_reason": None}
    frame = {"object": "text_completion", "model": MODEL}
    assert chunks == [
        frame | {"choices": [choice | {"text": "a"}]},
        frame | {"choices": [choice | {"text": ""}]},
        frame | {"choices": [choice | {"text": "é"}]},
        frame | {"choices": [choice | {"text": "", "finish_reason": "stop", "stop_reason": None}]},
    ]


def test_a_streamed_chat_completion() -> None:
    *chunks, done = stream(FakeDispatcher(say([*ids("ab"), eos()])), messages=USER).events()
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {"content": ""},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]


@pytest.mark.parametrize("fields", [{}, {"messages": USER}])
def test_usage_is_the_last_chunk_where_asked_for(fields: dict[str, Any]) -> None:
    dispatcher = FakeDispatcher(say([*ids("ab"), eos()]))
    dispatcher.num_cached_tokens = 1
    *chunks, usage, done = stream(dispatcher, stream_options={"include_usage": True}, **fields).events()
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    num_prompt = len(dispatcher.requests[0].prompt_token_ids)
    assert usage["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 3,
        "total_tokens": num_prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_the_pieces_of_a_stream_join_to_the_whole_reply() -> None:
    answer = [*ids('naïve €\n\n"\\ \u2028 ENx'), eos()]
    fields = {"stop": ["END"], "logprobs": 1, "echo": True, "return_token_ids": True, "max_tokens": 50}
    [whole] = run(
        call(
            make_app(FakeDispatcher(say(answer))),
            "POST",
            "/v1/completions",
            {"model": MODEL, "prompt": "Hello", **fields},
        )
    ).json()["choices"]
    reply = stream(FakeDispatcher(say(answer)), **fields)
    choices = [event["choices"][0] for event in reply.events()[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [i for choice in choices for i in choice["token_ids"]] == whole["token_ids"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for choice in choices for value in choice["logprobs"][name]] == whole["logprobs"][name]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"] == tokenizer().encode("Hello")
    assert "\u2028" not in reply.body.decode()  # some clients take it for the end of a line


def test_chat_logprobs_are_streamed() -> None:
    a, b = ids("ab")
    dispatcher = FakeDispatcher(
        lambda _: [tokens(a, logprobs=[logprob(a)]), tokens(b, end="stop", logprobs=[logprob(b)])]
    )
    role, *chunks, _ = stream(dispatcher, messages=USER, logprobs=True, top_logprobs=1).events()
    assert role["choices"][0]["logprobs"] is None
    assert [chunk["choices"][0]["logprobs"]["content"][0]["token"] for chunk in chunks] == ["a", "b"]


async def test_each_delta_of_the_engines_is_one_write() -> None:
    dispatcher = FakeDispatcher()
    body = {"model": MODEL, "messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    exchange, task = begin(make_app(dispatcher), "POST", "/v1/chat/completions", body)
    generation = await dispatcher.next_generation(0)
    for number, delta in enumerate([tokens(*ids("ab")), tokens(*ids("cd")), tokens(*ids("e"), end="stop")], 1):
        assert len(exchange.writes) == number - 1
        generation.put(delta)
        await exchange.wait_for_writes(number)
    await task
    assert len(exchange.writes) == 4  # usage and [DONE] leave together


async def test_what_several_choices_got_in_one_step_is_one_write() -> None:
    dispatcher = FakeDispatcher()
    body = {"model": MODEL, "prompt": ["a", "b", "c"], "stream": True}
    exchange, task = begin(make_app(dispatcher), "POST", "/v1/completions", body)
    await dispatcher.next_generation(2)
    for generation in dispatcher.generations:
        generation.put(tokens(*ids("x")))
    await exchange.wait_for_writes(1)
    for generation in dispatcher.generations:
        generation.put(tokens(*ids("y"), end="stop"))
    await task
    assert len(exchange.writes) == 3
    choices = [event["choices"][0] for event in exchange.events()[:-1]]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(i, t) for t in "xy" for i in range(3)]


async def test_the_other_choices_start_behind_the_first_ones_first_delta() -> None:
    dispatcher = FakeDispatcher()
    body = {"model": MODEL, "prompt": ["a", "b"], "n": 2, "stream": True}
    exchange, task = begin(make_app(dispatcher), "POST", "/v1/completions", body)
    await dispatcher.next_generation(1)
    assert [request.choice for request in dispatcher.requests] == [0, 0]
    dispatcher.generations[1].put(tokens(*ids("x")))
    await exchange.wait_for_writes(1)
    assert [request.choice for request in dispatcher.requests] == [0, 0, 1]
    assert dispatcher.requests[2].prompt_token_ids == dispatcher.requests[1].prompt_token_ids
    dispatcher.generations[0].put(tokens(*ids("x"), end="stop"))
    await dispatcher.next_generation(3)
    for generation in dispatcher.generations[1:]:
        generation.put(tokens(end="length"))
    await task
    finished = [e["choices"][0]["index"] for e in exchange.events()[:-1] if e["choices"][0]["finish_reason"]]
    assert sorted(finished) == [0, 1, 2, 3]


async def test_a_stop_string_is_never_shown_and_ends_one_choice_only() -> None:
    dispatcher = FakeDispatcher()
    body = {"model": MODEL, "prompt": ["a", "b"], "stream": True, "stop": "END"}
    exchange, task = begin(make_app(dispatcher), "POST", "/v1/completions", body)
    await dispatcher.next_generation(1)
    first, second = dispatcher.generations
    for text in ("xE", "N", "D!"):
        first.put(tokens(*ids(text)))
    await first.over.wait()  # while the other one runs
    second.put(tokens(*ids("yEN"), end="length"))
    await task
    assert not second.aborted
    text = {0: "", 1: ""}
    for event in exchange.events()[:-1]:
        [choice] = event["choices"]
        text[choice["index"]] += choice["text"]
    assert text == {0: "x", 1: "yEN"}


def test_headers_name_the_engines_and_echo_the_clients_id() -> None:
    for fields in ({"stream": True}, {"stream": False}):
        app = make_app(FakeDispatcher(say(ids("ab"))))
        body = {"model": MODEL, "prompt": "x", **fields}
        reply = run(call(app, "POST", "/v1/completions", body, {"X-Request-Id": "mine"}))
        assert reply.headers["x-request-id"] == "mine"
        assert (reply.headers["x-pd-prefill-engine"], reply.headers["x-pd-decode-engine"]) == ("prefill-0", "decode-1")
        other = run(call(app, "POST", "/v1/completions", body))
        assert len(other.headers["x-request-id"]) >= 16


def test_a_failure_before_the_first_token_is_a_status() -> None:
    reply = stream(FakeDispatcher(lambda _: [RequestTimeout("too slow", request_id="r")]))
    assert reply.status == 504
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["error"]["code"] == "timeout"


@pytest.mark.parametrize("fields", [{}, {"prompt": ["a", "b"]}, {"messages": USER}])
async def test_a_failure_behind_the_first_token_is_an_event_and_no_done(fields: dict[str, Any]) -> None:
    dispatcher = FakeDispatcher()
    body = {"model": MODEL, "stream": True, **({} if "messages" in fields else {"prompt": "a"}), **fields}
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    exchange, task = begin(make_app(dispatcher), "POST", path, body)
    generation = await dispatcher.next_generation(0)
    generation.put(tokens(*ids("a")))
    await exchange.wait_for_writes(1)
    generation.put(EngineDied("engine decode-1 died", request_id="r"))
    await task
    last = exchange.events()[-1]
    assert last["error"]["code"] == "engine_died"
    assert "decode-1" in last["error"]["message"]
    assert exchange.complete
    assert all(other.aborted for other in dispatcher.generations[1:])


async def test_a_ping_does_not_overtake_a_head_that_waits_to_be_sent() -> None:
    kinds, can_go_on = [], asyncio.Event()
    waits = [can_go_on.wait()]

    async def send(message: Any) -> None:
        if waits:
            await waits.pop()
        kinds.append(message["type"])

    exchange = exchanges.Exchange(send, send, None, new_trace())
    with exchange.pinging(0.0, lambda error: b""):
        head = asyncio.ensure_future(exchange.begin_events(("", ""), lambda error: b""))
        for _ in range(5):
            await asyncio.sleep(0)
        can_go_on.set()
        await head
    assert kinds.count("http.response.start") == 1
