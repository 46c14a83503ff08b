"""The body of POST /v1/responses as typed structs, by the rules of `pdkv.router.http.read.bodies`. Null means
absent.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from pdkv.router.http.read.bodies import Empty, GenerationBody, Int64, OnlyFalse, absent, neutral

STATELESS = "no responses are kept (send the whole conversation as input)"

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Status = Literal["in_progress", "completed", "incomplete"]
Hint = Literal["auto", "concise", "detailed", "none"]
"""How much of the reasoning a client would like to see; it is shown as it is."""

OwnItem = Literal[
    "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning"
]
CallOfServer = Literal["web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"]
"""Items of tools that other servers ran, which are left out."""


class InputPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Text of an item: a user's, the model's, or its reasoning."""

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str
    # notes on a reply that is sent back
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class SummaryPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a summary of reasoning."""

    type: Literal["summary_text"]
    text: str


class InputItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One item of the history; `conversation.py` says which fields belong to which type.

    One struct serves all types, since no field that tells them apart is always present: a message may omit its type.
    """

    type: OwnItem | CallOfServer | None = None
    id: str | None = None
    status: Status | Literal["open", "searching", "interpreting", "generating", "failed"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    phase: Literal["commentary", "partial_answer", "final_answer"] | None = None
    content: str | Sequence[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None  # of a custom tool
    output: str | Sequence[InputPart] | None = None
    summary: Sequence[SummaryPart] | None = None
    encrypted_content: str | None = None  # encrypted by another server, so unreadable here
    encrypted_function_args: list[str] | None = None
    internal_chat_message_metadata_passthrough: dict[str, Any] | None = None  # Codex's notes
    # of tools that other servers ran
    action: dict[str, Any] | None = None
    queries: list[Any] | None = None
    results: list[Any] | None = None
    result: str | None = None
    revised_prompt: str | None = None
    code: str | None = None
    container_id: str | None = None
    outputs: list[Any] | None = None


class ToolChoiceFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The function or custom tool that must be called."""

    type: Literal["function", "custom"]
    name: str


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The shape of the text. The fields after the first are a schema's, enforced whether `strict` or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a hint that is not passed to models here


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of reasoning, which is shown as it is, never summarized."""

    effort: Effort | None = None
    summary: Hint | None = None
    generate_summary: Hint | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_obfuscation: OnlyFalse | None = None
    reasoning_summary_delivery: str | None = None  # there are no summaries


LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",  # reasoning is in plain text, which can be sent back as well
    # kinds that never occur in an answer here
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses."""

    input: str | Sequence[InputItem]
    instructions: str | None = None
    max_output_tokens: Int64 | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Includable] | None = None
    top_logprobs: Int64 | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    max_tool_calls: Int64 | None = None  # calls of tools that the server runs: it has none
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's
    client_metadata: dict[str, Any] | None = None  # Codex's: a label
    previous_response_id: str | None = None  # one of those kept for an API key
    store: bool | None = None
    # fields that would need a server that keeps more
    background: Annotated[bool, neutral(False, "no response is made in the background")] | None = None
    conversation: Annotated[None, absent("no conversations are kept (send it as input)")] = None
    prompt: Annotated[None, absent("no prompts are kept (send it as instructions and input)")] = None
    # other unsupported fields
    access_programs: None = None
    context_management: Empty | None = None
    image: None = None
    moderation: None = None
    prompt_cache_options: None = None
