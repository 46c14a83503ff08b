"""Fields of vLLM and of newer OpenAI clients: what they do, and which values of the others are accepted."""

import functools
import re
from typing import Any

import pytest
from asgi_client import Exchange, call
from coroutines import run
from fake_dispatcher import FakeDispatcher, say
from small_app import MAX_MODEL_LEN, MODEL, eos, ids, make_app, tokenizer

from pdkv.config import HttpApi
from pdkv.text import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hello"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}


def send(dispatcher: FakeDispatcher, path: str, body: dict[str, Any], **options: Any) -> Exchange:
    return run(call(make_app(dispatcher, **options), "POST", path, body))


def complete(dispatcher: FakeDispatcher, **fields: Any) -> Exchange:
    return send(dispatcher, COMPLETIONS, {"model": MODEL, "prompt": "Hello", **fields})


def chat(dispatcher: FakeDispatcher, **fields: Any) -> Exchange:
    return send(dispatcher, CHAT, {"model": MODEL, "messages": USER, **fields})


def answering() -> FakeDispatcher:
    return FakeDispatcher(say([*ids("ab"), eos()]))


# --- what is honoured ---------------------------------------------------------------------------------------------


def test_a_missing_model_is_the_served_one() -> None:
    for path, fields in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
        reply = send(answering(), path, fields)
        assert (reply.status, reply.json()["model"]) == (200, MODEL)


def test_a_prediction_goes_to_engines_as_tokens_and_is_bounded() -> None:
    dispatcher = answering()
    assert chat(dispatcher, prediction={"type": "content", "content": "abc"}).status == 200
    assert dispatcher.requests[0].prediction_token_ids == ids("abc")
    for content in ("a" * (MAX_MODEL_LEN + 1), "a" * 1_000_000):
        reply = chat(dispatcher, prediction={"type": "content", "content": content})
        assert (reply.status, reply.json()["error"]["param"]) == (400, "prediction")


def test_a_logits_processor_is_one_that_the_engines_have() -> None:
    dispatcher, have = answering(), {"logits_processors": ["theirs", "m:Other"]}
    body = {"model": MODEL, "prompt": "Hello", "logits_processors": {"m:Other": {"a": [1, None]}, "theirs": {}}}
    assert send(dispatcher, COMPLETIONS, body, **have).status == 200
    params = dispatcher.requests[0].params
    assert list(params.logits_processors.items()) == [("m:Other", {"a": [1, None]}), ("theirs", {})]
    for asked, options, text in (
        ({"their": {}}, have, "'their' is unknown; this server has theirs, m:Other"),
        ({"theirs": {}}, {}, "'theirs' is unknown; this server has none (--logits-processors)"),
        ({"theirs": 1}, have, "object"),
        ({"theirs": {"x": 2**64}}, have, "integers of 64 bits"),
        ({"theirs": {"x": "x" * 17_000}}, have, "at most 16384 bytes"),
    ):
        reply = send(answering(), COMPLETIONS, body | {"logits_processors": asked}, **options)
        assert reply.status == 400
        assert text in reply.json()["error"]["message"]
        assert reply.json()["error"]["param"].startswith("logits_processors")


def test_allowed_tokens_and_bad_words_reach_the_engine_as_tokens() -> None:
    dispatcher = answering()
    assert complete(dispatcher, allowed_token_ids=[5, 6], bad_words=["zq", "a"]).status == 200
    params = dispatcher.requests[0].params
    assert params.allowed_token_ids == (5, 6)
    assert params.bad_words == ()
    assert params.bad_words_token_ids == (tuple(ids("zq")), tuple(ids("a")))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, ids("nop")),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, ids("nop")),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, ids("abc")),
        ({"truncate_prompt_tokens": 100}, ids("abcdefghijklmnop")),
    ],
)
def test_a_prompt_is_cut_to_the_tokens_that_are_asked_for(fields: dict[str, Any], kept: list[int]) -> None:
    for prompt in ("abcdefghijklmnop", ids("abcdefghijklmnop")):
        dispatcher = answering()
        body = complete(dispatcher, prompt=prompt, echo=True, **fields).json()
        assert dispatcher.requests[0].prompt_token_ids == kept
        assert body["usage"]["prompt_tokens"] == len(kept)
        assert body["choices"][0]["text"] == tokenizer().decode(kept) + "ab"


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_beyond_all_bounds_is_cut_without_tokenizing_all_of_it(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized = []
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, **options: Any) -> list[int]:
        tokenized.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    text = "".join(chr(97 + i % 26) for i in range(200_000))
    dispatcher = answering()
    fields = {"truncate_prompt_tokens": -1, "truncation_side": side, "max_tokens": 1}
    assert complete(dispatcher, prompt=text, **fields).status == 200
    expected = ids(text[-(MAX_MODEL_LEN - 1) :] if side == "left" else text[: MAX_MODEL_LEN - 1])
    assert dispatcher.requests[0].prompt_token_ids == expected
    assert max(tokenized) < 20_000


def test_messages_are_cut_too() -> None:
    dispatcher = answering()
    messages = [{"role": "user", "content": "z" * 5000}]
    assert chat(dispatcher, messages=messages, truncate_prompt_tokens=4, max_tokens=2).status == 200
    assert tokenizer().decode(dispatcher.requests[0].prompt_token_ids) == "zzz\n"


@pytest.mark.parametrize(("field", "value"), [("prompt_cache_key", "k"), ("session_id", "k")])
def test_a_cache_key_is_a_hint_for_the_route(field: str, value: str) -> None:
    dispatcher = answering()
    assert chat(dispatcher, **{field: value}).status == 200
    assert dispatcher.requests[0].affinity == "k"


def test_every_chunk_has_the_usage_of_its_choice_so_far() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    num_prompt = len(tokenizer().encode("Hello"))
    events = complete(answering(), n=2, stream=True, stream_options=options).events()
    assert events.pop() == "[DONE]"
    whole = events.pop()["usage"]
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (num_prompt, 6)
    for index in range(2):
        usages = [event["usage"] for event in events if event["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in usages] == [1, 2, 3]
        assert {usage["prompt_tokens"] for usage in usages} == {num_prompt}
        assert usages[-1]["total_tokens"] == num_prompt + 3


def test_the_role_chunk_has_usage_and_texts_are_the_same() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chat(answering(), stream=True, stream_options=options, logprobs=True).events()[:-1]
    plain = chat(answering(), stream=True, stream_options={"include_usage": True}, logprobs=True).events()[:-1]
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [0, 1, 2, 3]
    assert [event["choices"] for event in events] == [event["choices"] for event in plain]


def test_continuous_usage_needs_usage_as_in_vllm() -> None:
    events = complete(answering(), stream=True, stream_options={"continuous_usage_stats": True}).events()
    assert all("usage" not in event for event in events[:-1])


# --- templates ----------------------------------------------------------------------------------------------------

TEMPLATE = """{%- if tools %}tools={{ tools | tojson }};{% endif -%}
{%- if enable_thinking is defined %}thinking={{ enable_thinking }};{% endif -%}
{%- if reasoning_effort is defined %}effort={{ reasoning_effort }};{% endif -%}
{%- for m in messages %}<{{ m.role }}{% if m.tool_call_id %}:{{ m.tool_call_id }}{% endif %}>{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.id }}={{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor -%}
{%- if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif -%}
</>{% endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}"""


@pytest.fixture
def templated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The application has a template that shows all that it is given."""
    import small_app
    import small_tokenizers

    rich = Tokenizer(small_tokenizers.byte_level_backend(), chat_template=TEMPLATE)
    monkeypatch.setattr(small_app, "tokenizer", lambda: rich)
    monkeypatch.setattr(small_app, "served", functools.partial(small_app.served, max_model_len=1000))


def prompt_of(**fields: Any) -> str:
    dispatcher = answering()
    reply = chat(dispatcher, **fields)
    assert reply.status == 200, reply.json()
    return tokenizer().decode(dispatcher.requests[0].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.usefixtures("templated")
@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "<user>Hello</><assistant>"),
        ({"add_generation_prompt": False}, "<user>Hello</>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "thinking=False;<user>Hello</><assistant>"),
        ({"reasoning_effort": "low"}, "effort=low;<user>Hello</><assistant>"),
        ({"tools": [{"a": 1}], "tool_choice": "none"}, 'tools=[{"a": 1}];<user>Hello</><assistant>'),
        ({"tools": [], "tool_choice": "none"}, "<user>Hello</><assistant>"),
        (
            {"messages": [*USER, {"role": "assistant", "content": "I say  "}], "continue_final_message": True},
            "<user>Hello</><assistant>I say  ",
        ),
        (
            {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            '<user>Hello</><assistant>c1=f({"x": [1]})</><assistant>',
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{oops"}}]}]},
            '<assistant>=f("{oops")</><assistant>',
        ),
        ({"messages": [{"role": "tool", "tool_call_id": "c1", "content": "4"}]}, "<tool:c1>4</><assistant>"),
        (
            {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "why"}]},
            "<assistant>x[why]</><assistant>",
        ),
        ({"messages": [{"role": "assistant"}]}, "<assistant></><assistant>"),
    ],
)
def test_the_template_is_given_all_of_a_conversation(fields: dict[str, Any], prompt: str) -> None:
    assert prompt_of(**fields) == prompt


@pytest.mark.processes
def test_a_chat_template_of_a_request_is_taken_where_the_server_trusts_requests() -> None:
    """Rendered beside the event loop; its mistakes and its bounds are the request's."""
    trusting = {"api": HttpApi(trust_request_chat_template=True)}
    template = "{% for m in messages %}<{{ m.content[0].text }}>{% endfor %}"
    dispatcher = answering()
    body = {"model": MODEL, "messages": USER, "chat_template": template}
    assert send(dispatcher, CHAT, body, **trusting).status == 200
    assert tokenizer().decode(dispatcher.requests[0].prompt_token_ids) == "<Hello>"
    tokenized = send(answering(), "/tokenize", body, **trusting).json()
    assert tokenized["tokens"] == dispatcher.requests[0].prompt_token_ids
    for given, says in (
        ("{% if %}", "Expected an expression"),
        ("{{ messages.__class__.__mro__ }}" + template, "unsafe"),
        ("{{ 'a' * 1000000000 }}" + template, "memory|MemoryError"),
        ("x" * 100_001, "at most 100000 characters, got 100001"),
    ):
        reply = send(answering(), CHAT, body | {"chat_template": given}, **trusting)
        assert reply.status == 400
        assert re.search(says, reply.json()["error"]["message"])


# --- neutral values and labels ------------------------------------------------------------------------------------

NEUTRAL: dict[str, Any] = {
    "store": False,
    "service_tier": "auto",
    "response_format": {"type": "text"},
    "user": "u",
    "metadata": {"run": "1", "nested": {"a": [1]}},
    "safety_identifier": "s",
    "prompt_cache_retention": "in_memory",
    "length_penalty": 1,
    "use_beam_search": False,
    "spaces_between_special_tokens": True,
    "stream_interval": 1,
    "thinking_token_budget": -1,
    "kv_transfer_params": None,
    "stop": [],
    "stop_token_ids": [],
    "bad_words": [],
    "logit_bias": {},
}
OF_COMPLETIONS: dict[str, Any] = {"best_of": 1, "suffix": "", "echo": False, "add_special_tokens": True}
OF_CHAT: dict[str, Any] = {
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "verbosity": "medium",
    "include_reasoning": True,
    "documents": [],
    "echo": False,
    "chat_template_kwargs": {},
    "add_special_tokens": False,
}


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        *((COMPLETIONS, field, value) for field, value in (NEUTRAL | OF_COMPLETIONS).items()),
        *((CHAT, field, value) for field, value in (NEUTRAL | OF_CHAT).items()),
    ],
)
def test_what_changes_nothing_is_accepted_and_changes_nothing(path: str, field: str, value: Any) -> None:
    def request(**fields: Any) -> Any:
        dispatcher = answering()
        subject = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
        reply = send(dispatcher, path, {"model": MODEL, "seed": 1, **subject, **fields})
        assert reply.status == 200, reply.json()
        [started] = dispatcher.requests
        return started.prompt_token_ids, started.params, started.affinity

    assert request(**{field: value}) == request() == request(**{field: None})


def test_best_of_may_be_n() -> None:
    assert len(complete(answering(), n=3, best_of=3).json()["choices"]) == 3


def test_unknown_fields_are_dropped_where_the_server_says_so_but_no_transfer_is_taken() -> None:
    api = HttpApi(unknown_fields="ignore")
    nested = [{"role": "user", "mood": 1, "content": [{"type": "text", "text": "x", "cache_control": {}}]}]
    called = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "q": 1}, "r": 2}], "s": 3}]
    for path, fields in (
        (COMPLETIONS, {"prompt": "x", "mood": "x", "remote_host": "h"}),
        (CHAT, {"messages": nested, "stream": True, "stream_options": {"chunks": 1}}),
        (CHAT, {"messages": called, "response_format": {"type": "text", "strict": True}}),
    ):
        assert send(answering(), path, fields, api=api).status == 200
        assert send(answering(), path, fields).status == 400
    reply = send(FakeDispatcher(), COMPLETIONS, {"prompt": "x", "kv_transfer_params": {"remote_host": "h"}}, api=api)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "kv_transfer_params")
