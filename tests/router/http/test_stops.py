"""Stop strings: what they look at where a model thinks, and whether they are shown."""

from typing import Any

import pytest
from asgi_client import call
from coroutines import run
from fake_dispatcher import FakeDispatcher, say
from small_app import MODEL, eos, ids, make_app

from pdkv.config import HttpApi

CHAT = "/v1/chat/completions"
THOUGHT = "<think>\nFirst,\n\nENDs are near.\n</think>\n\n"


def answer(text: str, *, old: bool = False, thinks: str = "qwen3", **fields: Any) -> Any:
    """(thoughts, text, finish reason, stop reason, tokens), the same streamed and not."""
    said = [*ids(text), eos()]
    found = []
    for stream in (False, True):
        dispatcher = FakeDispatcher(say(said))
        api = HttpApi(reasoning_parser=thinks, stop_in_reasoning=old, tool_parser="hermes")
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": stream, **fields}
        if stream:
            body["stream_options"] = {"include_usage": True}
        exchange = run(call(make_app(dispatcher, api=api, max_model_len=2000), "POST", CHAT, body))
        assert exchange.status == 200, exchange.body
        found.append(streamed(exchange.events()) if stream else whole(exchange.json()))
    assert found[0] == found[1]
    return found[0]


def whole(body: dict[str, Any]) -> tuple[Any, ...]:
    [choice] = body["choices"]
    message = choice["message"]
    thoughts, text = message.get("reasoning_content") or "", message["content"] or ""
    return thoughts, text, choice["finish_reason"], choice["stop_reason"], body["usage"]["completion_tokens"]


def streamed(events: list[Any]) -> tuple[Any, ...]:
    deltas = [event["choices"][0] for event in events[:-1] if event["choices"]]
    thoughts = "".join(delta["delta"].get("reasoning_content") or "" for delta in deltas)
    text = "".join(delta["delta"].get("content") or "" for delta in deltas)
    end = deltas[-1]
    return thoughts, text, end["finish_reason"], end.get("stop_reason"), events[-2]["usage"]["completion_tokens"]


@pytest.mark.parametrize("stop", ["END", ["END", "never"], "\n\n", "</think>", "<think>", "First,\n\nEND", "."])
def test_thoughts_are_not_looked_at(stop: str | list[str]) -> None:
    thoughts, text, reason, stopped_by, num_tokens = answer(THOUGHT + "Yes", stop=stop)
    assert (thoughts, text, reason, stopped_by) == ("First,\n\nENDs are near.", "Yes", "stop", None)
    assert num_tokens == len(THOUGHT) + 4


@pytest.mark.parametrize("stop", ["END", "s END", ["D", "END"]])
def test_the_answer_behind_them_is(stop: str | list[str]) -> None:
    expected = stop if isinstance(stop, str) else "D"
    text = "Yes END of it"
    shown = text[: text.index(expected)]
    found = answer(THOUGHT + text, stop=stop)
    num_tokens = len(THOUGHT) + len(shown + expected)
    stopped_by = "END" if isinstance(stop, list) else stop  # of those that end together the longest
    shown = text[: text.index(stopped_by)]
    assert found == ("First,\n\nENDs are near.", shown, "stop", stopped_by, num_tokens)


def test_the_old_way_is_an_option() -> None:
    assert answer(THOUGHT + "Yes", stop="END", old=True)[:4] == ("First,", "", "stop", "END")


def test_without_a_parser_all_of_it_is_answer() -> None:
    assert answer(THOUGHT + "Yes", stop="END", thinks="none")[:4] == ("", "<think>\nFirst,\n\n", "stop", "END")


def test_what_may_become_a_stop_string_comes_out_at_the_end() -> None:
    assert answer(THOUGHT + "Yes EN", stop="END")[1:4] == ("Yes EN", "stop", None)
    assert answer("<", stop="END")[1:4] == ("<", "stop", None)


def test_before_min_tokens_no_stop_string_counts() -> None:
    text = "END and END"
    num_tokens = len(THOUGHT + text)
    assert answer(THOUGHT + text, stop="END", min_tokens=num_tokens)[1:] == ("END and ", "stop", "END", num_tokens)
    assert answer(THOUGHT + text, stop="END", min_tokens=num_tokens + 1)[1:4] == (text, "stop", None)


def test_a_stop_string_within_a_call_ends_it() -> None:
    call_text = '<tool_call>{"name": "f", "arguments": {"a": "END'
    tools = [{"type": "function", "function": {"name": "f"}}]
    thoughts, text, reason, stopped_by, _ = answer(THOUGHT + call_text, stop="END", tools=tools)
    assert (thoughts != "", text, reason, stopped_by) == (True, "", "tool_calls", "END")


@pytest.mark.parametrize("thinks", ["qwen3", "none"])
def test_the_stop_string_can_be_part_of_the_text(thinks: str) -> None:
    found = answer("Yes END of it", stop="END", thinks=thinks, include_stop_str_in_output=True)
    assert found[1:4] == ("Yes END", "stop", "END")
    assert answer("Yes END of it", stop="END", thinks=thinks)[1:4] == ("Yes ", "stop", "END")


def test_so_can_a_stop_token() -> None:
    """As in vLLM: a special one is text where special tokens are."""
    fields = {"stop_token_ids": ids("!"), "include_stop_str_in_output": True}
    body = {"model": MODEL, "prompt": "x", **fields}
    shown: dict[str, Any] = {"skip_special_tokens": False}
    for more, token, text in (({}, ids("!")[0], "Hi!"), ({}, eos(), "Hi"), (shown, eos(), "Hi</s>")):
        dispatcher = FakeDispatcher(say([*ids("Hi"), token]))
        reply = run(call(make_app(dispatcher), "POST", "/v1/completions", body | more)).json()
        assert reply["choices"][0]["text"] == text
