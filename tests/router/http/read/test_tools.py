"""Calls of tools and thoughts in replies: whole, streamed, with what else a request may ask for."""

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import small_app
import small_tokenizers
import tokenizers
from asgi_client import Exchange, call
from coroutines import run
from fake_dispatcher import Answer, FakeDispatcher, logprob, say, tokens
from recorded_answers import ANSWERS, THOUGHTS, TOOLS, Recorded, Thought
from small_app import MODEL, TEMPLATE, eos, ids, make_app

from pdkv.base import registry
from pdkv.config import HttpApi
from pdkv.errors import ConfigError
from pdkv.parsers.registry import TOOL_PARSERS, check_parser_names, find_tool_parser
from pdkv.text import Tokenizer

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hello"}]
FUNCTIONS = [{"type": "function", "function": {"name": name}} for name in sorted(TOOLS)]
ONE = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>'
TWO = f"Let me see.\n\n{ONE}\n{ONE}"


def ask(answer: Answer | str, parser: str = "hermes", reasoning: str = "none", **fields: Any) -> Exchange:
    """One request; an answer that is a text comes token by token."""
    dispatcher = FakeDispatcher(say([*ids(answer), eos()]) if isinstance(answer, str) else answer)
    api = HttpApi(tool_parser=parser, reasoning_parser=reasoning)
    body = {"model": MODEL, "messages": USER, "tools": FUNCTIONS, **fields}
    return run(call(make_app(dispatcher, api=api, max_model_len=2000), "POST", CHAT, body))


def message(exchange: Exchange) -> dict[str, Any]:
    from openai.types.chat import ChatCompletion

    assert exchange.status == 200, exchange.json()
    ChatCompletion.model_validate(exchange.json())
    [choice] = exchange.json()["choices"]
    return {**choice["message"], "finish_reason": choice["finish_reason"]}


def streamed(exchange: Exchange, index: int = 0) -> dict[str, Any]:
    """The chunks of one choice put together, by OpenAI's rules for them."""
    from openai.types.chat import ChatCompletionChunk

    events = exchange.events()
    assert events.pop() == "[DONE]"
    whole: dict[str, Any] = {"content": "", "finish_reason": None}
    calls: list[dict[str, Any]] = []
    for event in events:
        ChatCompletionChunk.model_validate(event)
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            assert whole["finish_reason"] is None
            whole["finish_reason"] = choice["finish_reason"]
            delta = choice["delta"]
            assert len([name for name in delta if name != "role"]) <= 1
            for name in ("content", "reasoning_content", "role"):
                if name in delta:
                    whole[name] = whole.get(name, "") + delta[name]
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] == len(calls)
                    assert part["function"]["arguments"] == ""
                    calls.append({key: part[key] for key in ("id", "type", "function")})
                else:
                    assert part == {"index": len(calls) - 1, "function": {"arguments": part["function"]["arguments"]}}
                    calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        whole["tool_calls"] = calls
    if not whole["content"] and (calls or "reasoning_content" in whole):
        whole["content"] = None
    return {**whole, "refusal": None}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    ids = [call.pop("id") for call in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    return message


@pytest.mark.parametrize("recorded", ANSWERS, ids=lambda r: f"{r.parser}: {r.name}")
def test_recorded_answers_byte_by_byte(recorded: Recorded) -> None:
    whole = without_ids(message(ask(recorded.text, recorded.parser)))
    assert without_ids(streamed(ask(recorded.text, recorded.parser, stream=True))) == whole
    calls = tuple((c["function"]["name"], c["function"]["arguments"]) for c in whole.get("tool_calls", ()))
    assert calls == recorded.calls
    assert (whole["content"] or "") == recorded.content
    assert whole["finish_reason"] == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("thought", [t for t in THOUGHTS if not t.prompt], ids=lambda t: t.name)
def test_recorded_thoughts_byte_by_byte(thought: Thought) -> None:
    exchange = ask(thought.text, reasoning=thought.parser, tools=None)
    whole = message(exchange)
    assert streamed(ask(thought.text, reasoning=thought.parser, tools=None, stream=True)) == whole
    assert (whole.get("reasoning_content", ""), whole["content"] or "") == (thought.reasoning, thought.content)
    parts = thought.text.rpartition("[/THINK]" if thought.parser == "mistral" else "</think>")
    counted = len(ids(parts[0] + parts[1])) if parts[1] else len(ids(thought.text)) + 1
    details = exchange.json()["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": counted if thought.reasoning or parts[1] else 0}


# --- with other fields --------------------------------------------------------------------------------------------


def test_the_answer_ends_behind_the_first_call_where_only_one_is_wanted() -> None:
    for stream in (False, True):
        exchange = ask(TWO, parallel_tool_calls=False, stream=stream, stream_options=usage_of(stream))
        whole = streamed(exchange) if stream else message(exchange)
        assert len(whole["tool_calls"]) == 1
        assert whole["finish_reason"] == "tool_calls"
        usage = exchange.events()[-2]["usage"] if stream else exchange.json()["usage"]
        assert usage["completion_tokens"] == len(ids(TWO[: TWO.index("}}") + 2]))


def usage_of(stream: bool) -> dict[str, Any] | None:
    return {"include_usage": True} if stream else None


def test_only_one_call_of_tokens_that_come_at_once() -> None:
    """As with drafts: what comes behind the call in one delta is not part of the answer."""
    exchange = ask(lambda _: [tokens(*ids(TWO), eos(), end="stop")], parallel_tool_calls=False, return_token_ids=True)
    assert len(message(exchange)["tool_calls"]) == 1
    assert exchange.json()["choices"][0]["token_ids"] == ids(TWO[: TWO.index("}}") + 2])


def test_the_engines_are_told_when_no_more_is_wanted() -> None:
    dispatcher = FakeDispatcher(say([*ids(TWO), eos()]))
    app = make_app(dispatcher, api=HttpApi(tool_parser="hermes"), max_model_len=2000)
    body = {"messages": USER, "tools": FUNCTIONS, "parallel_tool_calls": False}
    assert run(call(app, "POST", CHAT, body)).status == 200
    assert dispatcher.generations[0].finished


def test_a_call_that_is_cut_off_keeps_the_length_as_its_reason() -> None:
    for stream in (False, True):
        exchange = ask(ONE, max_completion_tokens=ONE.index("TC"), stream=stream)
        whole = streamed(exchange) if stream else message(exchange)
        assert whole["finish_reason"] == "length"
        assert (
            whole["tool_calls"][0]["function"]["arguments"]
            == '{"zone": "UTC"}'[: len(whole["tool_calls"][0]["function"]["arguments"])]
        )


def test_without_a_choice_of_tools_calls_are_text() -> None:
    assert message(ask(ONE, tool_choice="none"))["content"] == ONE
    assert message(ask(ONE, tools=None))["content"] == ONE
    assert message(ask(ONE, tools=[], tool_choice="auto"))["content"] == ONE


def test_a_stop_string_ends_the_text_in_front_of_calls() -> None:
    for stream in (False, True):
        exchange = ask(TWO, stop=["see"], stream=stream)
        whole = streamed(exchange) if stream else message(exchange)
        assert (whole["content"], whole["finish_reason"]) == ("Let me ", "stop")
        assert "tool_calls" not in whole


def test_logprobs_and_token_ids_of_all_tokens_are_shown() -> None:
    def answer(_: object) -> Sequence[Any]:
        given = [*ids(TWO), eos()]
        return [
            tokens(i, logprobs=[logprob(i)], end="stop" if n == len(given) else None) for n, i in enumerate(given, 1)
        ]

    fields = {"logprobs": True, "return_token_ids": True}
    [whole] = ask(answer, **fields).json()["choices"]
    events = ask(answer, **fields, stream=True).events()[:-1]
    choices = [event["choices"][0] for event in events]
    assert [i for c in choices for i in c.get("token_ids", ())] == whole["token_ids"] == [*ids(TWO), eos()]
    shown = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert shown == whole["logprobs"]["content"]
    assert len(shown) == len(ids(TWO)) + 1
    assert choices[1]["prompt_token_ids"] == events[1]["choices"][0]["prompt_token_ids"]


def test_every_choice_has_calls_of_its_own() -> None:
    whole = ask(TWO, n=2).json()
    found = [call["id"] for choice in whole["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(found)) == 4
    exchange = ask(TWO, n=2, stream=True)
    for index in range(2):
        assert without_ids(streamed(exchange, index)) == without_ids(
            {**whole["choices"][index]["message"], "finish_reason": "tool_calls"}
        )


def test_usage_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = ask(TWO, stream=True, stream_options=options).events()[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[:-1] == sorted(counts[:-1])
    assert counts[-2:] == [len(ids(TWO)) + 1] * 2


def test_tokens_that_show_nothing_make_no_chunk() -> None:
    events = ask(TWO, stream=True).events()[:-1]
    assert len(events) < len(ids(TWO))
    assert all(event["choices"][0]["delta"] or event["choices"][0]["finish_reason"] for event in events)


def test_thoughts_can_be_left_out() -> None:
    text = "<think>hm</think>\n\nYes"
    whole = message(ask(text, reasoning="qwen3", include_reasoning=False))
    assert (whole["content"], "reasoning_content" in whole) == ("Yes", False)
    whole = streamed(ask(text, reasoning="qwen3", include_reasoning=False, stream=True))
    assert (whole["content"], "reasoning_content" in whole) == ("Yes", False)


def test_thoughts_and_calls() -> None:
    text = f"<think>\nI might call {ONE}\n</think>\n\n{ONE}"
    for stream in (False, True):
        exchange = ask(text, reasoning="qwen3", stream=stream)
        whole = streamed(exchange) if stream else message(exchange)
        assert whole["reasoning_content"] == f"I might call {ONE}"
        assert whole["content"] is None
        assert len(whole["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({}, "hm"),
        ({"messages": [{"role": "user", "content": "what is <think>"}], "add_generation_prompt": False}, ""),
        ({"messages": [*USER, {"role": "assistant", "content": "<think>so"}], "continue_final_message": True}, "hm"),
        (
            {
                "messages": [*USER, {"role": "assistant", "content": "<think>so</think>a"}],
                "continue_final_message": True,
            },
            "",
        ),
        ({"messages": [*USER, {"role": "assistant", "content": "so"}], "continue_final_message": True}, ""),
    ],
)
def test_the_prompt_says_where_the_answer_begins(
    fields: dict[str, Any], reasoning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
    opened = Tokenizer(small_tokenizers.byte_level_backend(), chat_template=template)
    monkeypatch.setattr(small_app, "tokenizer", lambda: opened)
    text = "hm</think>yes"
    whole = message(ask(text, reasoning="qwen3", tools=None, **fields))
    assert whole.get("reasoning_content", "") == reasoning
    assert whole["content"] == ("yes" if reasoning else text)


# --- the model's family -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [small_tokenizers.byte_level_backend, small_tokenizers.byte_level_sequence_backend])
def test_markers_that_are_special_tokens_are_seen_by_the_parser_and_others_stay_hidden(
    backend: Callable[[], tokenizers.Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = backend()
    made.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[INST]"])
    rich = Tokenizer(made, chat_template=TEMPLATE)
    monkeypatch.setattr(small_app, "tokenizer", lambda: rich)
    given = rich.encode('Wait.[INST][TOOL_CALLS]get_time[ARGS]{"zone": "[INST]"}', add_special_tokens=False)
    assert len(given) < 40
    for stream in (False, True):
        exchange = ask(say([*given, eos()]), "mistral", stream=stream)
        whole = without_ids(streamed(exchange) if stream else message(exchange))
        assert whole["content"] == "Wait."
        assert [call["function"]["arguments"] for call in whole["tool_calls"]] == ['{"zone": ""}']
    assert "TOOL" not in message(ask(say([*given, eos()]), "mistral", tool_choice="none"))["content"]


FAMILIES = {
    "hermes": "<tools>{{ tools }}</tools> <tool_call>\n{'name': <function-name>, 'arguments': <args>}\n</tool_call>",
    "llama3_json": '<|start_header_id|>ipython<|end_header_id|> {"name": function name, "parameters": dictionary}',
    "mistral": "[AVAILABLE_TOOLS] {{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS]",
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=arguments>",
    "glm45": "<tool_call>{function-name}\n<arg_key>arguments</arg_key>\n<arg_value>",
    "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...)]",
    "": "{{ messages }}",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_chat_template_tells_the_family(family: str) -> None:
    found = find_tool_parser("auto", FAMILIES[family])
    assert found is (TOOL_PARSERS.load(family) if family else None)
    assert find_tool_parser("none", FAMILIES[family]) is None
    assert find_tool_parser("mistral", FAMILIES[family]) is TOOL_PARSERS.load("mistral")


def test_a_third_party_can_bring_a_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("theirs", "pdkv.parsers.hermes:HermesParser", "pdkv.tool_parsers")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "pdkv.tool_parsers" else [])
    check_parser_names("theirs", "none")
    assert find_tool_parser("theirs", "") is TOOL_PARSERS.load("hermes")
    with pytest.raises(
        ConfigError, match=r"unknown tool parser 'hermse' \(did you mean 'hermes'\?\); known: glm45, hermes"
    ):
        check_parser_names("hermse", "none")
    with pytest.raises(ConfigError, match="unknown reasoning parser 'theirs'; known: deepseek_r1"):
        check_parser_names("auto", "theirs")
    with pytest.raises(ConfigError, match="is not a subclass of ToolParser"):
        find_tool_parser("pdkv.parsers.reasoning:Qwen3Parser", "")


def test_ids_of_calls_are_what_the_template_accepts() -> None:
    [made] = message(ask("[TOOL_CALLS]get_time[ARGS]{}", "mistral"))["tool_calls"]
    assert len(made["id"]) == 9
    assert made["id"].isalnum()
    [made] = message(ask(ONE))["tool_calls"]
    assert made["id"].startswith("call_")
