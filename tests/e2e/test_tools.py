"""Calls of tools, answers with a shape and the Responses API through the official client, in each hand-off order."""

import asyncio
import json
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import jsonschema
import pytest
from client_programs import python_with, run_program
from deployments import Launch, Running
from openai_replies import client_of
from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from openai import OpenAI

USER: Any = [{"role": "user", "content": "Where is it warm?"}]


END = "</s>"
Bias = Callable[..., dict[str, int]]


class Unit(Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


class Weather(BaseModel):
    """Look up the weather."""

    city: str = Field(pattern="^[A-Z][a-zé]{0,8}$")
    unit: Unit
    days: int = Field(ge=1, le=14)


class Step(BaseModel):
    kind: Literal["walk", "ride"]
    minutes: int = Field(ge=0, le=90)


class Route(BaseModel):
    """Find a way."""

    steps: list[Step] = Field(max_length=3)
    note: str | None = Field(max_length=5)


MODELS: dict[str, type[BaseModel]] = {"Weather": Weather, "Route": Route}


@cache
def tools_of(*, strict: bool) -> Any:
    """Both models as functions, whose arguments are their schemas'."""
    from openai import pydantic_function_tool

    functions: list[Any] = [pydantic_function_tool(model)["function"] for model in MODELS.values()]
    if not strict:
        functions = [{name: value for name, value in function.items() if name != "strict"} for function in functions]
    return [{"type": "function", "function": function} for function in functions]


ORDERS = {
    "prefill_first": ("--prefill", "2", "--decode", "4"),
    "decode_first": ("--prefill", "1", "--decode", "1"),
    "needs_peer_first": ("--prefill", "1", "--decode", "1", "--connector", "p2p"),
    "concurrent": ("--prefill", "1", "--decode", "1", "--connector", "p2p"),
}


@pytest.fixture(
    scope="module",
    params=[
        "concurrent",
        *(pytest.param(o, marks=pytest.mark.slow) for o in ("prefill_first", "decode_first", "needs_peer_first")),
    ],
)
def deployment(module_launch: Launch, request: pytest.FixtureRequest) -> Running:
    return module_launch(*ORDERS[request.param], "--order", request.param, "--tool-parser", "hermes")


@pytest.fixture(scope="module")
def client(deployment: Running) -> Iterator["OpenAI"]:
    with client_of(deployment.url) as client:
        yield client


@pytest.fixture(scope="module")
def bias(client: "OpenAI") -> Bias:
    """A logit_bias by which the model takes one of some characters where it may."""

    def bias(*chars: str) -> dict[str, int]:
        found = {}
        for char in chars:
            fields: Any = {"prompt": char, "max_tokens": 1, "extra_body": {"return_token_ids": True}}
            choice = client.completions.create(model="served", **fields).choices[0].model_dump()
            found[str(choice["prompt_token_ids"][0])] = 100
        return found

    return bias


def ask(client: "OpenAI", **fields: Any) -> list[dict[str, Any]]:
    """The choices, asked for whole and streamed; both have to be the same but for ids."""
    fields = {"model": "served", "messages": USER, "temperature": 1, "seed": 3, "max_tokens": 600, **fields}
    whole = [choice.model_dump() for choice in client.chat.completions.create(**fields).choices]
    stream = client.chat.completions.create(**fields, stream=True)
    streamed: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            _extend(streamed.setdefault(choice.index, {"content": None, "calls": []}), choice)
    assert [streamed[index] for index in sorted(streamed)] == [_summary(choice) for choice in whole]
    return whole


def _extend(whole: dict[str, Any], choice: Any) -> None:
    whole["finish_reason"] = choice.finish_reason
    if choice.delta.content:
        whole["content"] = (whole["content"] or "") + choice.delta.content
    for call in choice.delta.tool_calls or ():
        if call.id:
            assert call.index == len(whole["calls"])
            whole["calls"].append((call.function.name, ""))
        else:
            name, arguments = whole["calls"][call.index]
            whole["calls"][call.index] = (name, arguments + call.function.arguments)


def _summary(choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "content": choice["message"]["content"],
        "calls": calls_of(choice),
        "finish_reason": choice["finish_reason"],
    }


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    calls = choice["message"]["tool_calls"] or ()
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def check_calls(choice: dict[str, Any]) -> list[tuple[str, str]]:
    """The calls of an answer that has nothing else."""
    assert choice["message"]["content"] is None
    check_arguments(calls_of(choice))
    return calls_of(choice)


def check_arguments(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        MODELS[name].model_validate_json(arguments)


@pytest.mark.parametrize("strict", [True, False])
def test_required_calls(client: "OpenAI", strict: bool, bias: Bias) -> None:
    choices = ask(client, tools=tools_of(strict=strict), tool_choice="required", n=8, logit_bias=bias(END))
    for choice in choices:
        assert (len(check_calls(choice)), choice["finish_reason"]) == (1, "tool_calls")
    assert {name for choice in choices for name, _ in calls_of(choice)} == MODELS.keys()


def test_several_required_calls_or_one(client: "OpenAI", bias: Bias) -> None:
    newline = bias("\n")  # a call is followed by one
    fields = {"tools": tools_of(strict=False), "tool_choice": "required", "n": 4, "logit_bias": newline}
    for choice in ask(client, **fields, max_tokens=400):
        assert (choice["finish_reason"], len(calls_of(choice)) > 1) == ("length", True)
        *whole, _ = calls_of(choice)
        check_arguments(whole)
    for choice in ask(client, **fields, parallel_tool_calls=False):
        assert (len(check_calls(choice)), choice["finish_reason"]) == (1, "tool_calls")


def test_a_named_tool(client: "OpenAI") -> None:
    choice = {"type": "function", "function": {"name": "Route"}}
    for answer in ask(client, tools=tools_of(strict=False), tool_choice=choice, n=4, temperature=0):
        [(name, _)] = check_calls(answer)
        assert (name, answer["finish_reason"]) == ("Route", "stop")


def test_the_model_chooses_between_text_and_calls(client: "OpenAI", bias: Bias) -> None:
    [answer] = ask(client, tools=tools_of(strict=True), max_tokens=60)
    assert answer["message"]["content"]
    shape: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["warm", "cold"]}}}
    [called] = ask(client, tools=tools_of(strict=True), response_format=shape, logit_bias=bias("<", END))
    assert len(check_calls(called)) == 1
    [answered] = ask(client, tools=tools_of(strict=True), response_format=shape, logit_bias=bias('"'))
    assert answered["message"]["content"] in ('"warm"', '"cold"')
    assert answered["finish_reason"] == "stop"


def test_models_of_pydantic_are_parsed(client: "OpenAI", bias: Bias) -> None:
    fields: Any = {"model": "served", "messages": USER, "seed": 5, "max_tokens": 600}
    reply = client.chat.completions.parse(**fields, response_format=Route)
    assert isinstance(reply.choices[0].message.parsed, Route)
    reply = client.chat.completions.parse(
        **fields, tools=tools_of(strict=True), tool_choice="required", logit_bias=bias(END)
    )
    [call, *_] = reply.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather | Route)
    text = ""
    with client.chat.completions.stream(**fields, response_format=Weather) as stream:
        for event in stream:
            if event.type == "content.delta":
                text += event.delta
        final = stream.get_final_completion().choices[0].message
    assert final.content == text
    assert isinstance(final.parsed, Weather)


@pytest.mark.parametrize(
    ("shape", "judge"),
    [
        ({"regex": "[ab]{3}-[0-9]{2}"}, {"pattern": "^[ab]{3}-[0-9]{2}$"}),
        ({"choice": ["red", "green"]}, {"enum": ["red", "green"]}),
        ({"grammar": 'root ::= [a-c] ("-" [a-c]){2}'}, {"pattern": "^[a-c](-[a-c]){2}$"}),
    ],
)
def test_shapes_of_completions(client: "OpenAI", shape: dict[str, Any], judge: dict[str, Any]) -> None:
    for body in ({"structured_outputs": shape}, {f"guided_{name}": value for name, value in shape.items()}):
        reply = client.completions.create(
            model="served", prompt=["It is", "Then"], n=3, max_tokens=20, seed=1, extra_body=body
        )
        assert len(reply.choices) == 6
        for choice in reply.choices:
            jsonschema.validate(choice.text, judge)
            assert choice.finish_reason == "stop"


def test_json_objects(client: "OpenAI", bias: Bias) -> None:
    for answer in ask(client, response_format={"type": "json_object"}, n=4, logit_bias=bias("}", '"', "]")):
        assert isinstance(json.loads(answer["message"]["content"]), dict)


# --- the Responses API -----------------------------------------------------------------------------------------------

FIELDS: Any = {"model": "served", "input": "Where is it warm?", "temperature": 0.8, "extra_body": {"seed": 4}}


def test_a_response_is_the_chats_answer(client: "OpenAI") -> None:
    fields: Any = {**FIELDS, "instructions": "Be brief.", "max_output_tokens": 24}
    whole = client.responses.create(**fields)
    events = list(client.responses.create(**fields, stream=True))
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": FIELDS["input"]}]
    chat = client.chat.completions.create(model="served", messages=messages, temperature=0.8, seed=4, max_tokens=24)
    streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert whole.output_text == streamed == chat.choices[0].message.content
    assert (whole.status, whole.incomplete_details and whole.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert events[-1].type == "response.incomplete"
    assert chat.usage is not None
    for usage in (whole.usage, events[-1].response.usage):
        assert usage is not None
        assert (usage.input_tokens, usage.output_tokens) == (chat.usage.prompt_tokens, 24)


def test_a_function_is_called_and_its_result_sent_back(client: "OpenAI") -> None:
    choice: Any = {"type": "function", "name": "Weather"}
    tool = {"type": "function", **tools_of(strict=True)[0]["function"]}
    fields: Any = {**FIELDS, "tools": [tool], "tool_choice": choice}
    with client.responses.stream(**fields) as stream:
        streamed: Any = stream.get_final_response().output
    whole = client.responses.create(**fields)
    [called] = whole.output
    assert called.type == "function_call"
    assert called.arguments == streamed[0].arguments
    Weather.model_validate_json(called.arguments)
    result: Any = {"type": "function_call_output", "call_id": called.call_id, "output": "warm"}
    history: Any = [{"role": "user", "content": FIELDS["input"]}, called, result]
    after = client.responses.create(**{**fields, "input": history, "tool_choice": "none"}, max_output_tokens=4)
    assert after.output[0].type == "message"


def test_models_of_pydantic_are_parsed_from_responses(client: "OpenAI") -> None:
    parsed = client.responses.parse(**FIELDS, text_format=Weather).output_parsed
    assert isinstance(parsed, Weather)
    with client.responses.stream(**FIELDS, text_format=Weather) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_parsed == parsed
    assert final.output_text == "".join(texts)


def test_thoughts_are_an_item_that_can_be_sent_back(launch: Launch) -> None:
    """The model's thoughts, which DeepSeek's parser takes its answers to begin with, never end."""
    deployment = launch("--prefill", "1", "--decode", "1", "--reasoning-parser", "deepseek_r1")
    with client_of(deployment.url) as client:
        fields: Any = {**FIELDS, "max_output_tokens": 12}
        whole = client.responses.create(**fields)
        events = client.responses.create(**fields, stream=True)
        streamed = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        [thoughts] = whole.output
        assert thoughts.type == "reasoning"
        assert thoughts.content is not None
        assert thoughts.content[0].text == streamed != ""
        assert whole.usage is not None
        assert whole.usage.output_tokens_details.reasoning_tokens == 12
        history: Any = [{"role": "user", "content": FIELDS["input"]}, thoughts, {"role": "user", "content": "So?"}]
        assert client.responses.create(**{**fields, "input": history}).usage


LANGCHAIN = """
import sys
from typing import Literal
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

class Step(BaseModel):
    "A step."
    kind: Literal["walk", "ride"]
    minutes: int = Field(ge=0, le=90)

at = {"model": "served", "base_url": sys.argv[1], "api_key": "x", "max_tokens": 300, "seed": 1, "max_retries": 0}
chat = ChatOpenAI(**at, extra_body={"logit_bias": {i: 100 for i in sys.argv[2].split(",")}})
for strict in (None, True):
    for choice in ("any", "Step"):
        bound = chat.bind_tools([Step], tool_choice=choice, strict=strict)
        first, *rest = bound.stream("hi")
        for message in (bound.invoke("hi"), sum(rest, first)):
            [call] = message.tool_calls
            assert call["name"] == "Step", call
            Step(**call["args"])
for method in ("json_schema", "function_calling"):
    assert isinstance(chat.with_structured_output(Step, method=method).invoke("hi"), Step)
assert isinstance(chat.with_structured_output(None, method="json_mode").invoke("hi"), dict)
"""


@pytest.mark.clients
def test_langchain(deployment: Running, bias: Bias) -> None:
    ids = ",".join([*bias(END), *bias("}"), *bias('"')])
    python = python_with("langchain_openai")
    asyncio.run(run_program(python, "-c", LANGCHAIN, deployment.url + "/v1", ids))
