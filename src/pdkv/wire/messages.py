"""Messages between the router and the engines: frozen tagged structs, msgpack, one decoder.

Grouped by receiver. Every message about a request carries (request_id, attempt): messages of an ended attempt are
dropped. Durations, never points in time, cross the wire. New fields are appended with defaults.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdkv.base.limits import MAX_N
from pdkv.base.trace_context import MAX_TRACEPARENT_CHARS
from pdkv.errors import MalformedMessage
from pdkv.sampling.params import SamplingParams
from pdkv.wire.decoding import decode_total
from pdkv.wire.kv import EngineCard, KVHandoff, KVTerms
from pdkv.wire.profiles import Profile, Profiled
from pdkv.wire.reports import LoadReport, SourceCounts
from pdkv.wire.tiers import CacheAnswer, CacheOrder, TierEvents
from pdkv.wire.types import (
    MAX_CARDS,
    MAX_LIST,
    Attempt,
    Blob,
    BlockKey,
    BlockKeys,
    Count,
    Id,
    Message,
    Natural,
    Seconds,
    Text,
    TokenId,
    TokenIds,
)

PROTOCOL = 2
"""Version of the messages between processes. It stays as long as only fields with defaults and new messages are added:
a peer that does not know them skips them. Peers of another version are refused with both numbers.
`tests/wire/recorded/` keeps messages of an engine of this version.
"""

FinishReason = Literal["stop", "length"]

MAX_ERROR_CHARS = 4096
"""Longest text of a Failed."""

MAX_POOLED_BYTES = 1 << 20
"""Largest size of what is pooled of a prompt."""

MAX_TRIAL_TOKENS = 64
"""The most tokens that an engine computes for one request alone, while all others stand still."""

MAX_TIMEOUT_S = 1e9
"""Longest time-out of a request, also used for one without."""

PROBE_SALT = "\0probe"
"""Cache salt of the router's probes; no client can have it. Engines do not count their prompts."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probability of one token, its rank (1 = most likely) and the requested alternatives.

    The garbage collector does not track them: a router holds them by the hundred thousand.
    """

    token_id: TokenId
    logprob: float
    rank: Count
    top: Annotated[tuple[tuple[TokenId, float], ...], Meta(max_length=256)] = ()


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of a prompt, still encoded: those of a long one take 300 ms to decode, on a thread."""

    count: Annotated[int, Meta(ge=0, le=MAX_LIST)]
    parts: Annotated[list[bytes], Meta(max_length=MAX_LIST)]  # entries of PART_TOKENS tokens each, the rest in the last

    @classmethod
    def of(cls, entries: "Sequence[TokenLogprob | None]") -> "PromptLogprobs":
        """Encode entries, of which the first is None."""
        starts = range(0, len(entries), PART_TOKENS)
        return cls(len(entries), [_encode_part(entries[i : i + PART_TOKENS]) for i in starts])

    def decode(self) -> "list[TokenLogprob | None]":
        """All entries; other threads have their turn between two parts. Raises MalformedMessage."""
        entries: list[TokenLogprob | None] = []
        for part in self.parts:
            entries += decode_total(_part, part)
            if len(entries) > self.count:
                break  # no more of them than a peer may have announced
        if len(entries) != self.count:
            raise MalformedMessage(f"{len(entries)} prompt logprobs instead of {self.count}")
        return entries


PART_TOKENS = 512
"""Tokens with logprobs that are decoded in one go: two milliseconds, with 20 alternatives each."""

_encode_part = msgspec.msgpack.Encoder().encode
_part = msgspec.msgpack.Decoder(Annotated[list[TokenLogprob | None], Meta(max_length=PART_TOKENS)])


# --- router -> engine ---------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """A router's first frame on a connection; a new epoch ends the requests and leases of that router's previous epoch
    only.
    """

    router_id: Id
    epoch: Id
    protocol: Natural = 1  # the router's PROTOCOL


class Submit(Message, frozen=True, kw_only=True):
    """Run a request. Hand-off, retry and migration are a Submit with non-empty output."""

    request_id: Id  # the router's own, one per choice
    transfer_id: Id
    attempt: Attempt
    choice: Annotated[int, Meta(ge=0, lt=MAX_N)] = 0
    prompt_token_ids: TokenIds
    output_token_ids: TokenIds = []
    params: SamplingParams
    cache_salt: str = ""
    adapter: str = ""
    priority: int = 0
    timeout_s: Annotated[float, Meta(gt=0.0, le=MAX_TIMEOUT_S)] = 600.0
    until: Literal["first_token", "end", "cached"] = "end"  # cached: lend cached KV, compute nothing
    kv: Literal["local", "handoff", "await_peer"] = "local"
    conditional: bool = False  # await_peer only: the engine may decline and prefill itself
    handoff: KVHandoff | None = None  # await_peer, prefill first; handoff: KV of the prompt that another engine lends
    ticket: Blob | None = None  # handoff, needs peer first
    trial_tokens: Annotated[int, Meta(ge=0, le=MAX_TRIAL_TOKENS)] = 0
    """New tokens that it must produce alone: it may have killed an engine (Trial)."""
    label: Id = ""  # the client's name of the request: for logs only
    traceparent: Annotated[str, Meta(max_length=MAX_TRACEPARENT_CHARS)] = ""  # W3C; for logs only
    load_timeout_s: Seconds = 0.0  # deadline of loading a loan, after which it is computed; 0: as for any load
    kv_terms: KVTerms | None = None  # terms of its stored KV; None: it has none
    tenant: Id = ""  # a digest of its tenant: the grammars of different tenants are matched separately
    prediction_token_ids: TokenIds = []  # what the client expects as the output, for proposers
    seed_drawn: bool = False  # the client gave no seed


class Abort(Message, frozen=True):
    """Give a request up; may overtake its Submit and then cancels it on arrival."""

    request_id: Id
    attempt: Attempt


class KVTicket(Message, frozen=True):
    """The decode side's allocation for a transfer, forwarded to the prefill engine."""

    request_id: Id
    attempt: Attempt
    ticket: Blob
    number: Count = 0  # of earlier tickets, for the same attempt


class Continue(Message, frozen=True):
    """The first token, for a decode engine that was dispatched before it was known."""

    request_id: Id
    attempt: Attempt
    token_ids: TokenIds


class Peers(Message, frozen=True):
    """All engine cards now known; an engine that is missing here is gone. With `removed`, what has changed since the
    last one: only to engines whose card has `peer_changes`.
    """

    cards: Annotated[list[EngineCard], Meta(max_length=MAX_CARDS)]
    removed: Annotated[list[Id], Meta(max_length=MAX_CARDS)] | None = None  # names of engines that are gone


class Resync(Message, frozen=True):
    """Ask for the whole cache content again, as KVEvents that begin with a CacheCleared."""


class AskReport(Message, frozen=True):
    """Ask for a current LoadReport, of all ranks, after earlier messages are handled."""

    number: Count  # rises from one to the next; one answer may serve several


# --- both directions ----------------------------------------------------------------------------------------------


class KVReady(Message, frozen=True):
    """The KV of a transfer is delivered (or never will be): prefill engine -> router -> decode engine."""

    request_id: Id
    attempt: Attempt
    ok: bool
    code: Id = ""
    ticket: Count | None = None  # number of the ticket that it is about; None: the last one


class Release(Message, frozen=True):
    """End the prefill engine's lease: ack, abort and peer death are this one idempotent message."""

    transfer_id: Id
    attempt: Attempt
    lent: bool = False  # the lease of a loan for the transfer's prompt


class Trial(Message, frozen=True):
    """Sent by an engine when it begins or ends running a suspected request alone; it pauses until the router echoes
    this.
    """

    request_id: Id
    attempt: Attempt
    begins: bool


# --- engine -> router ---------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The engine answers a Hello with its card."""

    card: EngineCard
    protocol: Natural = 1  # the engine's PROTOCOL


class Tokens(Message, frozen=True, gc=False):
    """New output tokens of one request. `position` is the output index of the first of them."""

    request_id: Id
    attempt: Attempt
    position: Natural
    token_ids: TokenIds
    logprobs: Annotated[list[TokenLogprob], Meta(max_length=MAX_LIST)] | None = None
    # With the first token only; entry 0 is None.
    prompt_logprobs: PromptLogprobs | None = None
    sources: SourceCounts | None = None  # with the first token only: a reader that stops early gets no Finished
    pooled: Annotated[bytes, Meta(max_length=MAX_POOLED_BYTES)] = b""  # what `SamplingParams.pooling` asks for: float32


class Finished(Message, frozen=True):
    """The request ended normally; `stop_token_id` is the token that ended it, if one did."""

    request_id: Id
    attempt: Attempt
    reason: FinishReason
    sources: SourceCounts
    stop_token_id: TokenId | None = None
    queued_s: Seconds = 0.0  # from its arrival in the engine to its first step; a load of its KV is part of it
    ran_s: Seconds = 0.0  # from that step to the end
    accepted_guesses: Count = 0  # output tokens that this engine guessed and verified
    rejected_guesses: Count = 0


class HandedOff(Message, frozen=True):
    """The prefill engine's last message about a request that continues elsewhere; the KVHandoff goes to decode
    verbatim.
    """

    request_id: Id
    attempt: Attempt
    sources: SourceCounts
    handoff: KVHandoff
    queued_s: Seconds = 0.0  # as in Finished
    ran_s: Seconds = 0.0


class Failed(Message, frozen=True):
    """The request ended with an error; `code` is a PdkvError's."""

    request_id: Id
    attempt: Attempt
    code: Id
    message: Annotated[str, Meta(max_length=MAX_ERROR_CHARS)]
    retryable: bool
    param: Id = ""  # the field at fault, if there is one


class Allocated(Message, frozen=True):
    """Decode has allocated blocks for a remote load. An empty range at 0 means that decode declines and prefills
    itself; an empty range at the prompt's end, that decode's own cache has everything but the first token.
    """

    request_id: Id
    attempt: Attempt
    start: Natural  # wanted token range [start, stop)
    stop: Natural
    ticket: Blob | None = None


class Loaded(Message, frozen=True):
    """Decode's remote load ended, with the sources of the tokens, for counters and the judgement of the pair."""

    request_id: Id
    attempt: Attempt
    ok: bool
    code: Id = ""
    num_bytes: Count = 0
    seconds: Seconds = 0.0


class BlockStored(Message, frozen=True):
    """Full blocks entered the cache: one chain of hash-block keys after `parent` (None: a chain's root)."""

    keys: BlockKeys
    parent: BlockKey | None


class BlockRemoved(Message, frozen=True):
    """These blocks can no longer be found in the engine's cache."""

    keys: BlockKeys


class CacheCleared(Message, frozen=True):
    """Nothing reported earlier can be found in the engine's cache any more."""


KVEvent = BlockStored | BlockRemoved | CacheCleared


class Disconnect(Message, frozen=True):
    """The engine's last message on a connection of which it has lost track: a frame is missing, or unreadable."""

    reason: Text


class KVEvents(Message, frozen=True):
    """Cache changes, numbered per engine; a gap asks for a Resync."""

    number: Count
    events: Annotated[list[KVEvent], Meta(max_length=MAX_LIST)]
    more: bool = False  # the next part has the same number


class Beat(Message, frozen=True):
    """The engine's process is running. Sent every 0.2 s besides frames, by a separate thread, even in a long step."""

    epoch: Id
    busy_s: Seconds  # seconds since its oldest step, or other work, began; 0: it waits
    predicted_s: Seconds = 0.0  # how long that should take


RouterToEngine = (
    Hello | Submit | Abort | KVTicket | Continue | KVHandoff | KVReady | Release | Trial | Peers | Resync | CacheOrder
    | AskReport | Profile
)  # fmt: skip
EngineToRouter = (
    Ready | Tokens | Finished | KVHandoff | HandedOff | Failed | Allocated | Loaded | KVReady | Release | Trial
    | KVEvents | TierEvents | CacheAnswer | Profiled | LoadReport | Disconnect | Beat
)  # fmt: skip
