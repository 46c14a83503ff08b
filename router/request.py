"""The input and output types of a generation, between the HTTP front end and dispatch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
        """The keys of `token_ids` after `root`, which changes only if another model comes."""
        if root != self._root:
            self._root, self._keys = root, []
            extend_keys(self._keys, root, token_ids)
        return self._keys


class Split(NamedTuple):
    """Why a request for the launch's own model goes to a pool, or stays (docs/membership.md)."""

    draw: float  # 0 to 100
    shares: Mapping[str, float]  # percent by pool, at that time
    without: Sequence[str] = ()  # pools that could not run it: it stays if it would go there

    @property
    def pool(self) -> str:
        """The pool that runs it; "": the launch's own engines."""
        end = 0.0
        for name in sorted(self.shares):
            end += self.shares[name]
            if self.draw < end:
                return "" if name in self.without else name
        return ""


class PoolNews(NamedTuple):
    """What changes about models while they are served."""

    lengths: tuple[int | None, ...] = (None,)  # that engines take, of the launch's own and then of each pool
    shares: tuple[tuple[str, float], ...] = ()  # percent by pool
    down: tuple[str, ...] = ()  # pools without engines that serve


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """What all choices of one client request have in common."""

    prediction_token_ids: list[int] = []  # of the output that the client expects
    cache_salt: str = ""
    kv_terms: KVTerms | None = None  # terms of what engines store of its KV: its tenant's, no client can ask for terms
    tenant: str = ""  # a digest of its tenant; empty: clients need no key
    pool: str = ""  # that runs it; "": the launch's own engines
    split: Split | None = None  # why that one; None: it was asked for
    may_leave: bool = False  # another deployment may have it (docs/fallback.md)
    priority: int = 0
    slo_ttft_s: float = 0.0  # within which its first token should come; 0: as soon as possible
    slo_tpot_s: float = 0.0  # that each further token should take; 0: as little as possible
    affinity: str = ""  # requests with the same key prefer the same engine; empty: none
    explain: bool = False  # why its engines are chosen is recorded, and said by its answer

    def common(self) -> dict[str, Any]:
        """These fields, to make another one with them."""
        return {name: getattr(self, name) for name in Common.__struct_fields__}


class GenerateRequest(Common, frozen=True, kw_only=True):
    """One choice of one client request, tokenized; `params.seed` is set."""

    prompt_token_ids: list[int]
    params: SamplingParams
    seed_drawn: bool = False  # its client gave none
    choice: int = 0
    timeout_s: float  # until its last token; infinite: no total limit
    stall_timeout_s: float = math.inf  # for its turn, for its first token and for each further one; not both infinite
    probe: bool = False  # a probe of the router's own, which runs on this engine and nowhere else
    label: str = ""  # the client's name of the request, for logs only
    traceparent: str = ""  # W3C trace context of the span above it; for logs only
    near: str = ""  # the engine that ran this prompt for an earlier choice, and so has it in its cache
    keys: PromptKeys = msgspec.field(default_factory=PromptKeys)

    @property
    def patience_s(self) -> float:
        """Seconds within which the next event, such as a token, must come."""
        return min(self.timeout_s, self.stall_timeout_s)

    def most_tokens(self, num_output: int) -> int:
        """The maximum final number of prompt and output tokens; without max_tokens, one more than `num_output`."""
        most = num_output + 1 if self.params.max_tokens is None else self.params.max_tokens
        return len(self.prompt_token_ids) + most


class Delta(NamedTuple):
    """The output since the last delta; several steps may have piled up in it."""

    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: PromptLogprobs | None  # with the first token only
    finish_reason: FinishReason | None
    stop_token_id: int | None
    pooled: bytes = b""  # with the first token only


class Offer(NamedTuple):
    """KV of a prompt that another engine has and the prompt's engine lacks."""

    lender: str
    num_tokens: int  # of the prompt's first tokens, as far as is known
    load_timeout_s: float = 0.0  # after that, the prompt's engine computes them; 0: as long as they are leased
    compute_s: float = 0.0  # the time to compute them, as far as is known


class Route(NamedTuple):
    """The engines that run a request. If both are the same engine, it is aggregated and the order has no meaning.

    If the decode engine is empty, it is chosen once the prompt has been handed off.
    """

    prefill: str
    decode: str
    order: Order = "prefill_first"
    offer: Offer | None = None  # read by the prefill engine instead of being computed

    @property
    def aggregated(self) -> bool:
        """Whether one engine does all of it."""
        return self.prefill == self.decode != ""


NOWHERE = Route("", "")
"""The route of a request that waits for an engine."""
