"""What goes into a generation and what comes out of it: the types between the HTTP front and dispatch."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pdkv.base.block_keys import extend_keys
from pdkv.sampling.params import SamplingParams
from pdkv.wire.kv import KVTerms, Order
from pdkv.wire.messages import FinishReason, PromptLogprobs, TokenLogprob


class PromptKeys:
    """The block keys of one prompt: made once, for all of its choices and attempts."""

    __slots__ = ("_keys", "_root")

    def __init__(self) -> None:
        self._root = b""
        self._keys: list[bytes] = []

    def of(self, root: bytes, token_ids: Sequence[int]) -> Sequence[bytes]:
        """The keys of `token_ids` behind `root`, which is another one only if another model came."""
        if root != self._root:
            self._root, self._keys = root, []
            extend_keys(self._keys, root, token_ids)
        return self._keys


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of one client request, tokenized; `params.seed` is set."""

    prompt_token_ids: list[int]
    params: SamplingParams
    choice: int = 0
    cache_salt: str = ""
    kv_terms: KVTerms | None = None  # of what engines store of its KV
    tenant: str = ""  # a digest of whose request it is; empty: clients need no key
    priority: int = 0
    affinity: str = ""  # requests that share it like to run where the others ran; empty: none
    timeout_s: float  # until its last token; infinite: as long as it gets on
    stall_timeout_s: float = math.inf  # for its turn, for its first token and for each further one; not both infinite
    probe: bool = False  # the router's own, to see whether an engine works: it is tried there and nowhere else
    label: str = ""  # the client's own name of the request, for logs only
    traceparent: str = ""  # W3C, of the span above what is done for it; likewise
    near: str = ""  # the engine that ran this prompt for an earlier choice, and so has it in its cache
    keys: PromptKeys = msgspec.field(default_factory=PromptKeys)

    @property
    def patience_s(self) -> float:
        """How long it may be at most until something has to happen."""
        return min(self.timeout_s, self.stall_timeout_s)

    def most_tokens(self, num_output: int) -> int:
        """Of prompt and output in the end, where it says so; else with one token behind the `num_output` so far."""
        most = num_output + 1 if self.params.max_tokens is None else self.params.max_tokens
        return len(self.prompt_token_ids) + most


class Delta(NamedTuple):
    """What is new since the last delta; several steps may have piled up in it."""

    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: PromptLogprobs | None  # with the first token only
    finish_reason: FinishReason | None
    stop_token_id: int | None


class Offer(NamedTuple):
    """What another engine has of a prompt, and the prompt's engine has not."""

    lender: str
    num_tokens: int  # of the prompt's first, as far as is known
    load_timeout_s: float = 0.0  # then the prompt's engine computes them; 0: as long as they are leased
    compute_s: float = 0.0  # what computing them would take, as far as is known


class Route(NamedTuple):
    """Who runs a request. One engine twice: aggregated, and the order says nothing.

    An empty decode engine is chosen when the prompt has been handed off.
    """

    prefill: str
    decode: str
    order: Order = "prefill_first"
    offer: Offer | None = None  # read by the prefill engine instead of being computed

    @property
    def aggregated(self) -> bool:
        """Whether one engine does it all."""
        return self.prefill == self.decode != ""


NOWHERE = Route("", "")
"""Of a request that waits for an engine."""
