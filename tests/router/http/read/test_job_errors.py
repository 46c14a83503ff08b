"""Requests that cannot work: each a clear error in OpenAI's shape that names the field. Nothing reaches an engine."""

from typing import Any

import pytest
from asgi_client import Exchange, call
from coroutines import run
from fake_dispatcher import FakeDispatcher
from small_app import MAX_MODEL_LEN, MODEL, make_app, tokenizer

from pdkv.config import HttpLimits
from pdkv.wire.messages import PROBE_SALT

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = [{"role": "user", "content": "x"}]


def refused(path: str, body: Any, **options: Any) -> Exchange:
    dispatcher = FakeDispatcher()
    reply = run(call(make_app(dispatcher, **options), "POST", path, body))
    assert dispatcher.generations == []
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert reply.json()["error"]["type"] == "invalid_request_error"
    return reply


def check(reply: Exchange, status: int, param: str | None, *words: str) -> None:
    error = reply.json()["error"]
    assert (reply.status, error["param"]) == (status, param), error
    for word in (*words, *([param] if param else [])):
        assert word in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"best_of": 2}, "best_of", "must be n (1)"),
        ({"n": 2, "best_of": 1}, "best_of", "must be n (2)"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"kv_transfer_params": {"remote_host": "h"}}, "kv_transfer_params", "the server alone decides"),
        ({"remote_host": "h"}, "remote_host", "the server alone decides"),
        ({"bootstrap_room": 3}, "bootstrap_room", "the server alone decides"),
        ({"mood": "x"}, "mood", "not a known field"),
        ({"max_tokens": "5"}, "max_tokens", "int"),
        ({"max_tokens": 1.5}, "max_tokens", "int"),
        ({"max_tokens": True}, "max_tokens", "bool"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 10**30}, "max_tokens", "below 2,147,483,648"),
        ({"temperature": "hot"}, "temperature", "float"),
        ({"temperature": -0.5}, "temperature", "at least 0"),
        ({"top_p": 0}, "top_p", "above 0 and up to 1, got 0"),
        ({"top_k": -2}, "top_k", "-1"),
        ({"min_p": 1.5}, "min_p", "up to 1, got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"presence_penalty": 3}, "presence_penalty", "of at least -2 and up to 2, got 3"),
        ({"frequency_penalty": -3}, "frequency_penalty", "of at least -2 and up to 2, got -3"),
        ({"seed": 2**63}, "seed", "up to 9,223,372,036,854,775,807"),
        ({"n": 0}, "n", "of at least 1 and up to 128, got 0"),
        ({"n": 128, "prompt": ["a"] * 9}, "prompt", "1024"),
        ({"min_tokens": 20}, "min_tokens", "at most max_tokens (16)"),
        ({"priority": 2**40}, "priority", "32-bit"),
        ({"logprobs": 21}, "logprobs", "of at least 0 and up to 20, got 21"),
        ({"logprobs": 21, "echo": True}, "logprobs", "of at least 0 and up to 20, got 21"),
        ({"logprobs": True}, "logprobs", "int"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "of at least 0 and up to 20, got -1"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "streamed"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"stream": True, "stream_options": {"chunks": 1}}, "stream_options.chunks", "not a known field"),
        ({"stop": ["a", ""]}, "stop", "of length >= 1 - at `$[1]`"),
        ({"stop": [1]}, "stop[0]", "str"),
        ({"stop": ["x"] * 65}, "stop", "64"),
        ({"stop_token_ids": [100_000]}, "stop_token_ids", "100000"),
        ({"cache_salt": PROBE_SALT}, "cache_salt", "reserved for the router"),
        ({"allowed_token_ids": [100_000]}, "allowed_token_ids", "100000"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "-1"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "of length >= 1"),
        ({"bad_words": ["a", ""]}, "bad_words", "matching regex"),
        ({"bad_words": ["x"] * 129}, "bad_words", "128"),
        ({"bad_words": ["zq" * 600]}, "bad_words", "1024 tokens"),
        ({"bad_words_token_ids": [[1]]}, "bad_words_token_ids", "not a known field"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
        ({"truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "truncate_prompt_tokens", str(MAX_MODEL_LEN)),
        ({"truncation_side": "middle"}, "truncation_side", "allowed: 'left', 'right'"),
        ({"prompt_cache_key": "x" * 257}, "prompt_cache_key", "256 bytes"),
        ({"store": True}, "store", "true is not supported; allowed: false"),
        ({"service_tier": "gold"}, "service_tier", "allowed: 'auto', 'default'"),
        ({"length_penalty": 0.5}, "length_penalty", "allowed: 1.0"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "allowed: 'json_object', 'json_schema'"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "false",
        ),
        ({"logit_bias": {"100000": 1}}, "logit_bias", "100000"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "{5: 101.0}: Expected `float` <= 100"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "int"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [""]}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": None}, "prompt", "null"),
        ({"prompt": {"text": "x"}}, "prompt", "object"),
        ({"prompt": ["a", 1]}, "prompt", "one kind"),
        ({"prompt": [1, "a"]}, "prompt", "one kind"),
        ({"prompt": [1, True]}, "prompt[1]", "bool"),
        ({"prompt": [[1], ["a"]]}, "prompt[1][0]", "str"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": [tokenizer().vocab_size]}, "prompt", str(tokenizer().vocab_size)),
        ({"prompt": [10**30]}, "prompt", str(10**30)),
    ],
)
def test_a_wrong_completions_field_is_named(fields: dict[str, Any], param: str, word: str) -> None:
    check(refused(COMPLETIONS, {"model": MODEL, "prompt": "x", **fields}), 400, param, word)


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"tools": [TOOL]}, "tools", "--tool-parser NAME (one of hermes, "),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tools", "tool_choice 'none'"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1].function", "an object with a name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "allowed: 'function'"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "1 to 256"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools[0].function.parameters",
            "an object",
        ),
        ({"tool_choice": "required"}, "tool_choice", "'required' needs tools"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice", "'any' is not supported"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "'f' needs tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f" * 1000}}},
            "tool_choice",
            "(1000 characters)' needs tools",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
            "'g' is not one of the tools; they are f",
        ),
        ({"include_reasoning": False}, "include_reasoning", "--reasoning-parser"),
        ({"functions": [{"name": "f"}]}, "functions", "length <= 0"),
        ({"modalities": ["text", "audio"]}, "modalities[1]", "allowed: 'text'"),
        ({"echo": True}, "echo", "allowed: false"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "--trust-request-chat-template"),
        ({"chat_template": 1}, "chat_template", "str"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "must not contain chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "both"),
        (
            {"continue_final_message": True, "messages": [{"role": "assistant", "content": None}]},
            "continue_final_message",
            "string",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "allowed: 'json_object', 'json_schema'"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "up to 20, got 21"),
        ({"logprobs": 3}, "logprobs", "bool"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "disagree"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"min_tokens": MAX_MODEL_LEN + 1}, "min_tokens", str(MAX_MODEL_LEN)),
        ({"messages": []}, "messages", "empty"),
        ({"messages": "x"}, "messages", "array"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        (
            {"messages": [{"role": "king", "content": "x"}]},
            "messages[0].role",
            "'king' is not supported; allowed: 'assistant', 'developer', 'system', 'tool', 'user'",
        ),
        ({"messages": [{**USER[0], "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function", "required"),
        ({"messages": [*USER, {"role": "user", "content": None}]}, "messages[1].content", "null"),
        ({"messages": [{**USER[0], "mood": "x"}]}, "messages[0].mood", "not a known field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
            "messages[0].content[0].type",
            "image_url",
        ),
    ],
)
def test_a_wrong_chat_field_is_named(fields: dict[str, Any], param: str, word: str) -> None:
    check(refused(CHAT, {"model": MODEL, "messages": USER, **fields}), 400, param, word)


@pytest.mark.parametrize(("path", "field"), [(COMPLETIONS, "prompt"), (CHAT, "messages")])
def test_a_missing_field_is_named(path: str, field: str) -> None:
    check(refused(path, {"model": MODEL}), 400, field, "required")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b'{"model": NaN}', b'{"model": "\xff"}', b'{"model": "\\ud800"}', b"\xef\xbb\xbf{}"],
)
def test_malformed_json_is_refused(path: str, body: bytes) -> None:
    check(refused(path, body), 400, None, "not valid JSON")


def test_text_behind_the_json_is_refused() -> None:
    check(refused(COMPLETIONS, b'{"model": "small", "prompt": "x"} tail'), 400, None, "not valid JSON")


@pytest.mark.parametrize("body", [b"[" * 100_000, b"3", b'"x"', b"null", b"[]"])
def test_json_that_is_no_object_is_refused(body: bytes) -> None:
    check(refused(COMPLETIONS, body), 400, None, "lists and objects" if len(body) > 10 else "not a request")


def test_deep_nesting_inside_a_field_is_refused() -> None:
    body = b'{"model": "small", "prompt": ' + b"[" * 100_000
    assert refused(COMPLETIONS, body).status == 400


def test_an_unknown_model_is_404() -> None:
    for path, fields in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
        reply = refused(path, {"model": "gpt-9", **fields})
        check(reply, 404, "model", "gpt-9", MODEL)
        assert reply.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("fields", "param", "numbers"),
    [
        ({"prompt": [5] * MAX_MODEL_LEN}, "prompt", (MAX_MODEL_LEN,)),
        ({"prompt": [[5], [5] * 300]}, "prompt", (300, MAX_MODEL_LEN)),
        ({"prompt": [5] * 100, "max_tokens": 29}, "max_tokens", (100, 29, MAX_MODEL_LEN)),
    ],
)
def test_a_prompt_that_is_too_long_says_all_numbers(
    fields: dict[str, Any], param: str, numbers: tuple[int, ...]
) -> None:
    reply = refused(COMPLETIONS, {"model": MODEL, **fields})
    check(reply, 400, param, *map(str, numbers))
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_messages_that_are_too_long_say_all_numbers() -> None:
    text = "z" * 150
    length = len(tokenizer().encode(f"user: {text}\n"))
    reply = refused(CHAT, {"model": MODEL, "messages": [{"role": "user", "content": text}]})
    error = reply.json()["error"]
    assert (reply.status, error["param"], error["code"]) == (400, "messages", "context_length_exceeded")
    assert str(length) in error["message"]
    assert str(MAX_MODEL_LEN) in error["message"]


def test_a_body_that_is_too_large_is_413() -> None:
    reply = refused(COMPLETIONS, {"model": MODEL, "prompt": "x" * 2000}, limits=HttpLimits(max_body_bytes=1000))
    check(reply, 413, None, "1000 bytes")


def test_an_announced_size_is_refused_before_it_is_read() -> None:
    app = make_app(FakeDispatcher(), limits=HttpLimits(max_body_bytes=1000))
    reply = run(call(app, "POST", COMPLETIONS, b"", {"content-length": "1001"}))
    assert reply.status == 413


def test_another_content_type_is_415() -> None:
    app = make_app(FakeDispatcher())
    reply = run(call(app, "POST", COMPLETIONS, b"a=b", {"content-type": "application/x-www-form-urlencoded"}))
    check(reply, 415, None, "application/json")


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-request-id": "x" * 257}, "x-request-id"),
        ({"x-request-id": "a\x9b31m"}, "x-request-id"),
        ({"x-request-id": "a\x85b"}, "x-request-id"),
        ({"x-request-id": "a\tb"}, "x-request-id"),
        ({"x-pd-timeout-s": "soon"}, "x-pd-timeout-s"),
        ({"x-pd-timeout-s": "-1"}, "x-pd-timeout-s"),
        ({"x-pd-timeout-s": "nan"}, "x-pd-timeout-s"),
    ],
)
def test_a_wrong_header_is_named(headers: dict[str, str], param: str) -> None:
    app = make_app(FakeDispatcher())
    body = {"model": MODEL, "prompt": "x"}
    check(run(call(app, "POST", COMPLETIONS, body, headers)), 400, param)
