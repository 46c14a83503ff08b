"""The request bodies that the router accepts, as typed structs: OpenAI's API with vLLM's extras. Null means absent.

Every field is known by name. An unsupported field has a type that allows only its neutral value: `None` alone, one
literal, an empty list, or a `neutral` bool. Labels, which matter only to the client, are accepted and have no effect.
`lenient` turns each into the type for `--unknown-fields ignore`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import msgspec

from pdkv.parsers.tools import ToolChoice
from pdkv.sampling.params import PARAMS_IN_BODIES, SamplingParams

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Range of integers that the wire to the engines can carry."""


def neutral(value: float, why: str = "") -> msgspec.Meta:
    """A bool or a number that may only have this value, which changes nothing; `decoding` refuses others, with the
    reason.
    """
    return msgspec.Meta(extra={"only": value, "why": why}, extra_json_schema={"enum": [value]})


def absent(why: str) -> msgspec.Meta:
    """A field that may only be null; `decoding` gives the reason."""
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
"""Names under which vLLM and SGLang take hosts and transfers from a request; here, no client may say where KV goes."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage in every chunk; needs include_usage, as in vLLM
    include_obfuscation: OnlyFalse | None = None


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A schema in OpenAI's wrapper. It is enforced whether `strict` or not."""

    name: str
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The format of an answer: OpenAI's, and vLLM's structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None  # of a structural tag
    structures: list[dict[str, Any]] | None = None  # of an older structural tag
    triggers: list[str] | None = None


class ShapeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: one of the first six."""

    json: dict[str, Any] | str | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_fallback: bool | None = None  # vLLM's choice of libraries: there is only one here
    disable_any_whitespace: OnlyFalse | None = None
    disable_additional_properties: OnlyFalse | None = None
    whitespace_pattern: None = None


def _sampling_body() -> Any:
    """A struct with a field for each sampling parameter that bodies do not declare themselves. SamplingParams checks
    the ranges; a list of texts may also be one text.
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
    """Fields common to all requests that generate, besides sampling parameters."""

    model: str | None = None  # absent: the served one
    stream: bool | None = None
    # a hint; only one service tier exists
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    store: OnlyFalse | None = None
    # labels
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    # hints: requests with the same key go to one prefill engine if loads allow it
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
    guided_json: dict[str, Any] | str | bool | None = None  # vLLM had these four before structured_outputs
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    thinking_token_budget: Literal[-1] | None = None
    use_beam_search: OnlyFalse | None = None
    vllm_xargs: None = None
    watermarking: OnlyFalse | None = None


class _Body(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields common to completions and chat completions."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None  # vLLM's
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None  # vLLM's, as is:
    return_tokens_as_token_ids: bool | None = None


class CompletionBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: Int64 | None = None
    echo: bool | None = None
    best_of: Int64 | None = None  # must equal n: all choices are returned
    suffix: Literal[""] | None = None
    prompt_embeds: None = None


class TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class ToolFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The function that an assistant called, with its arguments as JSON text or as an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call in an assistant's earlier turn."""

    function: ToolFunction
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation. `content` may be null or missing only in an assistant's turn."""

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
    type: Literal["text"] | None = None  # sent by lm-eval, next to the role
    provider_specific_fields: dict[str, Any] | None = None  # litellm's notes on a reply that is sent back


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The expected answer, such as a file of which only some lines change: guesses, which change no token."""

    type: Literal["content"]
    content: str | Sequence[TextPart]

    @property
    def text(self) -> str:
        """All of its text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


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
    prediction: Prediction | None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None


class _PooledBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields common to requests for what is pooled of prompts."""

    model: str | None = None  # absent: the served one
    user: str | None = None  # a label
    priority: Int64 | None = None  # vLLM's


class EmbeddingBody(_PooledBody, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int64 | None = None
    # vLLM's extras
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int64 | None = None
    truncation_side: Literal["left", "right"] | None = None


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text to rank."""

    text: str


class RerankBody(_PooledBody, frozen=True, kw_only=True):
    """POST /v1/rerank, in the shape of Jina's, Cohere's and vLLM's."""

    query: str
    documents: list[str | Document]
    top_n: Int64 | None = None
    return_documents: bool | None = None
    instruction: str | None = None  # replaces that of Qwen3-Reranker


class _TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields common to both forms of POST /tokenize."""

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeTextBody(_TokenizeBody, frozen=True, kw_only=True):
    """POST /tokenize with a text."""

    prompt: str


class TokenizeChatBody(_TokenizeBody, frozen=True, kw_only=True):
    """POST /tokenize with a conversation."""

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
