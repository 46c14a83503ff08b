"""The types of replies, used only for the schema: `completions.py` and `sse.py` build replies by hand, which is faster.

`tests/router/http/pages/test_openapi.py` reads real replies as these types: neither can change without the other.
"""

from typing import Literal

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Details of the prompt's tokens."""

    cached_tokens: int  # tokens that were not computed for this request
    lossy_tokens: int | None = None  # tokens whose KV may have gone through a lossy codec


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Details of the generated tokens."""

    reasoning_tokens: int | None = None  # tokens of reasoning, if the server tells it apart from answers
    # guesses of a proposer that were verified, if there were any, or the request has a prediction
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts; each prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token at one position of a prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt, entries by token id; the first token has none."""


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice, or the new part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = None  # the stop string or stop token
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of /v1/completions, or one event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate for a token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A generated token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs: one entry per token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a called tool, and its arguments."""

    name: str
    arguments: str  # JSON, as the model wrote it


class MadeCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None  # null next to calls or reasoning alone
    reasoning_content: str | None = None
    tool_calls: list[MadeCall] | None = None
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The new part of a call."""

    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A call that begins or continues."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The new part of a message."""

    content: str | None = None
    role: Literal["assistant"] | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The new part of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One input's embedding: numbers or, in base64, little-endian float32."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: Usage


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """A document in its place."""

    index: int  # in the request
    relevance_score: float  # the probability that it is one for the query
    document: dict[Literal["text"], str] | None = None


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of /v1/rerank, the best document first."""

    id: str
    model: str
    results: list[Ranked]
    usage: Usage


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Details of an error."""

    message: str
    type: str  # such as invalid_request_error, rate_limit_error, server_error
    param: str | None = None  # the field at fault
    code: str | None = None


class ErrorReply(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every status from 400 on, and the last event of a stream that failed."""

    error: ErrorDetail


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of a server that can serve requests; a degraded server computes KV that it would have loaded."""

    status: Literal["ok", "degraded"]
    connector_problems: dict[str, str] | None = None
