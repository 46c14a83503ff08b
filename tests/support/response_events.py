"""Streams of POST /v1/responses, read strictly: what comes when, and what it adds up to."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from pydantic import TypeAdapter

DELTAS = {
    "response.output_text.delta": ("text", "response.output_text.done"),
    "response.reasoning_text.delta": ("text", "response.reasoning_text.done"),
    "response.function_call_arguments.delta": ("arguments", "response.function_call_arguments.done"),
    "response.custom_tool_call_input.delta": ("input", "response.custom_tool_call_input.done"),
}


@cache
def _event_type() -> TypeAdapter[Any]:
    from openai.types.responses import ResponseStreamEvent  # a second, which collecting tests does not need

    return TypeAdapter(ResponseStreamEvent)


def typed_events(body: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream, each of a type that OpenAI's client knows."""
    *blocks, last = body.decode("ascii").split("\n\n")
    assert last == "", "the stream ends with a whole event"
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        _event_type().validate_python(event, strict=False)
        events.append(event)
    return events


def whole_of(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The response that a stream ends with, whose items came in order, each as its deltas say."""
    from openai.types.responses import Response

    created, in_progress, *between, end = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    response: dict[str, Any] = end["response"]
    assert end["type"] == f"response.{response['status']}"
    output = []
    while between:
        size = 1 + next(i for i, e in enumerate(between) if e["type"] == "response.output_item.done")
        assert {event["output_index"] for event in between[:size]} == {len(output)}
        output.append(_item_of(between[:size]))
        between = between[size:]
    assert output == response["output"]
    Response.model_validate(response)
    return response


def _item_of(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """An item between its beginning and its end."""
    added, *inner, ended = events
    item: dict[str, Any] = ended["item"]
    assert added["type"] == "response.output_item.added"
    assert added["item"]["status"] == "in_progress"
    for name in ("id", "type", "call_id", "name", "role"):
        assert added["item"].get(name) == item.get(name)
    assert {event["item_id"] for event in inner} == {item["id"]}
    if item["type"] not in ("function_call", "custom_tool_call"):
        assert added["item"]["content"] == []
        first, *inner, last = inner
        assert (first["type"], first["part"]["text"]) == ("response.content_part.added", "")
        assert (last["type"], [last["part"]]) == ("response.content_part.done", item["content"])
    *deltas, done = inner
    field, kind = next((DELTAS[e["type"]] for e in deltas), (None, done["type"]))
    assert done["type"] == kind
    if field is not None:
        assert len({event["type"] for event in deltas}) == 1
        assert "".join(event["delta"] for event in deltas) == done[field]
        assert done[field] == (item[field] if field in ("arguments", "input") else item["content"][0]["text"])
    if item["type"] == "message":
        logprobs = [entry for event in deltas for entry in event["logprobs"]]
        assert logprobs == done["logprobs"] == item["content"][0]["logprobs"]
    return item
