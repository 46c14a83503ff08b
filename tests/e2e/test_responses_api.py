"""The Responses API through the official client, over real processes: text, functions, shapes, and what is refused."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from deployments import Launch, Running
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """Look up the weather."""

    city: str = Field(pattern="^[A-Z][a-z]{0,8}$")
    days: int = Field(ge=1, le=14)


FIELDS: Any = {"model": "served", "input": "Where is it warm?", "temperature": 0.8, "extra_body": {"seed": 3}}
TOOL: Any = {"type": "function", **pydantic_function_tool(Weather)["function"]}


@pytest.fixture(scope="module")
def deployment(module_launch: Launch) -> Running:
    return module_launch("--prefill", "2", "--decode", "2", "--tool-parser", "hermes")


@pytest.fixture(scope="module")
def client(deployment: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=deployment.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_a_response_is_the_chats_answer(client: OpenAI) -> None:
    fields: Any = {**FIELDS, "instructions": "Be brief.", "max_output_tokens": 24}
    whole = client.responses.create(**fields)
    events = list(client.responses.create(**fields, stream=True))
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": FIELDS["input"]}]
    chat = client.chat.completions.create(model="served", messages=messages, temperature=0.8, seed=3, max_tokens=24)
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


def test_a_function_is_called_and_its_result_sent_back(client: OpenAI) -> None:
    choice: Any = {"type": "function", "name": "Weather"}
    fields: Any = {**FIELDS, "tools": [TOOL], "tool_choice": choice}
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


def test_models_of_pydantic_are_parsed(client: OpenAI) -> None:
    parsed = client.responses.parse(**FIELDS, text_format=Weather).output_parsed
    assert isinstance(parsed, Weather)
    with client.responses.stream(**FIELDS, text_format=Weather) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_parsed == parsed
    assert final.output_text == "".join(texts)


def test_what_is_refused_names_its_field(client: OpenAI) -> None:
    schema: Any = {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}
    for fields, param in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"text": schema}, "text.format.schema"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                client.responses.create(**FIELDS, **fields, stream=stream)  # type: ignore[call-overload]
            assert refused.value.param == param


def test_thoughts_are_an_item_that_can_be_sent_back(launch: Launch) -> None:
    """The model's thoughts, which DeepSeek's parser takes its answers to begin with, never end."""
    deployment = launch("--prefill", "1", "--decode", "1", "--reasoning-parser", "deepseek_r1")
    with OpenAI(base_url=deployment.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
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
