"""What goes into a generation and what comes out of it: the types between the HTTP front and dispatch."""

from typing import NamedTuple

import msgspec

from pdkv.sampling_params import SamplingParams
from pdkv.wire.messages import FinishReason, Order, TokenLogprob


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of one client request, tokenized; `params.seed` is set."""

    prompt_token_ids: list[int]
    params: SamplingParams
    choice: int = 0
    cache_salt: str = ""
    priority: int = 0
    timeout_s: float
    label: str = ""  # the client's own name of the request, for logs only


class Delta(NamedTuple):
    """What is new since the last delta; several steps may have piled up in it."""

    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob | None] | None  # with the first token only
    finish_reason: FinishReason | None
    stop_token_id: int | None


class Route(NamedTuple):
    """Who runs a request. One engine twice: aggregated, and the order says nothing."""

    prefill: str
    decode: str
    order: Order = "prefill_first"

    @property
    def aggregated(self) -> bool:
        """Whether one engine does it all."""
        return self.prefill == self.decode
