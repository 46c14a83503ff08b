"""Logprobs by the thousand: the prompt's are computed once, and large replies are encoded beside the event loop."""

import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from asgi_client import call
from coroutines import run
from fake_dispatcher import FakeDispatcher, say, tokens
from small_app import MODEL, ids, make_app

from pdkv.router.http.answer import choice as choice_module
from pdkv.router.http.answer import completions, replies, sse
from pdkv.wire.messages import PromptLogprobs

PROMPTS = [[5, 6, 7], [8, 9]]
USER = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 2}, {"prompt_logprobs": 2}])
def test_the_prompts_logprobs_are_computed_once_and_in_every_choice(fields: dict[str, Any]) -> None:
    dispatcher = FakeDispatcher(say(ids("ab")))
    body = {"model": MODEL, "prompt": PROMPTS, "n": 3, **fields}
    choices = run(call(make_app(dispatcher), "POST", "/v1/completions", body)).json()["choices"]
    asked = [request.params.prompt_logprobs for request in dispatcher.requests]
    assert sorted(asked, key=str) == [2, 2, None, None, None, None]
    for first in (0, 3):
        of_one_prompt = choices[first : first + 3]
        for choice in of_one_prompt:
            assert choice["logprobs"] == of_one_prompt[0]["logprobs"]
            assert choice.get("prompt_logprobs") == of_one_prompt[0].get("prompt_logprobs")
            num_prompt = len(PROMPTS[first // 3])
            if "echo" in fields:
                assert len(choice["logprobs"]["tokens"]) == num_prompt + 2
            else:
                assert len(choice["prompt_logprobs"]) == num_prompt


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": PROMPTS, "n": 2, "echo": True, "logprobs": 2}),
        ("/v1/completions", {"prompt": PROMPTS, "n": 2, "echo": True, "logprobs": 2, "stream": True}),
        ("/v1/completions", {"prompt": PROMPTS, "prompt_logprobs": 2}),
        ("/v1/chat/completions", {"messages": USER, "n": 2, "logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", {"messages": USER, "prompt_logprobs": 2}),
    ],
)
def test_many_logprobs_do_not_hold_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    """The same reply, made on another thread."""
    threads: set[threading.Thread] = set()

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*arguments: Any, **options: Any) -> Any:
            threads.add(threading.current_thread())
            return function(*arguments, **options)

        return note

    for module, name in (
        (completions, "completion_logprobs"),
        (completions, "chat_logprobs"),
        (completions, "prompt_logprobs"),
        (sse, "completion_logprobs"),
        (PromptLogprobs, "decode"),
    ):
        monkeypatch.setattr(module, name, noting(getattr(module, name)))

    def reply() -> Any:
        threads.clear()
        got = run(call(make_app(FakeDispatcher(say(ids("ab")))), "POST", path, {"model": MODEL, **fields}))
        assert got.status == 200
        return [event for event in got.events() if event != "[DONE]"] if "stream" in fields else [got.json()]

    plain = reply()
    assert threads == {threading.main_thread()}
    monkeypatch.setattr(replies, "INLINE_LOGPROBS", 0)
    monkeypatch.setattr(choice_module, "_INLINE_ECHO", 0)
    threaded = reply()
    assert threads
    assert threading.main_thread() not in threads
    shown = [sorted(str(c) for event in events for c in event["choices"]) for events in (plain, threaded)]
    assert shown[0] == shown[1]
    assert [event.get("prompt_logprobs") for event in threaded] == [event.get("prompt_logprobs") for event in plain]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"logprobs": 1, "max_tokens": 0}, {"n": 2, "logprobs": 0}])
def test_the_echo_of_a_long_prompt_does_not_hold_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], stream: bool
) -> None:
    """It is made once per prompt, on another thread, and the reply is the same."""
    threads: list[threading.Thread] = []
    show = choice_module.Choice._show_prompt

    def note(self: choice_module.Choice) -> Any:
        threads.append(threading.current_thread())
        return show(self)

    monkeypatch.setattr(choice_module.Choice, "_show_prompt", note)
    body = {"model": MODEL, "prompt": PROMPTS, "echo": True, "seed": 1, "stream": stream, **fields}

    def reply() -> Any:
        threads.clear()
        got = run(call(make_app(FakeDispatcher(say(ids("ab")))), "POST", "/v1/completions", body))
        assert got.status == 200
        if not stream:
            return [{**entry, "index": 0} for entry in got.json()["choices"]]
        texts: dict[int, str] = defaultdict(str)
        logprobs: dict[int, list[Any]] = defaultdict(list)
        for line in re.findall(r"data: ({.*})", got.body.decode()):
            for entry in json.loads(line)["choices"]:
                texts[entry["index"]] += entry["text"]
                logprobs[entry["index"]] += (entry["logprobs"] or {"token_logprobs": []})["token_logprobs"]
        return texts, logprobs

    inline = reply()
    assert threads == [threading.main_thread()] * len(PROMPTS)
    monkeypatch.setattr(choice_module, "_INLINE_ECHO", 1)
    assert reply() == inline
    assert len(threads) == len(PROMPTS)
    assert threading.main_thread() not in threads


def test_what_an_engine_calls_logprobs_and_is_none_fails_its_request() -> None:
    broken = PromptLogprobs(3, [b"\x00"])
    dispatcher = FakeDispatcher(lambda _: [tokens(*ids("a"), end="stop", prompt_logprobs=broken)])
    body = {"model": MODEL, "prompt": PROMPTS[0], "prompt_logprobs": 2}
    got = run(call(make_app(dispatcher), "POST", "/v1/completions", body))
    assert got.status == 500
    assert "invalid prompt logprobs" in got.json()["error"]["message"]
