"""KV between processes: its layout, the card of an engine that has some, a hand-off, and the terms of storage."""

import hashlib
import struct
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdkv.wire.types import MAX_BLOB_BYTES, Attempt, Blob, Id, KVOwner, Message, Natural, Size, Text

Order = Literal["prefill_first", "concurrent", "needs_peer_first", "decode_first"]
ConnectorKind = Literal["store", "pull", "push"]
ChecksumMode = Literal["off", "sample", "on"]
LayoutKind = Literal["heads", "windows", "latent", "state", "drafter"]
Positions = Literal["rotated", "none"]

MAX_RANKS = 1024
"""Most ranks of one engine."""

MAX_LAYERS = 4096
"""Most layers of a model, and so most KV groups."""

MAX_KV_TTL_S = 10**9
"""Longest life of stored KV: some 30 years, which any clock can add to its time."""

MAX_KV_QUOTA_BYTES = 2**53

RoleName = Annotated[str, Meta(pattern="^(prefill|decode|any)$")]
KVScale = Annotated[float, Meta(gt=0.0, le=1e38)]


class KVTerms(msgspec.Struct, frozen=True):
    """Terms on which a request's KV is kept below the engines' own pools. Routers set them, clients cannot."""

    owner: KVOwner  # digest of its owner
    ttl_s: Annotated[int, Meta(ge=1, le=MAX_KV_TTL_S)] | None = None  # seconds from its write on; None: no expiry
    # The most bytes of a rank's host memory for the owner's values; None: no limit.
    quota_bytes: Annotated[int, Meta(ge=1, le=MAX_KV_QUOTA_BYTES)] | None = None


class KVGroup(msgspec.Struct, frozen=True):
    """Layers with KV in the same blocks: one block table per request and group (docs/kv-groups.md)."""

    layers: Annotated[tuple[Natural, ...], Meta(max_length=MAX_LAYERS)]  # the model's, in the order of a block's layers
    window: Natural = 0  # tokens that a query sees, including its own: blocks before them may be given up; 0: all
    state: bool = False  # a block is one page, the state after its last token, and not rows of tokens; the window is 2


class KVLayout(msgspec.Struct, frozen=True):
    """Shape of one rank's KV cache: (num_blocks, num_layers, sides, num_kv_heads, block_size, head_size), block-major.

    The parts that two ranks exchange, and their sizes, are computed here: no other code multiplies by sides or heads to
    find a byte.
    """

    num_layers: Size  # of a block; with several groups fewer than the model's, and some may be unused
    num_kv_heads: Size  # of this rank; a latent row is one, which all ranks have
    head_size: Size  # numbers of a token's row: of one layer, side and head
    block_size: Size  # tokens per block
    dtype: Id  # torch's name, such as "bfloat16"
    dtype_bytes: Size
    total_kv_heads: Natural = 0  # of all ranks together, each head counted once; 0: num_kv_heads
    groups: Annotated[tuple[KVGroup, ...], Meta(max_length=MAX_LAYERS)] = ()  # empty: one, of all layers, no window
    # By layer of the model, the value of 1.0 in K and in V that are stored in FP8; empty: 1.0 everywhere.
    kv_scales: Annotated[tuple[tuple[KVScale, KVScale], ...], Meta(max_length=MAX_LAYERS)] = ()
    codec: Text = ""  # lossy codecs that KV may have gone through in a store, by identity; empty: KV is exact
    sides: Annotated[int, Meta(ge=1, le=2)] = 2  # K and V; 1: one latent row
    positions: Positions = "rotated"  # where K carries positions
    drafter: Text = ""  # identity of the smaller model whose KV lies in a block's last layers; empty: there is none
    drafter_layers: Natural = 0  # of `num_layers`, those with its KV, token by token (docs/speculation.md)

    @property
    def kinds(self) -> tuple[LayoutKind, ...]:
        """The properties that a connector must support to carry this KV, by their names in plans."""
        kinds: tuple[LayoutKind, ...] = ("heads",) if self.sides == 2 else ("latent",)
        kinds = (*kinds, "windows") if any(self.windows) else kinds
        kinds = (*kinds, "state") if any(group.state for group in self.groups) else kinds
        return (*kinds, "drafter") if self.drafter else kinds

    @property
    def model_layers(self) -> int:
        """Layers of a block with the served model's KV: the first ones."""
        return self.num_layers - self.drafter_layers

    def layers_shared_with(self, peer: "KVLayout") -> int:
        """The first layers of a block that are exchanged with an engine of that layout."""
        are_alike = (self.drafter, self.drafter_layers) == (peer.drafter, peer.drafter_layers)
        return self.num_layers if are_alike else self.model_layers

    @property
    def windows(self) -> tuple[int, ...]:
        """For each group, the window of its layers; 0: they attend to all tokens."""
        return tuple(group.window for group in self.groups) or (0,)

    @property
    def num_groups(self) -> int:
        """Block tables of a request."""
        return max(len(self.groups), 1)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each layer of the model, its group and its index in the group's blocks."""
        if not self.groups:
            return tuple((0, layer) for layer in range(self.model_layers))
        by_layer = {layer: (g, i) for g, group in enumerate(self.groups) for i, layer in enumerate(group.layers)}
        return tuple(by_layer[layer] for layer in range(len(by_layer)))

    @property
    def scales(self) -> tuple[tuple[float, float], ...]:
        """For each layer of the model, the scales of K and of V."""
        return self.kv_scales or ((1.0, 1.0),) * len(self.places)

    @property
    def kv_heads_of_all_ranks(self) -> int:
        """KV heads of the model, each counted once however many ranks hold it."""
        return self.total_kv_heads or self.num_kv_heads

    def pool_shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """Shape of a pool with this many blocks."""
        return (num_blocks, self.num_layers, self.sides, self.num_kv_heads, self.block_size, self.head_size)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer, side and head."""
        return self.head_size * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers and sides."""
        return self.num_layers * self.sides * self.num_kv_heads * self.block_size * self.row_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a block."""
        return self.block_bytes // self.num_layers

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers and sides."""
        return self.block_bytes // self.block_size

    @property
    def identity(self) -> str:
        """The properties that two engines must share to exchange KV. TP is left out on purpose, and the block size if
        there are no groups: with a window, what can be found depends on it. The drafter is left out, too: its KV is
        sent where both have the same one. Scales are included as a digest: there are two for each layer.
        """
        identity = f"layers={self.model_layers},head_size={self.head_size},dtype={self.dtype},k={self.positions}"
        if self.sides != 2:
            identity += f",sides={self.sides}"
        if self.kv_scales:
            numbers = [number for scales in self.kv_scales for number in scales]
            digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}d", *numbers), digest_size=8).hexdigest()
            identity += f",kv_scales={digest}"
        if self.codec:
            identity += f",codec={self.codec}"
        if not self.groups:
            return identity
        groups = "+".join(
            f"{','.join(map(str, group.layers))}@{group.window}{'s' * group.state}" for group in self.groups
        )
        return f"{identity},block_size={self.block_size},groups={groups}"


class EngineCard(Message, frozen=True):
    """The public description of an engine when it is ready; the router distributes cards to peers."""

    engine: Id  # name, unique in a deployment, such as "prefill-0"
    epoch: Id  # one incarnation of that name
    role: RoleName  # only a default for the router's policy
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
    rank_blobs: Annotated[list[Blob], Meta(max_length=MAX_RANKS)] = []  # data by which each rank's connector is reached
    rank_pids: Annotated[list[Natural], Meta(max_length=MAX_RANKS)] = []  # per rank; the first is `pid`
    beats: Text = ""  # ZeroMQ endpoint of its Beats; of tcp:// only the port counts; "": it sends none
    max_num_batched_tokens: Natural = 0  # of its largest step; 0: not known
    version: Id = ""  # version of pdkv, for people
    wire_versions: Annotated[dict[Id, Natural], Meta(max_length=64)] = {}  # wire version of each connector in it
    kv_checksum: ChecksumMode = "off"  # the hand-offs that have digests
    lends: bool = False  # it lends its cached KV, and reads others' (docs/kv-hierarchy.md)
    draws: Natural = 1  # version of its draws: those of equal ones draw the same tokens with the same seed
    platform: Annotated[dict[Id, Text], Meta(max_length=64)] = {}  # versions of what it runs on, by name
    alike: Annotated[
        list[Id], Meta(max_length=64)
    ] = []  # those that must be equal where KV passes, up to the second dot
    profiles: bool = False  # it takes orders for profiles
    peer_changes: bool = False  # it takes Peers that name only what has changed
    backend: Id = ""  # the kind of another engine's server (docs/other-engines.md); "": one of pdkv's
    lacks: Annotated[list[Id], Meta(max_length=64)] = []  # fields of requests that it cannot take
    reads_parts: bool = False  # it takes hand-offs of a prompt's parts; others would take one for the whole

    @property
    def holds_two(self) -> bool:
        """Whether its pool holds two requests of the longest length at once."""
        blocks = -(-self.max_model_len // self.layout.block_size) * self.layout.num_groups
        return 2 * blocks <= self.num_blocks


class KVHandoff(Message, frozen=True):
    """Where the KV of a prompt is after prefill; prefill engine -> router -> decode engine."""

    request_id: Id
    attempt: Attempt
    transfer_id: Id
    engine: Id
    epoch: Id
    num_tokens: Natural  # prompt + output tokens with available KV
    payload: Blob  # msgpack, the connector's own, at most MAX_BLOB_BYTES
    # a loan out of the engine's cache, for the transfer's prompt: not computed by the prompt's engine
    lent: bool = False
    more: bool = False  # the rest of the prompt is being computed: another hand-off follows
    start: Natural = 0  # with `more`: earlier ones have named the tokens before it

    def joined(self, part: "KVHandoff") -> "KVHandoff":
        """All that the next hand-off and this one name of a prompt; the next one as it is if it does not follow, or if
        both together are too long.
        """
        payload = self.payload + part.payload
        follows = part.start > 0 and (self.num_tokens, self.engine, self.epoch) == (part.start, part.engine, part.epoch)
        if not (follows and self.more and part.more) or len(payload) > MAX_BLOB_BYTES:
            return part
        return msgspec.structs.replace(part, start=self.start, payload=payload)
