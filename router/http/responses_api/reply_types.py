"""The shapes of responses and of their events, for the schema alone; see `pdkv.router.http.answer.reply_types`."""

from typing import Any, Literal

import msgspec

from pdkv.router.http.answer.reply_types import ChatTokenLogprob, ErrorDetail
from pdkv.router.http.responses_api.protocol import Effort, Status, TextFormat, ToolChoiceFunction


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Details of the prompt's tokens."""

    cached_tokens: int  # tokens that were not computed for this request
    cache_write_tokens: int  # 0: everything computed may be cached, and is not counted
    lossy_tokens: int | None = None  # tokens whose KV may have gone through a lossy codec


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Details of the generated tokens."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text of the model's answer."""

    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]  # of the tokens, if requested


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of the model's reasoning."""

    text: str


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message to the user."""

    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """An item of reasoning."""

    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class CustomToolCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    status: Status
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function."""

    id: str
    status: Status  # incomplete: it was cut off
    call_id: str
    name: str
    arguments: str  # JSON, as the model wrote it
    namespace: str | None = None


OutputItem = OutputMessage | ReasoningItem | FunctionCall | CustomToolCall


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response failed; the event of type error says more."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response ends early."""

    reason: Literal["max_output_tokens"]


class ReasoningUsed(msgspec.Struct, frozen=True, kw_only=True):
    """The requested reasoning options."""

    effort: Effort | None
    summary: None


class TextUsed(msgspec.Struct, frozen=True, kw_only=True):
    """The requested text options."""

    format: TextFormat


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The response object of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "failed", "in_progress", "incomplete"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    # the request's values, with defaults filled in
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningUsed
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: TextUsed
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceFunction
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


def _event(name: str, tag: str, text: str, /, **fields: Any) -> type[msgspec.Struct]:
    """The type of an event."""
    each = [("sequence_number", int), *fields.items()]
    options: dict[str, Any] = {"frozen": True, "kw_only": True, "tag_field": "type", "tag": tag}
    return msgspec.defstruct(name, each, namespace={"__doc__": text}, module=__name__, **options)


_LOGPROBS = list[ChatTokenLogprob]
_ITEM: dict[str, Any] = {"item_id": str, "output_index": int}
_TEXT: dict[str, Any] = {**_ITEM, "content_index": int}
_ITEM_ENDS: dict[str, Any] = {"output_index": int, "item": OutputItem}
_PART_ENDS: dict[str, Any] = {**_TEXT, "part": OutputText | ReasoningText}
_ARGUMENTS, _INPUT, _R = "response.function_call_arguments", "response.custom_tool_call_input", Response
_ERROR: dict[str, Any] = {"code": str | None, "message": str, "param": str | None, "error": ErrorDetail}

EVENTS = (
    _event("ResponseCreated", "response.created", "The first event: there is no output yet.", response=_R),
    _event("ResponseInProgress", "response.in_progress", "The second event: there is no output yet.", response=_R),
    _event("OutputItemAdded", "response.output_item.added", "An item begins.", **_ITEM_ENDS),
    _event("ContentPartAdded", "response.content_part.added", "A text begins.", **_PART_ENDS),
    _event("OutputTextDelta", "response.output_text.delta", "More text.", **_TEXT, delta=str, logprobs=_LOGPROBS),
    _event("OutputTextDone", "response.output_text.done", "All of a text.", **_TEXT, text=str, logprobs=_LOGPROBS),
    _event("ReasoningTextDelta", "response.reasoning_text.delta", "More reasoning.", **_TEXT, delta=str),
    _event("ReasoningTextDone", "response.reasoning_text.done", "All of the reasoning.", **_TEXT, text=str),
    _event("ContentPartDone", "response.content_part.done", "A complete text.", **_PART_ENDS),
    _event("ArgumentsDelta", f"{_ARGUMENTS}.delta", "More of a call's arguments.", **_ITEM, delta=str),
    _event("ArgumentsDone", f"{_ARGUMENTS}.done", "All arguments of a call.", **_ITEM, name=str, arguments=str),
    _event("InputDelta", f"{_INPUT}.delta", "More of a custom tool's input.", **_ITEM, delta=str),
    _event("InputDone", f"{_INPUT}.done", "All input of a custom tool.", **_ITEM, input=str),
    _event("OutputItemDone", "response.output_item.done", "A complete item.", **_ITEM_ENDS),
    _event("ResponseCompleted", "response.completed", "The last event of a response that was completed.", response=_R),
    _event("ResponseIncomplete", "response.incomplete", "The last event if a limit ended the response.", response=_R),
    _event("ErrorEvent", "error", "An error.", **_ERROR),
    _event("ResponseFailed", "response.failed", "The last event after an error's.", response=_R),
)
"""The events of a stream."""
