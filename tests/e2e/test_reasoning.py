"""Thoughts in front of calls and shapes, and calls that the model begins by itself, over a real deployment.

The model is random: its tags are tokens of their own, so that a bias makes it write them.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from deployments import launches, write_tokenizer
from openai_replies import client_of

if TYPE_CHECKING:
    from openai import OpenAI

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
FIRST_TAG = 258
IDS = {tag: FIRST_TAG + i for i, tag in enumerate(TAGS)}
IDS |= {"</s>": 1, "{": 2 + sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()).index("{")}
USER: Any = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
SHAPE: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
TOOLS: Any = [{"type": "function", "function": {"name": "get_time", "parameters": SCHEMA, "strict": True}}]


@pytest.fixture(scope="module")
def client(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator["OpenAI"]:
    path = tmp_path_factory.mktemp("models") / "served"
    shutil.copytree(hf_model("llama"), path)
    write_tokenizer(path)
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.add_tokens(list(TAGS))
    assert {tag: backend.token_to_id(tag) for tag in IDS} == IDS
    backend.save(str(path / "tokenizer.json"))
    flags = ("--prefill", "1", "--decode", "1", "--tool-parser", "hermes", "--reasoning-parser", "qwen3")
    with launches(path) as launch, client_of(launch(*flags).url) as client:
        yield client


def ask(client: "OpenAI", biases: dict[str, int], **fields: Any) -> dict[str, Any]:
    """The answer, which is the same whole and streamed; the model writes what has most bias where it may."""
    bias = {str(IDS[tag]): value for tag, value in biases.items()}
    fields = {"model": "served", "messages": USER, "seed": 4, "max_tokens": 200, "logit_bias": bias, **fields}
    [whole] = client.chat.completions.create(**fields).model_dump()["choices"]
    streamed: dict[str, Any] = {"reasoning_content": "", "content": "", "arguments": ""}
    for chunk in client.chat.completions.create(**fields, stream=True):
        delta = chunk.model_dump()["choices"][0]["delta"]
        for name in ("reasoning_content", "content"):
            streamed[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or ():
            streamed["arguments"] += call["function"]["arguments"]
    message = whole["message"]
    calls = message.get("tool_calls") or ()
    assert streamed["content"] == (message["content"] or "")
    assert streamed["reasoning_content"] == message.get("reasoning_content", "")
    assert streamed["arguments"] == "".join(call["function"]["arguments"] for call in calls)
    return {**message, "tool_calls": list(calls), "finish_reason": whole["finish_reason"]}


THINKS = {"<think>": 100, "</think>": 99, "</s>": 100}
"""Thoughts are opening tags, until the dice say that they end."""


def test_a_shape_behind_thoughts(client: "OpenAI") -> None:
    answer = ask(client, THINKS, response_format=SHAPE)
    assert answer["reasoning_content"]
    assert json.loads(answer["content"])["zone"] in ("UTC", "CET")
    assert answer["finish_reason"] == "stop"
    at_once = ask(client, {"{": 100, "</s>": 100}, response_format=SHAPE)
    assert "reasoning_content" not in at_once
    assert json.loads(at_once["content"])["zone"] in ("UTC", "CET")


def test_a_required_call_behind_thoughts(client: "OpenAI") -> None:
    answer = ask(client, THINKS, tools=TOOLS, tool_choice="required")
    assert answer["reasoning_content"]
    [call] = answer["tool_calls"]
    assert json.loads(call["function"]["arguments"])["zone"] in ("UTC", "CET")
    assert (answer["content"], answer["finish_reason"]) == (None, "tool_calls")


def test_a_call_that_the_model_begins(client: "OpenAI") -> None:
    begins = {"<tool_call>": 100, "<think>": -100, "</s>": 90}
    answer = ask(client, begins, tools=TOOLS, parallel_tool_calls=False)
    [call] = answer["tool_calls"]
    assert json.loads(call["function"]["arguments"])["zone"] in ("UTC", "CET")
    assert (answer["content"], answer["finish_reason"]) == (None, "tool_calls")
    free = [{"type": "function", "function": {"name": "get_time", "parameters": SCHEMA}}]
    unbound = ask(client, begins, tools=free, max_tokens=10)
    assert (unbound["content"], unbound["tool_calls"]) == ("<tool_call>" * 10, [])
