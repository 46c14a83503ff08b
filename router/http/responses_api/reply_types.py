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


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    sequence_number: int


class _OfResponse(_Event, frozen=True, kw_only=True):
    response: Response


class ResponseCreated(_OfResponse, frozen=True, kw_only=True, tag="response.created"):
    """The first event: the response has no output yet."""


class ResponseInProgress(_OfResponse, frozen=True, kw_only=True, tag="response.in_progress"):
    """The second event: the response has no output yet."""


class ResponseCompleted(_OfResponse, frozen=True, kw_only=True, tag="response.completed"):
    """The last event of a response that was completed."""


class ResponseIncomplete(_OfResponse, frozen=True, kw_only=True, tag="response.incomplete"):
    """The last event if max_output_tokens or the model's length ended the response."""


class ResponseFailed(_OfResponse, frozen=True, kw_only=True, tag="response.failed"):
    """The last event of a response that failed, after the error's event."""


class ErrorEvent(_Event, frozen=True, kw_only=True, tag="error"):
    """An error."""

    code: str | None
    message: str
    param: str | None
    error: ErrorDetail


class _OfItem(_Event, frozen=True, kw_only=True):
    output_index: int
    item: OutputItem


class OutputItemAdded(_OfItem, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins."""


class OutputItemDone(_OfItem, frozen=True, kw_only=True, tag="response.output_item.done"):
    """A complete item."""


class _WithinItem(_Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class _OfPart(_WithinItem, frozen=True, kw_only=True):
    content_index: int
    part: OutputText | ReasoningText


class ContentPartAdded(_OfPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    """A text begins."""


class ContentPartDone(_OfPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    """A complete text."""


class OutputTextDelta(_WithinItem, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """An addition to the answer's text."""

    content_index: int
    delta: str
    logprobs: list[ChatTokenLogprob]


class OutputTextDone(_WithinItem, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The complete text of an answer."""

    content_index: int
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningTextDelta(_WithinItem, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """An addition to the reasoning."""

    content_index: int
    delta: str


class ReasoningTextDone(_WithinItem, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """The complete reasoning."""

    content_index: int
    text: str


class ArgumentsDelta(_WithinItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """An addition to a call's arguments."""

    delta: str


class ArgumentsDone(_WithinItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """The complete arguments of a call."""

    name: str
    arguments: str


class InputDelta(_WithinItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"):
    """An addition to a custom tool's input."""

    delta: str


class InputDone(_WithinItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"):
    """The complete input of a custom tool."""

    input: str


EVENTS = (
    ResponseCreated, ResponseInProgress, OutputItemAdded, ContentPartAdded, OutputTextDelta, OutputTextDone,
    ReasoningTextDelta, ReasoningTextDone, ContentPartDone, ArgumentsDelta, ArgumentsDone, InputDelta, InputDone,
    OutputItemDone, ResponseCompleted, ResponseIncomplete, ErrorEvent, ResponseFailed,
)  # fmt: skip
"""The events of a stream."""
