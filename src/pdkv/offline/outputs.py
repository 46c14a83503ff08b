"""Outputs of a prompt, final or so far; names and shapes are vLLM's."""

from typing import Any, ClassVar

import msgspec

from pdkv.parsers.parts import WholeCall


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """The logprob of one token at one position."""

    logprob: float
    rank: int | None  # 1: the most likely
    decoded_token: str | None  # its text by itself; None without `SamplingParams.detokenize`


Logprobs = dict[int, Logprob]
"""By token id: the actual token, then the requested number of most likely ones."""


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One choice. A stop token is the last of `token_ids`; a stop string is cut from `text`."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # of all tokens so far, if logprobs were requested
    logprobs: list[Logprobs] | None  # one per token, if requested
    finish_reason: str | None  # "stop", "length", "abort"; None: it continues
    stop_reason: str | int | None  # the stop string or stop token id that ended it, if any
    # calls in the text of a `chat` with tools; None: it continues, or none are parsed
    tool_calls: list[WholeCall] | None = None
    lora_request: ClassVar[None] = None  # adapters are not served

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Times of a prompt's progress, in seconds of the monotonic clock, except for `arrival_time`."""

    arrival_time: float  # Unix time
    queued_ts: float
    scheduled_ts: float | None = None  # its first step; None: not known yet, or a stop string ended the first choice
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    num_generation_tokens: int = 0  # of all choices

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token; 0 before it."""
        return (self.first_token_ts or self.queued_ts) - self.queued_ts


class EmbeddingOutput(msgspec.Struct, frozen=True):
    """One prompt's embedding."""

    embedding: list[float]


class ScoringOutput(msgspec.Struct, frozen=True):
    """How well a document fits a query."""

    score: float  # the probability of yes


class PoolingRequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What is pooled of one prompt."""

    request_id: str
    outputs: EmbeddingOutput | ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The choices of one prompt: all of them or, while it continues, as chosen by `SamplingParams.output_kind`."""

    request_id: str
    prompt: str | None  # None if token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None  # the first is None
    num_cached_tokens: int  # prompt tokens with KV that the first choice found cached, here or through the connector
    outputs: list[CompletionOutput]
    finished: bool  # all choices have ended: this is the last output
    metrics: RequestMetrics
    lora_request: ClassVar[None] = None  # this and the next: adapters are not served, and connectors find KV by content
    kv_transfer_params: ClassVar[None] = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-compatible dictionary."""
        return dict(msgspec.to_builtins(self))
