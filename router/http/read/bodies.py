"""The request bodies that the router takes, as typed structs: OpenAI's API with vLLM's extras. Null is absent.

Every field is known by name. What cannot be done has a type that leaves its neutral value only: `None` alone, one
literal, an empty list, or a `neutral` bool. Labels are accepted for the client's sake and have no effect here.
`lenient` makes of each the type for `--unknown-fields ignore`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import msgspec

from pdkv.parsers.tools import ToolChoice
from pdkv.sampling.params import PARAMS_IN_BODIES, SamplingParams

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What the wire to the engines can carry."""


def neutral(value: float, why: str = "") -> msgspec.Meta:
    """For a bool or a number of which this value alone changes nothing; `decoding` refuses the others, and says why."""
    return msgspec.Meta(extra={"only": value, "why": why}, extra_json_schema={"enum": [value]})


def absent(why: str) -> msgspec.Meta:
    """For null as a field's only value; `decoding` says why."""
    return msgspec.Meta(extra={"why": why})


OnlyFalse = Annotated[bool, neutral(False)]
OnlyTrue = Annotated[bool, neutral(True)]
Empty = Annotated[list[Any], msgspec.Meta(max_length=0)]

TRANSFER_FIELDS = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params", "do_remote_prefill", "do_remote_decode", "remote_host"),
        *("remote_port", "remote_engine_id", "remote_block_ids", "remote_request_id", "tp_size", "handoff", "ticket"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "disagg_prefill_dp_rank"),
    }
)
"""Names under which vLLM and SGLang take hosts and transfers from a request: no client may say where KV goes."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stream is sent."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage in every chunk; needs include_usage, as in vLLM
    include_obfuscation: OnlyFalse | None = None


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A schema with OpenAI's words around it. It is enforced whether `strict` or not."""

    name: str
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of an answer: OpenAI's, and vLLM's structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None  # of a structural tag
    structures: list[dict[str, Any]] | None = None  # of an older one
    triggers: list[str] | None = None


class ShapeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: one of the first six."""

    json: dict[str, Any] | str | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_fallback: bool | None = None  # of vLLM's choice of libraries: there is one here
    disable_any_whitespace: OnlyFalse | None = None
    disable_additional_properties: OnlyFalse | None = None
    whitespace_pattern: None = None


def _sampling_body() -> Any:
    """A struct with a field of each sampling parameter that bodies do not declare themselves. Ranges are checked by
    SamplingParams; a list of texts may be one text.
    """
    hints = get_type_hints(SamplingParams)
    kinds = {name: hints[name] | str if hints[name] == tuple[str, ...] else hints[name] for name in PARAMS_IN_BODIES}
    fields = [(name, kind | None, None) for name, kind in kinds.items()]
    return msgspec.defstruct("SamplingBody", fields, frozen=True, kw_only=True, forbid_unknown_fields=True)


if TYPE_CHECKING:
    from msgspec import Struct as SamplingBody
else:
    SamplingBody = _sampling_body()


class GenerationBody(SamplingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all requests that generate share, beside sampling parameters."""

    model: str | None = None  # absent: the one that is served
    stream: bool | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None  # a hint: there is one tier
    store: OnlyFalse | None = None
    # labels
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    # hints: requests of one key go to one prefill engine where loads allow it
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in-memory", "in_memory"] | None = None
    session_id: str | None = None  # vLLM's
    # vLLM's extras
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: Int64 | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int64 | None = None
    truncation_side: Literal["left", "right"] | None = None
    ec_transfer_params: None = None
    include_stop_str_in_output: bool | None = None
    kv_transfer_params: None = None
    length_penalty: Annotated[float, neutral(1.0)] | None = None
    logprob_token_ids: None = None
    repetition_detection: None = None
    return_tokens_as_token_ids: OnlyFalse | None = None
    spaces_between_special_tokens: OnlyTrue | None = None
    stream_interval: Literal[1] | None = None
    structured_outputs: ShapeBody | None = None
    guided_json: dict[str, Any] | str | bool | None = None  # the four were vLLM's before structured_outputs
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    thinking_token_budget: Literal[-1] | None = None
    use_beam_search: OnlyFalse | None = None
    vllm_xargs: None = None
    watermarking: OnlyFalse | None = None


class _Body(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions share."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None  # vLLM's
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None  # vLLM's


class CompletionBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: Int64 | None = None
    echo: bool | None = None
    best_of: Int64 | None = None  # must be n: all choices are returned
    suffix: Literal[""] | None = None
    prompt_embeds: None = None


class TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class ToolFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an assistant called: the arguments as JSON text, or as an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call in an assistant's turn of the history."""

    function: ToolFunction
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation. `content` may be null, or missing, in an assistant's turn only."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Sequence[TextPart] | None = None
    name: str | None = None
    tool_calls: Sequence[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: Empty | None = None
    audio: None = None
    function_call: None = None
    refusal: Literal[""] | None = None
    type: Literal["text"] | None = None  # lm-eval's, beside the role
    provider_specific_fields: dict[str, Any] | None = None  # litellm's notes on a reply that is sent back


class ChatBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Sequence[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    documents: Empty | None = None
    media_io_kwargs: None = None
    mm_processor_kwargs: None = None
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    audio: None = None
    echo: OnlyFalse | None = None
    function_call: Literal["none", "auto"] | None = None
    functions: Empty | None = None
    include_reasoning: bool | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None


class _TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both forms of POST /tokenize have."""

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeTextBody(_TokenizeBody, frozen=True, kw_only=True):
    """POST /tokenize of a text."""

    prompt: str


class TokenizeChatBody(_TokenizeBody, frozen=True, kw_only=True):
    """POST /tokenize of a conversation."""

    messages: Sequence[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    documents: Empty | None = None
    media_io_kwargs: None = None
    mm_processor_kwargs: None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
