"""What a prompt came to, or has come to so far."""

from typing import Any

import msgspec

from pdkv.parsers.parts import WholeCall
from pdkv.wire.messages import TokenLogprob


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One choice. A stop token is the last of `token_ids`; a stop string is cut from `text`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None  # "stop", "length", "abort"; None: it goes on
    stop_reason: str | int | None  # the stop string, or the stop token id, that ended it
    logprobs: list[TokenLogprob] | None  # one per token where asked for
    tool_calls: list[WholeCall] | None = None  # in the text of a `chat` with tools; None: it goes on, or none are read


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The choices of one prompt: all of them, or while it goes on those that `SamplingParams.output_kind` says."""

    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    num_cached_tokens: int  # prompt tokens whose KV the first choice found cached, here or through the connector
    outputs: list[CompletionOutput]
    finished: bool  # all choices have ended: this is the last output

    def to_dict(self) -> dict[str, Any]:
        """As JSON would have it."""
        return dict(msgspec.to_builtins(self))
