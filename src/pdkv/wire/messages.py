"""Wire messages between the router and the engines: frozen tagged structs, msgpack, one decoder.

Grouped by receiver. Every message about a request carries (request_id, attempt): what belongs to an ended attempt is
dropped. Durations, never points in time, cross the wire. New fields are appended with defaults. Ranges that every
sender keeps are part of the types, so that what is out of range does not pass the decoder (`src/pdkv/wire/frames.py`).
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdkv.base.limits import MAX_ID_CHARS, MAX_N
from pdkv.base.trace_context import MAX_TRACEPARENT_CHARS
from pdkv.errors import MalformedMessage
from pdkv.sampling.params import SamplingParams
from pdkv.wire.decoding import decode_total

MAX_BLOB_BYTES = 64 * 1024
"""Upper bound of a ticket and of a hand-off's payload."""

PROTOCOL = 1
"""Version of the messages in this module. It rises when a peer of an older one could misunderstand them.

New fields with defaults and new messages need no new version: who does not know them skips them.
"""

OLDEST_PROTOCOL = 1
"""Of a peer that is still spoken to."""

Order = Literal["prefill_first", "concurrent", "needs_peer_first", "decode_first"]
ConnectorKind = Literal["store", "pull", "push"]
ChecksumMode = Literal["off", "sample", "on"]
FinishReason = Literal["stop", "length"]

CacheAction = Literal["lookup", "clear", "pin", "unpin", "prefetch", "move"]

RequestKey = tuple[str, int]
"""(request_id, attempt)."""

MAX_ERROR_CHARS = 4096
"""Of the text of a Failed."""

MAX_RANKS = 1024
"""Of one engine."""

MAX_PROBLEM_CHARS = 512
"""Of what is wrong with a connector."""

MAX_CARDS = 65536
"""Engines that one engine is told of."""

MAX_CONNECTOR_PARTS = 64
"""Children and tiers of a connector that are counted by themselves."""

MAX_MEDIUM_CHARS = 128
"""Of the name of a tier below the cache."""

MAX_LAYERS = 4096
"""Of a model, and so of its KV groups."""

MAX_TRIAL_TOKENS = 64
"""Of a request that its engine computes alone: all others stand still meanwhile."""

MAX_TIMEOUT_S = 1e9
"""Of a request; who has none gets this one."""

MAX_KV_TTL_S = 10**9
"""Of stored KV: some 30 years, which any clock can add to its time."""

MAX_KV_QUOTA_BYTES = 2**53

MAX_KV_OWNERS = 1024
"""Of KV in one tier of an engine that are told by themselves."""

PROBE_SALT = "\0probe"
"""Cache salt of the router's probes; no client can have it. Engines do not count their prompts."""

MAX_LIST = 1 << 21
"""Entries of a list of tokens, log probabilities or block keys: in memory an entry is many times its bytes."""

Id = Annotated[str, Meta(max_length=MAX_ID_CHARS)]
Text = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, Meta(ge=1, lt=2**31)]
Natural = Annotated[int, Meta(ge=0, lt=2**31)]
Attempt = Natural
TokenId = Natural
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_LIST)]
RoleName = Annotated[str, Meta(pattern="^(prefill|decode|any)$")]
KVScale = Annotated[float, Meta(gt=0.0, le=1e38)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]
Blob = Annotated[bytes, Meta(max_length=MAX_BLOB_BYTES)]
BlockKey = Annotated[bytes, Meta(min_length=1, max_length=64)]
BlockKeys = Annotated[list[BlockKey], Meta(max_length=MAX_LIST)]
KVOwner = Annotated[int, Meta(ge=1, le=2**63 - 1)]


class Message(msgspec.Struct, frozen=True, omit_defaults=True, array_like=False, tag=True):
    """Base of everything that crosses a process boundary."""


class KVTerms(msgspec.Struct, frozen=True):
    """On which terms a request's KV is kept below the engines' own pools. Routers set them, clients cannot."""

    owner: KVOwner  # whose it is: a digest
    ttl_s: Annotated[int, Meta(ge=1, le=MAX_KV_TTL_S)] | None = None  # from its write on; None: no end
    # That the owner's values may take of a rank's host memory; None: as much as there is.
    quota_bytes: Annotated[int, Meta(ge=1, le=MAX_KV_QUOTA_BYTES)] | None = None


# --- KV identity and layout ---------------------------------------------------------------------------------------


class KVGroup(msgspec.Struct, frozen=True):
    """Layers whose KV lies in the same blocks: one block table per request and group (docs/kv-groups.md)."""

    layers: Annotated[tuple[Natural, ...], Meta(max_length=MAX_LAYERS)]  # the model's, in the order of a block's layers
    window: Natural = 0  # tokens that a query sees, its own included: blocks before them may be given up; 0: all


class KVLayout(msgspec.Struct, frozen=True):
    """Shape of one rank's KV cache: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_size), block-major."""

    num_layers: Size  # of a block; with several groups fewer than the model's, and some may be unused
    num_kv_heads: Size
    head_size: Size
    block_size: Size  # tokens per block
    dtype: Id  # torch's name, such as "bfloat16"
    dtype_bytes: Size
    total_kv_heads: Natural = 0  # of all ranks together, each head counted once; 0: num_kv_heads
    groups: Annotated[tuple[KVGroup, ...], Meta(max_length=MAX_LAYERS)] = ()  # empty: one, of all layers, no window
    # By layer of the model, what 1.0 stands for in K and in V that are stored in FP8; empty: 1.0 everywhere.
    kv_scales: Annotated[tuple[tuple[KVScale, KVScale], ...], Meta(max_length=MAX_LAYERS)] = ()
    codec: Text = ""  # lossy ones that KV may have gone through in a store, by identity; empty: KV is exact

    @property
    def windows(self) -> tuple[int, ...]:
        """By group, the window of its layers; 0: they see all tokens."""
        return tuple(group.window for group in self.groups) or (0,)

    @property
    def num_groups(self) -> int:
        """Block tables of a request."""
        return max(len(self.groups), 1)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """By layer of the model: its group, and its index in the group's blocks."""
        if not self.groups:
            return tuple((0, layer) for layer in range(self.num_layers))
        by_layer = {layer: (g, i) for g, group in enumerate(self.groups) for i, layer in enumerate(group.layers)}
        return tuple(by_layer[layer] for layer in range(len(by_layer)))

    @property
    def scales(self) -> tuple[tuple[float, float], ...]:
        """By layer of the model, of K and of V."""
        return self.kv_scales or ((1.0, 1.0),) * len(self.places)

    @property
    def kv_heads_of_all_ranks(self) -> int:
        """KV heads of the model, each counted once however many ranks hold it."""
        return self.total_kv_heads or self.num_kv_heads

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers, K and V."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_size * self.dtype_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a block."""
        return self.block_bytes // self.num_layers

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers, K and V."""
        return self.block_bytes // self.block_size

    @property
    def identity(self) -> str:
        """What two engines must share to exchange KV. TP is left out on purpose, and the block size where there are no
        groups: what of a window can be found depends on it. Scales are there as a digest: there are two for each layer.
        """
        identity = f"layers={self.num_layers},head_size={self.head_size},dtype={self.dtype},k=rotated"
        if self.kv_scales:
            numbers = [number for scales in self.kv_scales for number in scales]
            digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}d", *numbers), digest_size=8).hexdigest()
            identity += f",kv_scales={digest}"
        if self.codec:
            identity += f",codec={self.codec}"
        if not self.groups:
            return identity
        groups = "+".join(f"{','.join(map(str, group.layers))}@{group.window}" for group in self.groups)
        return f"{identity},block_size={self.block_size},groups={groups}"


class EngineCard(Message, frozen=True):
    """What an engine publishes about itself when it is ready; the router distributes cards to peers."""

    engine: Id  # name, unique in a deployment, such as "prefill-0"
    epoch: Id  # one incarnation of that name
    role: RoleName  # a default of the router's policy, nothing more
    pid: Natural
    connector: Text
    kind: ConnectorKind
    content_addressed: bool
    orders: Annotated[list[Order], Meta(max_length=16)]
    model: Text  # identity digest of configuration and weights
    layout: KVLayout
    hash_block_size: Size
    num_blocks: Size
    max_model_len: Size
    max_num_seqs: Size
    tp: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    pp: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    rank_blobs: Annotated[list[Blob], Meta(max_length=MAX_RANKS)] = []  # what each rank's connector needs to be reached
    rank_pids: Annotated[list[Natural], Meta(max_length=MAX_RANKS)] = []  # per rank; the first is `pid`
    beats: Text = ""  # ZeroMQ endpoint of its Beats; of tcp:// only the port counts; "": it sends none
    max_num_batched_tokens: Natural = 0  # of its largest step; 0: not known
    version: Id = ""  # of pdkv there: for people
    wire_versions: Annotated[dict[Id, Natural], Meta(max_length=64)] = {}  # of each connector in it: KVConnector's
    kv_checksum: ChecksumMode = "off"  # which of its hand-offs have digests
    lends: bool = False  # it hands off what it has cached, and reads what others do (docs/kv-hierarchy.md)


class KVHandoff(Message, frozen=True):
    """Where the KV of a prompt lies after prefill; prefill engine -> router -> decode engine."""

    request_id: Id
    attempt: Attempt
    transfer_id: Id
    engine: Id
    epoch: Id
    num_tokens: Natural  # prompt + output tokens whose KV can be had
    payload: Blob  # msgpack, the connector's own, at most MAX_BLOB_BYTES


class SourceCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Prompt tokens of one choice on one engine by where their KV came from; they sum to the prompt's length."""

    computed: Count = 0
    recomputed: Count = 0  # computed again after a preemption or a failed load
    local_hit: Count = 0
    remote: Count = 0  # through a hand-off
    store: Count = 0  # content-addressed, from a store or another engine's cache


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probability of one token, its rank (1 = most likely) and the alternatives asked for.

    Nothing of it is looked at by the garbage collector: a router holds them by the hundred thousand.
    """

    token_id: TokenId
    logprob: float
    rank: Count
    top: Annotated[tuple[tuple[TokenId, float], ...], Meta(max_length=256)] = ()


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of each token of a prompt, still encoded: of a long prompt, they take 300 ms to decode, on a thread."""

    count: Annotated[int, Meta(ge=0, le=MAX_LIST)]
    parts: Annotated[list[bytes], Meta(max_length=MAX_LIST)]  # entries of PART_TOKENS tokens each, the rest in the last

    @classmethod
    def of(cls, entries: "Sequence[TokenLogprob | None]") -> "PromptLogprobs":
        """Encode them; the first is None."""
        starts = range(0, len(entries), PART_TOKENS)
        return cls(len(entries), [_encode_part(entries[i : i + PART_TOKENS]) for i in starts])

    def decode(self) -> "list[TokenLogprob | None]":
        """All of them; other threads have their turn between two parts. Raises MalformedMessage."""
        entries: list[TokenLogprob | None] = []
        for part in self.parts:
            entries += decode_total(_part, part)
            if len(entries) > self.count:
                break  # no more of them than a peer may have announced
        if len(entries) != self.count:
            raise MalformedMessage(f"{len(entries)} prompt logprobs instead of {self.count}")
        return entries


PART_TOKENS = 512
"""Tokens whose logprobs are decoded in one go: two milliseconds, with 20 alternatives each."""

_encode_part = msgspec.msgpack.Encoder().encode
_part = msgspec.msgpack.Decoder(Annotated[list[TokenLogprob | None], Meta(max_length=PART_TOKENS)])


# --- router -> engine ---------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """A router's first frame on a connection; a new epoch ends only its own predecessor's requests and leases."""

    router_id: Id
    epoch: Id
    protocol: Natural = 1  # the router's PROTOCOL; those before the first version said nothing


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
    until: Literal["first_token", "end", "cached"] = "end"  # cached: hand off what the cache has, compute nothing
    kv: Literal["local", "handoff", "await_peer"] = "local"
    conditional: bool = False  # await_peer only: the engine may decline and prefill by itself
    handoff: KVHandoff | None = None  # await_peer, prefill first; handoff: what another engine lends of the prompt
    ticket: Blob | None = None  # handoff, needs peer first
    trial_tokens: Annotated[int, Meta(ge=0, le=MAX_TRIAL_TOKENS)] = 0
    """So many new tokens it gets alone: it may have ended an engine (Trial)."""
    label: Id = ""  # the client's own name of the request: for logs only
    traceparent: Annotated[str, Meta(max_length=MAX_TRACEPARENT_CHARS)] = ""  # W3C; likewise
    load_timeout_s: Seconds = 0.0  # of a load of what is lent: then it is computed; 0: as of any load
    kv_terms: KVTerms | None = None  # of what is stored of its KV; None: it has none
    tenant: Id = ""  # a digest of whose request it is: the grammars of different tenants are matched apart


class Abort(Message, frozen=True):
    """Give a request up; may overtake its Submit and then cancels it on arrival."""

    request_id: Id
    attempt: Attempt


class KVTicket(Message, frozen=True):
    """The decode side's allocation for a transfer, forwarded to the prefill engine."""

    request_id: Id
    attempt: Attempt
    ticket: Blob
    number: Count = 0  # of tickets before it, for the same attempt


class Continue(Message, frozen=True):
    """The first token, for a decode engine that was dispatched before it was known."""

    request_id: Id
    attempt: Attempt
    token_ids: TokenIds


class Peers(Message, frozen=True):
    """All engine cards now known; an engine that is missing here is gone."""

    cards: Annotated[list[EngineCard], Meta(max_length=MAX_CARDS)]


class Resync(Message, frozen=True):
    """Ask for the whole cache content again: KVEvents that begin with a `cleared`."""


class AskReport(Message, frozen=True):
    """Ask for a LoadReport of now, of all ranks, behind what was sent before."""

    number: Count  # rises from one to the next; one answer may be for several


def names_tier(name: str, tier: str) -> bool:
    """Whether a tier, such as "multi/1-store/0-host", is called so: in full, by its last part or its kind, "host"."""
    last = tier.rpartition("/")[2]
    return name in (tier, last, last.partition("-")[2])


class CacheOrder(Message, frozen=True, kw_only=True):
    """An operator's question about what is cached, or order to change it; answered by a CacheAnswer."""

    order_id: Id
    action: CacheAction
    keys: BlockKeys | None = None  # of a prompt's full hash blocks, in their order; None: all that there is
    tier: Text = ""  # its name, "multi/1-store/0-host", the last part of that, or its kind, "host"; empty: all
    ttl_s: Seconds | None = None  # of pins; None: until they are taken away
    timeout_s: Seconds = 10.0  # tiers that have not answered by then are late
    kv_terms: KVTerms | None = None  # prefetch, move: of the prompt's requests
    source: Text = ""  # move: the tier that values leave, named as `tier` is, which is where they go
    copy: bool = False  # move: they stay there, too

    def within(self, name: str) -> "CacheOrder":
        """The same to a part of that name."""
        tier, source = self.tier.removeprefix(f"{name}/"), self.source.removeprefix(f"{name}/")
        return msgspec.structs.replace(self, tier=tier, source=source)

    def is_about(self, tier: str) -> bool:
        """Whether it names a tier, such as "0-host", of the part that it went to."""
        return not self.tier or names_tier(self.tier, tier)

    def is_from(self, tier: str) -> bool:
        """Whether it takes values out of that tier."""
        return names_tier(self.source, tier)


# --- both directions ----------------------------------------------------------------------------------------------


class KVReady(Message, frozen=True):
    """The KV of a transfer is delivered (or never will be): prefill engine -> router -> decode engine."""

    request_id: Id
    attempt: Attempt
    ok: bool
    code: Id = ""
    ticket: Count | None = None  # number of the ticket that it is about; None: an older engine does not say


class Release(Message, frozen=True):
    """End the prefill engine's lease: ack, abort and peer death are this one idempotent message."""

    transfer_id: Id
    attempt: Attempt


class Trial(Message, frozen=True):
    """A suspect is to run alone from now on, or no longer. Its engine stands still until the router sends this back."""

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
    prompt_logprobs: PromptLogprobs | None = msgspec.field(default=None, name="encoded_prompt_logprobs")
    sources: SourceCounts | None = None  # with the first token only: who stops early hears no Finished


class Finished(Message, frozen=True):
    """The request ended by itself; `stop_token_id` is the token that ended it, where one did."""

    request_id: Id
    attempt: Attempt
    reason: FinishReason
    sources: SourceCounts
    stop_token_id: TokenId | None = None
    queued_s: Seconds = 0.0  # from its arrival in the engine to its first step; a load of its KV is part of it
    ran_s: Seconds = 0.0  # from that step to the end


class HandedOff(Message, frozen=True):
    """The prefill engine's last word about a request that goes on elsewhere; the KVHandoff goes to decode verbatim."""

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
    param: Id = ""  # the field at fault, where one is


class Allocated(Message, frozen=True):
    """Decode has allocated for a remote load. An empty range at 0 means that it declines and prefills by itself; one at
    the prompt's end, that its own cache has everything but the first token.
    """

    request_id: Id
    attempt: Attempt
    start: Natural  # wanted token range [start, stop)
    stop: Natural
    ticket: Blob | None = None


class Loaded(Message, frozen=True):
    """Decode's remote load ended: where the tokens came from, for counters and the pair's marks."""

    request_id: Id
    attempt: Attempt
    ok: bool
    code: Id = ""
    num_bytes: Count = 0
    seconds: Seconds = 0.0


class BlockStored(Message, frozen=True):
    """Full blocks entered the cache: one chain of hash-block keys behind `parent` (None: a chain's root)."""

    keys: BlockKeys
    parent: BlockKey | None


class BlockRemoved(Message, frozen=True):
    """These blocks can no longer be found in the engine's cache."""

    keys: BlockKeys


class CacheCleared(Message, frozen=True):
    """Nothing that was told before can be found in the engine's cache any more."""


KVEvent = BlockStored | BlockRemoved | CacheCleared


class Disconnect(Message, frozen=True):
    """The engine's last word on a connection of which it has lost track: a frame is missing, or cannot be read."""

    reason: Text


class KVEvents(Message, frozen=True):
    """Cache changes, numbered per engine; a gap asks for a Resync."""

    number: Count
    events: Annotated[list[KVEvent], Meta(max_length=MAX_LIST)]
    more: bool = False  # the next part has the same number


class TierPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of the stores that a tier consists of."""

    name: Text  # in LoadReport.connectors, behind the connector's name; empty: the tier is this store alone
    capacity: Count | None = None  # keys of this engine's that it has room for; None: it is not known to evict any

    def under(self, name: str) -> "TierPart":
        """The same as a part of `name`."""
        return TierPart(f"{name}/{self.name}" if self.name else name, self.capacity)


class TierEvents(Message, frozen=True):
    """What is to be had from a tier below the engine's cache, and what no longer is (docs/kv-stores.md).

    Hints, without numbers: a key that is wrongly told, or not, costs a load or a computation and nothing else. With no
    keys it only says that the engine reaches the tier.
    """

    medium: Annotated[str, Meta(min_length=1, max_length=MAX_MEDIUM_CHARS)]  # the tier's name, such as "disk"
    shared: bool  # what one engine says of it holds for all that name it and its scope; else it is this engine's own
    tokens_per_key: Size  # a key is the block key at the end of so many tokens; other ends are not told
    removed: BlockKeys = []
    stored: BlockKeys = []
    parts: Annotated[list[TierPart], Meta(max_length=MAX_CONNECTOR_PARTS)] = []  # fastest first; empty: not known
    value_bytes: Count = 0  # that a rank reads for a key; 0: not known
    scope: Annotated[str, Meta(max_length=MAX_MEDIUM_CHARS)] = ""  # tells media of one name apart, as of two hosts

    def under(self, name: str) -> "TierEvents":
        """The same of a tier that is a part of `name`."""
        medium = f"{name}/{self.medium}"[:MAX_MEDIUM_CHARS]
        return msgspec.structs.replace(self, medium=medium, parts=[part.under(name) for part in self.parts])


class TierAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a CacheOrder in one tier of an engine; of one that failed, why."""

    tier: Text
    num_tokens: Count = 0  # of the prompt, from its beginning, that the tier has, or that were pinned there
    num_values: Count = 0  # blocks of a pool, or values of a store, that it was about
    code: Id = ""
    problem: Annotated[str, Meta(max_length=MAX_PROBLEM_CHARS)] = ""


class CacheAnswer(Message, frozen=True):
    """What became of a CacheOrder on one engine."""

    order_id: Id
    tiers: Annotated[list[TierAnswer], Meta(max_length=MAX_CONNECTOR_PARTS)] = []  # those that the order names
    known: Annotated[list[Text], Meta(max_length=MAX_CONNECTOR_PARTS)] = []  # all that there are

    def under(self, name: str) -> "CacheAnswer":
        """The same, of tiers that are parts of `name`."""
        tiers = [msgspec.structs.replace(tier, tier=f"{name}/{tier.tier}") for tier in self.tiers]
        return CacheAnswer(self.order_id, tiers, [f"{name}/{tier}" for tier in self.known])


class BlockCounts(msgspec.Struct, frozen=True):
    """The ownership equation: free + cached + active + leased + quarantined = total."""

    total: Count
    free: Count
    cached: Count
    active: Count
    leased: Count
    quarantined: Count


class TierHeld(msgspec.Struct, frozen=True):
    """What an engine has in a tier of a store now, summed over its ranks; zeros where the tier does not know."""

    values: Count = 0
    num_bytes: Count = 0
    capacity: Count = 0  # bytes
    evicted: Count = 0  # values that have made room for others since the start
    owned: Annotated[dict[KVOwner, Count], Meta(max_length=MAX_KV_OWNERS)] = {}  # bytes by owner, of KV with terms

    def __add__(self, other: "TierHeld") -> "TierHeld":
        return TierHeld(
            self.values + other.values,
            self.num_bytes + other.num_bytes,
            self.capacity + other.capacity,
            self.evicted + other.evicted,
            largest_owners(Counter(self.owned) + Counter(other.owned)),
        )


def largest_owners(owned: Mapping[int, int]) -> dict[int, int]:
    """As many as a TierHeld may have, those with the most bytes."""
    return dict(Counter(owned).most_common(MAX_KV_OWNERS))


class ConnectorStats(msgspec.Struct, frozen=True):
    """What a connector, or one part of it, has done since it was made; summed over an engine's ranks.

    A transfer counts on each rank that moved bytes for it.
    """

    saves: Count = 0  # transfers out of this engine that ended well
    loads: Count = 0  # transfers into it
    saved_bytes: Count = 0
    loaded_bytes: Count = 0
    failed_saves: Count = 0  # cancelled transfers have not failed
    failed_loads: Count = 0
    failed_lookups: Count = 0
    timeouts: Count = 0  # of saves, loads and lookups: failures, too
    fallbacks: Count = 0  # loads that another part took over when this one's failed
    tier_hits: Count = 0  # values that were read from a tier
    tier_failures: Count = 0  # calls of a tier that failed, or that it was spared after a failure
    read_bytes: Count = 0  # that a store, or a tier of one, had
    read_seconds: Seconds = 0.0  # in which a rank was reading there
    damaged_values: Count = 0  # that were not what had been saved
    corrupted_transfers: Count = 0  # failed: what arrived was not what the peer had
    paths: Annotated[dict[Id, Id], Meta(max_length=MAX_CARDS)] = {}  # by which KV of these peers is read
    held: TierHeld | None = None  # of a tier; None: it is none
    load_seconds: Seconds = 0.0  # that threads spent on loads
    hidden_load_seconds: Seconds = 0.0  # of these, while the step thread computed and did not wait for them
    save_seconds: Seconds = 0.0
    hidden_save_seconds: Seconds = 0.0
    late_saves: Count = 0  # values that were not saved: too much was on its way before their blocks were reused

    def __add__(self, other: "ConnectorStats") -> "ConnectorStats":
        names = [name for name in self.__struct_fields__ if name not in ("paths", "held")]
        total = ConnectorStats(**{name: getattr(self, name) + getattr(other, name) for name in names})
        paths = dict(self.paths)
        for peer, path in other.paths.items():  # ranks may differ
            paths[peer] = "+".join(sorted({*paths.get(peer, path).split("+"), *path.split("+")}))
        held = self.held + other.held if self.held and other.held else self.held or other.held
        return msgspec.structs.replace(total, paths=paths, held=held)


class LoadReport(Message, frozen=True):
    """How busy the engine is, and its counters since start."""

    waiting: Count
    running: Count
    blocks: BlockCounts
    sources: SourceCounts = SourceCounts()
    preemptions: Count = 0
    load_failures: Count = 0
    bytes_received: Count = 0
    dropped_messages: Count = 0
    transfer_seconds: Seconds = 0.0
    steps: Count = 0
    damaged_values: Count = 0
    partial_loads: Count = 0
    non_finite_requests: Count = 0
    connectors: Annotated[dict[Id, ConnectorStats], Meta(max_length=MAX_CONNECTOR_PARTS)] = {}  # by name, as NAME/PART
    connector_problem: Annotated[str, Meta(max_length=MAX_PROBLEM_CHARS)] = ""  # why it cannot be used now
    answers: Count = 0  # this AskReport of the router, and those before it; 0: none asked


class Beat(Message, frozen=True):
    """The engine's process runs. Sent every 0.2 s beside the frames, by a thread of its own, in a long step, too."""

    epoch: Id
    busy_s: Seconds  # since when it has been at its oldest step, or at what else it does; 0: it waits
    predicted_s: Seconds = 0.0  # how long that should take


RouterToEngine = (
    Hello
    | Submit
    | Abort
    | KVTicket
    | Continue
    | KVHandoff
    | KVReady
    | Release
    | Trial
    | Peers
    | Resync
    | CacheOrder
    | AskReport
)
EngineToRouter = (
    Ready
    | Tokens
    | Finished
    | HandedOff
    | Failed
    | Allocated
    | Loaded
    | KVReady
    | Release
    | Trial
    | KVEvents
    | TierEvents
    | CacheAnswer
    | LoadReport
    | Disconnect
    | Beat
)
