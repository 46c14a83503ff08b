"""The shapes of responses and of their events, for the schema alone; see `pdkv.router.http.answer.reply_types`."""

from typing import Any, Literal

import msgspec

from pdkv.router.http.answer.reply_types import ChatTokenLogprob, ErrorDetail
from pdkv.router.http.responses_api.protocol import Effort, Status, TextFormat, ToolChoiceFunction


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Of the prompt's tokens."""

    cached_tokens: int  # that were not computed for this request
    cache_write_tokens: int  # 0: whatever is computed may be cached, and nobody counts it
    lossy_tokens: int | None = None  # whose KV may have gone through a codec with errors


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Of the tokens that were generated."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """What the model says."""

    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]  # of the tokens, where they were asked for


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """What it thinks."""

    text: str


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """An item for the user."""

    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """Thoughts."""

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
    """Why a response failed; the event of type error has more."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response ends early."""

    reason: Literal["max_output_tokens"]


class ReasoningUsed(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked of thoughts."""

    effort: Effort | None
    summary: None


class TextUsed(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked of the text."""

    format: TextFormat


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """Of /v1/responses."""

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
    # what was asked for, defaults filled in
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
    """The first event: nothing was put out."""


class ResponseInProgress(_OfResponse, frozen=True, kw_only=True, tag="response.in_progress"):
    """The same."""


class ResponseCompleted(_OfResponse, frozen=True, kw_only=True, tag="response.completed"):
    """The last event."""


class ResponseIncomplete(_OfResponse, frozen=True, kw_only=True, tag="response.incomplete"):
    """The last event where max_output_tokens, or the model's length, ended it."""


class ResponseFailed(_OfResponse, frozen=True, kw_only=True, tag="response.failed"):
    """The last event, behind that of the error."""


class ErrorEvent(_Event, frozen=True, kw_only=True, tag="error"):
    """What went wrong."""

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
    """An item as it stays."""


class _WithinItem(_Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class _OfPart(_WithinItem, frozen=True, kw_only=True):
    content_index: int
    part: OutputText | ReasoningText


class ContentPartAdded(_OfPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    """A text begins."""


class ContentPartDone(_OfPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    """A text as it stays."""


class OutputTextDelta(_WithinItem, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More of what the model says."""

    content_index: int
    delta: str
    logprobs: list[ChatTokenLogprob]


class OutputTextDone(_WithinItem, frozen=True, kw_only=True, tag="response.output_text.done"):
    """All that it said."""

    content_index: int
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningTextDelta(_WithinItem, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """More of what it thinks."""

    content_index: int
    delta: str


class ReasoningTextDone(_WithinItem, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """All that it thought."""

    content_index: int
    text: str


class ArgumentsDelta(_WithinItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(_WithinItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """All of them."""

    name: str
    arguments: str


class InputDelta(_WithinItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"):
    """More of a custom tool's input."""

    delta: str


class InputDone(_WithinItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"):
    """All of it."""

    input: str


EVENTS = (
    ResponseCreated,
    ResponseInProgress,
    OutputItemAdded,
    ContentPartAdded,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ContentPartDone,
    ArgumentsDelta,
    ArgumentsDone,
    InputDelta,
    InputDone,
    OutputItemDone,
    ResponseCompleted,
    ResponseIncomplete,
    ErrorEvent,
    ResponseFailed,
)
"""What a stream consists of."""
