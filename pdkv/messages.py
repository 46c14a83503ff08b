"""Wire messages between the router and the engines: frozen tagged structs, msgpack, one decoder.

Grouped by receiver. Every message about a request carries (request_id, attempt): what belongs to an ended attempt is
dropped. Durations, never points in time, cross the wire. New fields are appended with defaults.
"""

from typing import Literal

import msgspec

from pdkv.decoding import decode_total
from pdkv.sampling_params import SamplingParams

MAX_BLOB_BYTES = 64 * 1024
"""Upper bound of a ticket and of a hand-off's payload."""

Order = Literal["prefill_first", "concurrent", "needs_peer_first", "decode_first"]
ConnectorKind = Literal["store", "pull", "push"]
FinishReason = Literal["stop", "length"]


class Message(msgspec.Struct, frozen=True, omit_defaults=True, array_like=False, tag=True):
    """Base of everything that crosses a process boundary."""


# --- KV identity and layout ---------------------------------------------------------------------------------------


class KVLayout(msgspec.Struct, frozen=True):
    """Shape of one rank's KV cache: (num_blocks, num_layers, 2, num_kv_heads, block_size, head_size), block-major."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int  # tokens per block
    dtype: str  # torch's name, such as "bfloat16"
    dtype_bytes: int
    total_kv_heads: int = 0  # of all ranks together, each head counted once; 0: num_kv_heads

    @property
    def kv_heads_of_all_ranks(self) -> int:
        """KV heads of the model."""
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
        """What two engines must share to exchange KV; block size and TP are left out on purpose."""
        return f"layers={self.num_layers},head_size={self.head_size},dtype={self.dtype},k=rotated"


class EngineCard(Message, frozen=True):
    """What an engine publishes about itself when it is ready; the router distributes cards to peers."""

    engine: str  # name, unique in a deployment, such as "prefill-0"
    epoch: str  # one incarnation of that name
    role: str  # "prefill", "decode" or "any": a default of the router's policy, nothing more
    pid: int
    connector: str
    kind: ConnectorKind
    content_addressed: bool
    orders: list[Order]
    model: str  # identity digest of configuration and weights
    layout: KVLayout
    hash_block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    tp: int = 1
    pp: int = 1
    rank_blobs: list[bytes] = []  # per rank: what the connector's worker side needs to be reached
    rank_pids: list[int] = []  # per rank; the first is `pid`


class KVHandoff(Message, frozen=True):
    """Where the KV of a prompt lies after prefill; prefill engine -> router -> decode engine."""

    request_id: str
    attempt: int
    transfer_id: str
    engine: str
    epoch: str
    num_tokens: int  # prompt + output tokens whose KV can be had
    payload: bytes  # msgpack, the connector's own, at most MAX_BLOB_BYTES


class SourceCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Prompt tokens of one choice on one engine by where their KV came from; they sum to the prompt's length."""

    computed: int = 0
    recomputed: int = 0  # computed again after a preemption or a failed load
    local_hit: int = 0
    remote: int = 0  # through a hand-off
    store: int = 0  # content-addressed, from a store or another engine's cache


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of one token, its rank (1 = most likely) and the alternatives asked for."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


# --- router -> engine ---------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """A router's first frame on a connection; a new epoch ends only its own predecessor's requests and leases."""

    router_id: str
    epoch: str


class Submit(Message, frozen=True, kw_only=True):
    """Run a request. Hand-off, retry and migration are a Submit with non-empty output."""

    request_id: str  # the router's own, one per choice
    transfer_id: str
    attempt: int
    choice: int = 0
    prompt_token_ids: list[int]
    output_token_ids: list[int] = []
    params: SamplingParams
    cache_salt: str = ""
    adapter: str = ""
    priority: int = 0
    timeout_s: float = 600.0
    until: Literal["first_token", "end"] = "end"
    kv: Literal["local", "handoff", "await_peer"] = "local"
    conditional: bool = False  # await_peer only: the engine may decline and prefill by itself
    handoff: KVHandoff | None = None  # await_peer, prefill first
    ticket: bytes | None = None  # handoff, needs peer first


class Abort(Message, frozen=True):
    """Give a request up; may overtake its Submit and then cancels it on arrival."""

    request_id: str
    attempt: int


class KVTicket(Message, frozen=True):
    """The decode side's allocation for a transfer, forwarded to the prefill engine."""

    request_id: str
    attempt: int
    ticket: bytes


class Continue(Message, frozen=True):
    """The first token, for a decode engine that was dispatched before it was known."""

    request_id: str
    attempt: int
    token_ids: list[int]


class Peers(Message, frozen=True):
    """All engine cards now known; an engine that is missing here is gone."""

    cards: list[EngineCard]


class Resync(Message, frozen=True):
    """Ask for the whole cache content again: KVEvents that begin with a `cleared`."""


# --- both directions ----------------------------------------------------------------------------------------------


class KVReady(Message, frozen=True):
    """The KV of a transfer is delivered (or never will be): prefill engine -> router -> decode engine."""

    request_id: str
    attempt: int
    ok: bool
    code: str = ""


class Release(Message, frozen=True):
    """End the prefill engine's lease: ack, abort and peer death are this one idempotent message."""

    transfer_id: str
    attempt: int


# --- engine -> router ---------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The engine answers a Hello with its card."""

    card: EngineCard


class Tokens(Message, frozen=True):
    """New output tokens of one request. `position` is the output index of the first of them."""

    request_id: str
    attempt: int
    position: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # with the first token only; entry 0 is None
    sources: SourceCounts | None = None  # with the first token only: who stops early hears no Finished


class Finished(Message, frozen=True):
    """The request ended by itself; `stop_token_id` is the token that ended it, where one did."""

    request_id: str
    attempt: int
    reason: FinishReason
    sources: SourceCounts
    stop_token_id: int | None = None


class HandedOff(Message, frozen=True):
    """The prefill engine's last word about a request that goes on elsewhere; the KVHandoff goes to decode verbatim."""

    request_id: str
    attempt: int
    sources: SourceCounts
    handoff: KVHandoff


class Failed(Message, frozen=True):
    """The request ended with an error; `code` is a PdkvError's."""

    request_id: str
    attempt: int
    code: str
    message: str
    retryable: bool


class Allocated(Message, frozen=True):
    """Decode has allocated for a remote load. An empty range at 0 means that it declines and prefills by itself; one at
    the prompt's end, that its own cache has everything but the first token.
    """

    request_id: str
    attempt: int
    start: int  # wanted token range [start, stop)
    stop: int
    ticket: bytes | None = None


class Loaded(Message, frozen=True):
    """Decode's remote load ended: where the tokens came from, for counters and the pair's marks."""

    request_id: str
    attempt: int
    ok: bool
    code: str = ""
    num_bytes: int = 0
    seconds: float = 0.0


class BlockStored(Message, frozen=True):
    """Full blocks entered the cache: one chain of hash-block keys behind `parent` (None: a chain's root)."""

    keys: list[bytes]
    parent: bytes | None


class BlockRemoved(Message, frozen=True):
    """Blocks left the cache."""

    keys: list[bytes]


class CacheCleared(Message, frozen=True):
    """Everything left the cache."""


KVEvent = BlockStored | BlockRemoved | CacheCleared


class KVEvents(Message, frozen=True):
    """Cache changes, numbered per engine; a gap asks for a Resync."""

    number: int
    events: list[KVEvent]


class BlockCounts(msgspec.Struct, frozen=True):
    """The ownership equation: free + cached + active + leased + quarantined = total."""

    total: int
    free: int
    cached: int
    active: int
    leased: int
    quarantined: int


class Load(Message, frozen=True):
    """How busy the engine is, and its counters since start."""

    waiting: int
    running: int
    blocks: BlockCounts
    sources: SourceCounts = SourceCounts()
    preemptions: int = 0
    load_failures: int = 0
    bytes_received: int = 0
    dropped_messages: int = 0
    transfer_seconds: float = 0.0
    steps: int = 0
    damaged_values: int = 0
    partial_loads: int = 0


RouterToEngine = Hello | Submit | Abort | KVTicket | Continue | KVHandoff | KVReady | Release | Peers | Resync
EngineToRouter = (
    Ready | Tokens | Finished | HandedOff | Failed | Allocated | Loaded | KVReady | Release | KVEvents | Load
)


class Frame(msgspec.Struct, frozen=True):
    """What one ZeroMQ message carries; `number` counts frames per (sender, receiver), a gap is a failure."""

    number: int
    messages: list[RouterToEngine | EngineToRouter]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame) -> bytes:
    """Encode a frame as msgpack."""
    return _encoder.encode(frame)


def decode_frame(data: bytes) -> Frame:
    """Decode and validate one frame.

    Raises:
        MalformedMessage: `data` is no valid frame (the caller counts and drops it).
    """
    return decode_total(_decoder, data)
