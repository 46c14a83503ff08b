"""POST /v1/responses: items in, items out, typed events, and errors that name its own fields."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import small_app
import small_tokenizers
from asgi_client import Exchange, begin, call
from coroutines import run
from fake_dispatcher import Answer, FakeDispatcher, logprob, say, tokens
from recorded_answers import ANSWERS, THOUGHTS, TOOLS, Recorded, Thought
from response_events import typed_events, whole_of
from small_app import MODEL, eos, ids, make_app, tokenizer

from pdkv.config import HttpApi, HttpLimits
from pdkv.errors import EngineDied, EngineUnavailable
from pdkv.router.http.answer import replies
from pdkv.router.http.responses_api import items, prepare
from pdkv.router.http.responses_api import replies as response_replies
from pdkv.text import Tokenizer

PATH = "/v1/responses"
FUNCTIONS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in sorted(TOOLS)]
CALL = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>'


def ask(answer: Answer | str, parser: str = "hermes", thinks: str = "none", **fields: Any) -> Exchange:
    """One request; an answer that is a text comes token by token."""
    dispatcher = FakeDispatcher(say([*ids(answer), eos()]) if isinstance(answer, str) else answer)
    api = HttpApi(tool_parser=parser, reasoning_parser=thinks)
    body = {"model": MODEL, "input": "Hello", **fields}
    return run(call(make_app(dispatcher, api=api, max_model_len=2000), "POST", PATH, body))


def response(exchange: Exchange) -> dict[str, Any]:
    """A response, streamed or not, that is what OpenAI's client takes it for."""
    from openai.types.responses import Response

    assert exchange.status == 200, exchange.body
    if exchange.headers["content-type"].startswith("text/event-stream"):
        return whole_of(typed_events(exchange.body))
    body: dict[str, Any] = exchange.json()
    Response.model_validate(body)
    return body


def both(answer: Answer | str, parser: str = "hermes", thinks: str = "none", **fields: Any) -> dict[str, Any]:
    """A response that is the same streamed and not, but for what names it."""
    whole = response(ask(answer, parser, thinks, **fields))
    streamed = response(ask(answer, parser, thinks, **fields, stream=True))
    assert unnamed(streamed) == unnamed(whole)
    return whole


def unnamed(body: dict[str, Any]) -> dict[str, Any]:
    output = [{name: item[name] for name in item if name not in ("id", "call_id")} for item in body["output"]]
    names = [item.get(name) for item in body["output"] for name in ("id", "call_id") if item.get(name)]
    assert len(set(names)) == len(names)
    times = ("id", "created_at", "completed_at")
    return {name: body[name] for name in body if name not in times} | {"output": output}


def said(body: dict[str, Any]) -> list[tuple[str, str]]:
    """The items in short."""
    return [
        (item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in body["output"]
    ]


# --- what is put out ----------------------------------------------------------------------------------------------


def test_a_text() -> None:
    body = both('naïve €\n"\\ \u2028 😀', input="Hi", instructions="Be brief.", metadata={"a": "b"}, user="u")
    [item] = body["output"]
    part = {"type": "output_text", "text": 'naïve €\n"\\ \u2028 😀', "annotations": [], "logprobs": []}
    assert (item["type"], item["role"], item["status"], item["content"]) == (
        "message",
        "assistant",
        "completed",
        [part],
    )
    assert (body["status"], body["error"], body["incomplete_details"]) == ("completed", None, None)
    num_input = len(tokenizer().encode("system: Be brief.\nuser: Hi\n"))
    num_output = len(ids(part["text"])) + 1
    assert body["usage"] == {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_input + num_output,
    }
    assert (body["instructions"], body["metadata"], body["user"]) == ("Be brief.", {"a": "b"}, "u")


def test_tokens_whose_kv_a_codec_may_have_changed_are_told() -> None:
    dispatcher = FakeDispatcher(say([*ids("a"), eos()]))
    dispatcher.num_cached_tokens, dispatcher.num_lossy_tokens = 2, 1
    body = response(run(call(make_app(dispatcher), "POST", PATH, {"model": MODEL, "input": "Hello"})))
    details = {"cached_tokens": 2, "lossy_tokens": 1, "cache_write_tokens": 0}
    assert body["usage"]["input_tokens_details"] == details


@pytest.mark.parametrize("recorded", ANSWERS, ids=lambda r: f"{r.parser}: {r.name}")
def test_recorded_answers_byte_by_byte(recorded: Recorded) -> None:
    body = both(recorded.text, recorded.parser, tools=FUNCTIONS)
    calls = [(item["name"], item["arguments"]) for item in body["output"] if item["type"] == "function_call"]
    texts = [text for kind, text in said(body) if kind == "message"]
    assert tuple(calls) == recorded.calls
    assert "".join(texts) == recorded.content
    assert body["status"] == "completed"
    assert body["tools"] == FUNCTIONS


@pytest.mark.parametrize("thought", [t for t in THOUGHTS if not t.prompt], ids=lambda t: t.name)
def test_recorded_thoughts_byte_by_byte(thought: Thought) -> None:
    body = both(thought.text, thinks=thought.parser)
    assert "".join(text for kind, text in said(body) if kind == "reasoning") == thought.reasoning
    assert "".join(text for kind, text in said(body) if kind == "message") == thought.content
    assert bool(body["usage"]["output_tokens_details"]["reasoning_tokens"]) >= bool(thought.reasoning)


def test_items_come_in_the_order_in_which_they_are_written() -> None:
    body = both(f"<think>hm</think>Let me see. {CALL} {CALL}\n Done?", thinks="qwen3", tools=FUNCTIONS)
    assert [(kind, text.strip()) for kind, text in said(body)] == [
        ("reasoning", "hm"),
        ("message", "Let me see."),
        ("function_call", '{"zone": "UTC"}'),
        ("function_call", '{"zone": "UTC"}'),
        ("message", "Done?"),
    ]
    assert {item["status"] for item in body["output"]} == {"completed"}


def test_an_answer_that_says_nothing_is_an_empty_message() -> None:
    assert said(both("")) == [("message", "")]


@pytest.mark.parametrize(
    ("cut", "kinds"),
    [("hm", ["reasoning"]), ("Let", ["reasoning", "message"]), ("UT", ["reasoning", "message", "function_call"])],
)
def test_what_is_cut_off_is_incomplete(cut: str, kinds: list[str]) -> None:
    text = f"<think>hm</think>Let me see. {CALL}"
    body = both(text, thinks="qwen3", tools=FUNCTIONS, max_output_tokens=len(text[: text.index(cut)]) + len(cut))
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["completed_at"] is None
    assert [item["type"] for item in body["output"]] == kinds
    assert [item["status"] for item in body["output"]] == ["completed"] * (len(kinds) - 1) + ["incomplete"]
    assert said(body)[-1][1].endswith(cut)


def test_a_call_that_the_model_leaves_open_is_incomplete() -> None:
    body = both(CALL[: CALL.index("UTC")], tools=FUNCTIONS)
    [item] = body["output"]
    assert (body["status"], item["status"], item["arguments"]) == ("completed", "incomplete", '{"zone": "')


def test_only_one_call_where_only_one_is_wanted() -> None:
    body = both(f"{CALL}{CALL}", tools=FUNCTIONS, parallel_tool_calls=False)
    assert (len(body["output"]), body["parallel_tool_calls"]) == (1, False)


def test_without_a_choice_of_tools_calls_are_text() -> None:
    body = both(CALL, tools=FUNCTIONS, tool_choice="none")
    assert (said(body), body["tool_choice"]) == ([("message", CALL)], "none")


# --- logprobs -----------------------------------------------------------------------------------------------------

WITH_LOGPROBS = {"include": ["message.output_text.logprobs"]}


def test_logprobs_are_those_of_a_messages_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of thoughts, calls and the end; a token that is part of a character is with the one that completes it."""
    text = f"<think>hm</think>\n\nhé  there {CALL}ok"
    body = both(text, thinks="qwen3", tools=FUNCTIONS, **WITH_LOGPROBS, top_logprobs=2)
    first, second = (item["content"][0]["logprobs"] for item in body["output"] if item["type"] == "message")
    assert bytes(b for entry in first for b in entry["bytes"]).decode() == "hé  there"
    assert bytes(b for entry in second for b in entry["bytes"]) == b"ok"
    assert [len(entry["top_logprobs"]) for entry in second] == [2, 2]
    assert body["top_logprobs"] == 2
    monkeypatch.setattr(replies, "INLINE_LOGPROBS", 0)
    threaded = both(text, thinks="qwen3", tools=FUNCTIONS, **WITH_LOGPROBS, top_logprobs=2)
    assert unnamed(threaded) == unnamed(body)


def test_the_end_of_a_stream_with_many_logprobs_does_not_hold_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It repeats all of them, though each came alone."""
    threads: list[tuple[str, bool]] = []
    finish, end = items.OutputItems.finish, response_replies.ResponseEvents.end

    def note(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any, **options: Any) -> Any:
            threads.append((name, threading.current_thread() is threading.main_thread()))
            return function(*arguments, **options)

        return noting

    monkeypatch.setattr(items.OutputItems, "finish", note("finish", finish))
    monkeypatch.setattr(response_replies.ResponseEvents, "end", note("end", end))
    for inline in (True, False):
        threads.clear()
        monkeypatch.setattr(replies, "INLINE_LOGPROBS", 9 if inline else 5)
        exchange = ask("abcdef", stream=True, **WITH_LOGPROBS)
        assert exchange.status == 200
        assert threads == [("finish", inline), ("end", inline)]


def test_what_is_no_character_has_logprobs_too() -> None:
    [item] = both(say([*ids("aé")[:2], eos()]), **WITH_LOGPROBS)["output"]
    assert item["content"][0]["text"] == "a\ufffd"
    assert [entry["bytes"] for entry in item["content"][0]["logprobs"]][:2] == [[97], [0xC3]]


def test_tokens_that_come_at_once_keep_their_logprobs() -> None:
    def answer(_: object) -> Sequence[Any]:
        given = [*ids(f"<think>hm</think>ab {CALL}"), eos()]
        return [tokens(*given, logprobs=[logprob(i) for i in given], end="stop")]

    _, item, _ = both(answer, thinks="qwen3", tools=FUNCTIONS, **WITH_LOGPROBS)["output"]
    assert [entry["token"] for entry in item["content"][0]["logprobs"]] == ["a", "b"]


# --- what is put in -----------------------------------------------------------------------------------------------

REASONED = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
CALLED = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'}
ALSO_CALLED = {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "", "status": "completed"}
ANSWERED = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
}
RETURNED = {"type": "function_call_output", "call_id": "c1", "output": "42"}
FULL_TEMPLATE = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}{{ tools | tojson }}{{ reasoning_effort }}"


def chat_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({"input": "Hi"}, {"messages": [{"role": "user", "content": "Hi"}]}),
        (
            {"input": "Hi", "instructions": "Be brief.", "reasoning": {"effort": "low"}},
            {
                "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
                "reasoning_effort": "low",
            },
        ),
        (
            {
                "input": [
                    {"role": "developer", "content": "Be brief."},
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}] * 2},
                    {"role": "assistant", "content": "b"},
                    {"role": "assistant", "content": "c"},
                ]
            },
            {
                "messages": [
                    {"role": "developer", "content": "Be brief."},
                    {"role": "user", "content": [{"type": "text", "text": "a"}] * 2},
                    {"role": "assistant", "content": "b"},
                    {"role": "assistant", "content": "c"},
                ]
            },
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "Hi"},
                    *(REASONED, ANSWERED, CALLED, ALSO_CALLED, RETURNED),
                    {**RETURNED, "call_id": "c2", "output": [{"type": "input_text", "text": "43"}]},
                    *(REASONED, CALLED, RETURNED, CALLED, ANSWERED),
                ],
                "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {}, "strict": True}],
            },
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {
                        "role": "assistant",
                        "content": "Let me see.",
                        "reasoning_content": "hm",
                        "tool_calls": [chat_call("c1", "f", '{"x": 1}'), chat_call("c2", "g", "")],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "42"},
                    {"role": "tool", "tool_call_id": "c2", "content": "43"},
                    {
                        "role": "assistant",
                        "content": None,
                        "reasoning_content": "hm",
                        "tool_calls": [chat_call("c1", "f", '{"x": 1}')],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "42"},
                    {"role": "assistant", "content": None, "tool_calls": [chat_call("c1", "f", '{"x": 1}')]},
                    {"role": "assistant", "content": "Let me see."},
                ],
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "description": "d", "parameters": {}, "strict": True},
                    }
                ],
            },
        ),
        (
            {
                "input": [
                    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}]},
                    {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
                    {"role": "user", "content": "Hi"},
                ]
            },
            {"messages": [{"role": "assistant", "reasoning_content": "in short"}, {"role": "user", "content": "Hi"}]},
        ),
    ],
)
def test_input_is_the_prompt_of_the_same_chat(
    fields: dict[str, Any], chat: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Tokenizer(small_tokenizers.byte_level_backend(), chat_template=FULL_TEMPLATE)
    monkeypatch.setattr(small_app, "tokenizer", lambda: full)
    dispatcher = FakeDispatcher(say([eos()]))
    app = make_app(dispatcher, api=HttpApi(tool_parser="hermes"), max_model_len=4000)
    for path, body in ((PATH, fields), ("/v1/chat/completions", chat)):
        exchange = run(call(app, "POST", path, body))
        assert exchange.status == 200, exchange.body
    ours, theirs = (full.decode(request.prompt_token_ids) for request in dispatcher.requests)
    assert ours == theirs


def test_what_came_out_goes_in_again() -> None:
    body = response(ask(f"<think>hm</think>Hé {CALL}", thinks="qwen3", tools=FUNCTIONS, **WITH_LOGPROBS))
    call_id = body["output"][-1]["call_id"]
    again = [{"role": "user", "content": "Hi"}, *body["output"], {**RETURNED, "call_id": call_id}]
    assert said(response(ask("ok", tools=FUNCTIONS, input=again))) == [("message", "ok")]


def test_fields_reach_the_engine_as_chats_do() -> None:
    dispatcher = FakeDispatcher(say([*ids("ab"), eos()]))
    fields = {
        "temperature": 0.5,
        "top_p": 0.25,
        "max_output_tokens": 7,
        "top_k": 3,
        "min_p": 0.125,
        "seed": 11,
        "presence_penalty": 1,
        "logit_bias": {"5": 1.5},
        "stop": ["b"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "cache_salt": "s",
        "priority": 3,
        "prompt_cache_key": "k",
        "include": [*WITH_LOGPROBS["include"], "reasoning.encrypted_content"],
        "top_logprobs": 4,
    }
    exchange = run(call(make_app(dispatcher), "POST", PATH, {"input": "Hi", **fields}))
    body = response(exchange)
    [request] = dispatcher.requests
    params = request.params
    assert (params.temperature, params.top_p, params.max_tokens, params.top_k, params.min_p) == (0.5, 0.25, 7, 3, 0.125)
    assert (params.seed, params.presence_penalty, params.logit_bias, params.logprobs) == (11, 1, {5: 1.5}, 4)
    assert (params.stop_token_ids, params.ignore_eos) == ((9,), True)
    assert (request.cache_salt, request.priority, request.affinity) == ("s", 3, "k")
    assert said(body) == [("message", "a")]
    assert (body["temperature"], body["top_p"], body["max_output_tokens"]) == (0.5, 0.25, 7)
    assert body["prompt_cache_key"] == "k"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def shaped(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema, **fields}}}


def chat_tools(strict: bool) -> list[dict[str, Any]]:
    function = {"name": "f", "parameters": SCHEMA, "strict": strict}
    return [{"type": "function", "function": function}, {"type": "function", "function": {"name": "g"}}]


def own_tools(strict: bool) -> list[dict[str, Any]]:
    return [{"type": "function", **tool["function"]} for tool in chat_tools(strict)]


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        (
            shaped(SCHEMA, strict=True, description="d"),
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        ),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"structured_outputs": {"regex": "[ab]+"}}, {"structured_outputs": {"regex": "[ab]+"}}),
        ({"tools": own_tools(True), "tool_choice": "required"}, {"tools": chat_tools(True), "tool_choice": "required"}),
        (
            {"tools": own_tools(False), "tool_choice": {"type": "function", "name": "f"}},
            {"tools": chat_tools(False), "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        ({"tools": own_tools(True)}, {"tools": chat_tools(True)}),
    ],
)
def test_a_shape_is_the_grammar_of_the_same_chat(fields: dict[str, Any], chat: dict[str, Any]) -> None:
    dispatcher = FakeDispatcher(say([*ids("x"), eos()]))
    app = make_app(dispatcher, api=HttpApi(tool_parser="hermes"), max_model_len=2000)
    exchange = run(call(app, "POST", PATH, {"input": "Hi", **fields}))
    body = response(exchange)
    assert (
        run(call(app, "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **chat})).status
        == 200
    )
    ours, theirs = (request.params.grammar for request in dispatcher.requests)
    assert ours is not None
    assert ours == theirs
    asked = {"text": {"format": {"type": "text"}}, "tools": [], "tool_choice": "auto", **fields}
    assert {name: body[name] for name in ("text", "tools", "tool_choice")} == {
        name: asked[name] for name in ("text", "tools", "tool_choice")
    }


def test_what_changes_nothing_is_accepted() -> None:
    neutral: dict[str, Any] = {
        "store": False,
        "background": False,
        "truncation": "disabled",
        "service_tier": "auto",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content", "web_search_call.results"],
        "previous_response_id": None,
        "conversation": None,
        "prompt": None,
        "max_tool_calls": 5,
        "tools": [],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_obfuscation": False},
        "top_logprobs": 0,
        "safety_identifier": "x",
        "context_management": [],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert said(response(ask("ok", **neutral))) == [("message", "ok")]


# --- what is refused ----------------------------------------------------------------------------------------------


def message(*parts: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts], **fields}]


TOOL = {"type": "function", "name": "f"}
SPACE: dict[str, Any] = {"type": "namespace", "name": "n", "tools": []}
HOSTED = {"type": "web_search", "external_web_access": False}
REFUSED = {"type": "object", "properties": {"a": {"not": {}}}}


def test_logprobs_that_a_response_may_hold_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "MAX_RESPONSE_LOGPROBS", 50)
    assert ask("Hi", **WITH_LOGPROBS, top_logprobs=1, max_output_tokens=25).status == 200
    refused = ask("Hi", **WITH_LOGPROBS, top_logprobs=2, max_output_tokens=17)
    assert refused.status == 400
    assert refused.json()["error"]["param"] == "max_output_tokens"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "no responses are kept"),
        ({"conversation": "conv_1"}, "conversation", "no conversations are kept"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "no conversations are kept"),
        ({"background": True}, "background", "no response is made in the background"),
        ({"store": True}, "store", "no responses are kept"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "no prompts are kept"),
        ({"truncation": "auto"}, "truncation", "allowed: 'disabled'"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "'grammar' is not supported"),
        (shaped(REFUSED), "text.format.schema", "/properties/a/not"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "required"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "required"),
        ({"text": {"format": {"type": "text", "name": "a"}}}, "text.format.name", "'json_schema', got 'text'"),
        ({**shaped(SCHEMA), "structured_outputs": {"regex": "a"}}, "structured_outputs", "text.format and structured"),
        ({**shaped(SCHEMA), "guided_json": {}}, "guided_json", "text.format and guided_json"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "'loud' is not supported"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'huge' is not supported"),
        ({"reasoning": {"summary": "rhymed"}}, "reasoning.summary", "'rhymed' is not supported"),
        ({"include": ["thoughts"]}, "include[0]", "'thoughts' is not supported"),
        ({"top_logprobs": 3}, "top_logprobs", "requires `include` to contain 'message.output_text.logprobs'"),
        ({"top_logprobs": 21, **WITH_LOGPROBS}, "top_logprobs", "up to 20, got 21"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_output_tokens": 2000}, "max_output_tokens", "the model's length of 2000"),
        ({"max_output_tokens": "5"}, "max_output_tokens", "int"),
        ({"max_tokens": 5}, "max_tokens", "not a known field"),
        ({"messages": []}, "messages", "not a known field"),
        ({"n": 2}, "n", "not a known field"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"remote_host": "h"}, "remote_host", "the server alone decides"),
        ({"min_tokens": 9, "max_output_tokens": 5}, "min_tokens", "at most max_output_tokens (5)"),
        ({"stream": False, "stream_options": {}}, "stream_options", "needs stream"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage", "known"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "true",
        ),
        ({"input": []}, "input", "must not be empty"),
        ({"input": 5}, "input", "array"),
        ({"input": None}, "input", "null"),
        ({"input": [5]}, "input[0]", "object"),
        ({"input": "x" * 100_000}, "input", "the model's length"),
        ({"input": [{"role": "user", "content": "x"}] * 8193}, "input", "at most 8192"),
        ({"input": [{}]}, "input[0].content", "is required: the item is a message"),
        ({"input": [{"content": "x"}]}, "input[0].role", "is required"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "'tool' is not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "'item_reference' is not supported"),
        (
            {"input": [*message(), {"type": "function_call", "name": "f", "call_id": "c"}]},
            "input[1].arguments",
            "required",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "required"),
        (
            {"input": [{**CALLED, "output": "x"}]},
            "input[0].output",
            "which may have arguments, call_id, name, namespace",
        ),
        ({"input": message(call_id="c")}, "input[0].call_id", "not a field of a message"),
        ({"input": message(mood="c")}, "input[0].mood", "not a known field"),
        ({"input": message({"type": "input_image", "image_url": "x"})}, "input[0].content[0].type", "'input_image'"),
        ({"input": message({"type": "reasoning_text", "text": "x"})}, "input[0].content[0].type", "not supported here"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content", "a list of reasoning_text"),
        ({"input": message({"type": "input_text"})}, "input[0].content[0].text", "required"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "text of 1 to"),
        ({"tools": [TOOL, {"type": "function", "name": ""}]}, "tools[1].name", "text of 1 to"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters", "JSON schema"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", "got None"),
        ({"tools": [{**TOOL, "parameters": REFUSED, "strict": True}]}, "tools[0].parameters", "/properties/a/not"),
        ({"tools": [{"type": "web_scrape"}]}, "tools[0].type", "'web_scrape' is not supported"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0]", "a list of tools"),
        ({"tools": [TOOL, {**SPACE, "tools": [SPACE]}]}, "tools[1].tools[0].type", "'namespace' is not supported"),
        ({"tools": [TOOL, {**SPACE, "tools": [5]}]}, "tools[1].tools[0].type", "None is not supported"),
        ({"tools": [TOOL, {**SPACE, "tools": [{**TOOL, "name": 5}]}]}, "tools[1].tools[0].name", "text of 1 to"),
        (
            {"tools": [HOSTED, {**SPACE, "tools": [{**TOOL, "parameters": REFUSED, "strict": True}]}]},
            "tools[1].tools[0].parameters",
            "/properties/a/not",
        ),
        (
            {"tools": [{**TOOL, "name": "n__f"}, {**SPACE, "tools": [TOOL]}]},
            "tools[1].tools[0].name",
            "the name of another tool",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name", "they are f"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name", "required"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp", "name": "x"}}, "tool_choice.type", "'mcp'"),
        ({"metadata": {"a": "x" * 2**20}, "user": "u"}, "metadata", "at most 1048576 bytes"),
        ({"user": "é" * 2**18}, "user", "at most 1048576 bytes"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not contain messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_name_the_field_of_this_api(fields: dict[str, Any], param: str, words: str) -> None:
    for stream in ({}, {"stream": True}):
        exchange = ask("x", **{**stream, **fields})
        error = exchange.json()["error"]
        assert (exchange.status, error["type"], error["param"]) == (400, "invalid_request_error", param), error
        assert words in error["message"]
        assert error["code"] == "context_length_exceeded" or param in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'"input"',
        b'{"input": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"input": [' + b"{}," * 10_000 + b"{}]}",
        b'{"input": "x", "tools": [' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"]}",
        b'{"input": "\xff"}',
        b'{"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "' + b"[" * 90_000 + b'"}]}',
    ],
    ids=["cut", "list", "text", "deep items", "many items", "deep tool", "no UTF-8", "deep arguments"],
)
def test_hostile_bodies_are_refused(body: bytes) -> None:
    dispatcher = FakeDispatcher()
    exchange = run(call(make_app(dispatcher), "POST", PATH, body))
    assert (exchange.status, exchange.json()["error"]["type"]) == (400, "invalid_request_error"), exchange.body
    assert len(exchange.body) < 2000
    assert dispatcher.generations == []


DEEP = {
    "a label": b'"metadata":{"a":%b}',
    "a tool": b'"tool_choice":"required","tools":[{"type":"function","name":"f","parameters":{"properties":'
    b'{"x":{"enum":[%b]}}}}]',
    "a schema": b'"text":{"format":{"type":"json_schema","name":"a","schema":{"enum":[%b]}}}',
}


@pytest.mark.parametrize("place", DEEP)
def test_no_depth_is_too_much_for_one_step_and_not_for_those_before(place: str) -> None:
    app = make_app(
        FakeDispatcher(say([eos()])), api=HttpApi(tool_parser="hermes", reasoning_parser="qwen3"), max_model_len=2000
    )
    statuses = set()
    for depth in range(880, 1000):
        nested = DEEP[place] % (b"[" * depth + b"]" * depth)
        statuses.add(run(call(app, "POST", PATH, b'{"input":"x",%b}' % nested)).status)
    assert statuses == {200, 400}


def test_unknown_fields_can_be_dropped() -> None:
    dispatcher = FakeDispatcher(say([*ids("ab"), eos()]))
    app = make_app(dispatcher, api=HttpApi(unknown_fields="ignore"))
    part = {"type": "input_text", "text": "x", "mood": 1}
    body = {"input": message(part, mood=1), "mood": 1, "reasoning": {"mood": 1}, "text": {"mood": 1}}
    assert run(call(app, "POST", PATH, body)).status == 200


# --- failures, and what all endpoints share -----------------------------------------------------------------------


def test_a_failure_before_the_first_token_has_a_status() -> None:
    for stream in (False, True):
        exchange = ask(lambda _: [EngineUnavailable("no engine")], stream=stream)
        assert (exchange.status, exchange.json()["error"]["code"]) == (503, "engine_unavailable")


def test_a_failure_in_mid_stream_is_an_event_and_the_responses_end() -> None:
    died = EngineDied("engine decode-1 died", request_id="r")
    exchange = ask(lambda _: [tokens(*ids("a")), died], stream=True)
    *_, error, end = typed_events(exchange.body)
    assert (error["type"], error["code"], error["error"]["code"]) == ("error", "engine_died", "engine_died")
    assert "decode-1 died" in error["message"]
    assert end["type"] == "response.failed"
    failed = end["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert [(item["status"], item["content"][0]["text"]) for item in failed["output"]] == [("incomplete", "a")]
    exchange = ask(lambda _: [tokens(*ids("a")), died])
    assert (exchange.status, exchange.json()["error"]["code"]) == (503, "engine_died")


async def test_a_client_that_leaves_ends_its_generation() -> None:
    dispatcher = FakeDispatcher(lambda _: [tokens(*ids("a"))])
    exchange, task = begin(make_app(dispatcher), "POST", PATH, {"input": "x", "stream": True})
    await exchange.wait_for_writes(1)
    exchange.disconnect()
    await task
    assert dispatcher.generations[0].aborted


async def test_an_event_is_sent_with_its_token() -> None:
    """One write per token, the first of which begins the response."""
    dispatcher = FakeDispatcher()
    exchange, task = begin(make_app(dispatcher), "POST", PATH, {"input": "x", "stream": True})
    generation = await dispatcher.next_generation(0)
    for number, letter in enumerate("abc", 1):
        generation.put(tokens(*ids(letter)))
        await exchange.wait_for_writes(number)
        assert f'"delta":"{letter}"'.encode() in exchange.writes[-1]
    generation.put(tokens(end="stop"))
    await task
    assert said(whole_of(typed_events(exchange.body))) == [("message", "abc")]


async def test_limits_and_metrics_are_those_of_the_other_endpoints() -> None:
    dispatcher = FakeDispatcher(say([*ids("ab"), eos()]))
    app = make_app(dispatcher, limits=HttpLimits(max_body_bytes=2000))
    assert (await call(app, "POST", PATH, {"input": "x" * 3000})).status == 413
    assert (await call(app, "POST", PATH, {"input": "x"}, {"content-type": "text/plain"})).status == 415
    assert (await call(app, "POST", PATH, {"input": "x", "model": "other"})).status == 404
    assert (await call(app, "GET", PATH)).status == 405
    assert (await call(app, "POST", PATH, {"input": "x"}, {"x-request-id": "mine"})).headers["x-request-id"] == "mine"
    metrics = (await call(app, "GET", "/metrics")).body.decode()
    assert 'pdkv_requests_total{endpoint="responses",outcome="ok"} 1.0' in metrics
    assert 'pdkv_requests_total{endpoint="responses",outcome="model_not_found"} 1.0' in metrics
