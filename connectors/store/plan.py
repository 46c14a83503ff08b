"""The plan of stored values: keys, and values of several units cut by KV groups, heads and layers, and a step's orders
about them. Pure; nothing here touches a store or a pool.
"""

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, repeat
from math import lcm
from operator import itemgetter
from typing import NamedTuple, cast

import msgspec

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import ConnectorConfig, KVConnectorMetadata, TransferKey
from pdkv.connectors.peer.group_entries import entries_to_load
from pdkv.connectors.store import envelope
from pdkv.connectors.transfer.planning import first_seen_block
from pdkv.connectors.transfer.units import UnitPart
from pdkv.errors import ConfigError
from pdkv.wire.kv import KVTerms
from pdkv.wire.tiers import CacheOrder

_SUFFIX = struct.Struct("<IHHHHH8s")  # tokens_per_value, shards, layer groups, shard, layer group, format, signer
_KEY_BYTES = 16


class Cut(NamedTuple):
    """How stored KV is cut, and in which form values are stored. Engines with different cuts do not find each other's
    values.
    """

    tokens_per_value: int
    kv_shards: int
    layer_groups: int
    format: int = 0  # of the envelope; 0: values without one, as before
    signer: bytes = b""  # the secret that signs values; empty: unsigned
    codec: str = ""  # identity of the codec of values; empty: they are images

    def suffix(self, shard: int, group: int) -> bytes:
        """Distinguishes one part of a value's tokens from the others."""
        cut = (self.tokens_per_value, self.kv_shards, self.layer_groups)
        return _SUFFIX.pack(*cut, shard, group, self.format, self.signer) + self.codec.encode()


class Value(NamedTuple):
    """Tokens [start, start + num_tokens) of a request in one KV group; each part of them is stored under `key` + its
    suffix.
    """

    key: bytes  # of the last hash block, or of a transfer's tail; followed by the KV group, from the second one on
    start: int  # a multiple of a whole value's tokens
    num_tokens: int  # fewer than a whole value: a tail, the last unit of which may be partly filled
    group: int = 0

    @property
    def stop(self) -> int:
        """The index after its last token."""
        return self.start + self.num_tokens

    @property
    def num_units(self) -> int:
        """Number of units in the value's image."""
        return -(-self.num_tokens // HASH_BLOCK_SIZE)


_value_of = cast("Callable[[tuple[bytes, int, int, int]], Value]", partial(tuple.__new__, Value))
"""Three times as fast as `Value(…)`."""


class ValuePart(NamedTuple):
    """Heads and layers of values, in one rank's numbering."""

    suffix: bytes
    part: UnitPart
    stage: int  # of a forward pass: loads of several layer groups and KV groups arrive stage by stage
    owned: bool  # this rank writes it; others may hold the same heads
    may_lack: bool = False  # a value without it is whole: the KV of a drafter


class StoreCut:
    """The cut of one rank's KV.

    In a KV group without a window a value has `tokens_per_value` tokens; with a window it is a block, since a hit needs
    exactly the blocks that its next token attends to. A hit ends where a value of every group ends, at multiples of
    `hit_tokens`, or with a hand-off.

    Raises:
        ConfigError: heads, layers or tokens that cannot be cut in this way.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        tokens_per_value: int,
        layer_groups: int,
        signer: bytes = b"",
        codec: str = "",
        num_forms: int = 1,
    ) -> None:
        """`num_forms`: forms of a value, each with its own key; a value that lacks a form is a miss."""
        layout = config.layout
        heads = layout.kv_heads_of_all_ranks
        num_layers = [len(group.layers) for group in layout.groups] or [layout.model_layers]
        if tokens_per_value < HASH_BLOCK_SIZE or tokens_per_value % HASH_BLOCK_SIZE:
            raise ConfigError(f"tokens_per_value must be a multiple of {HASH_BLOCK_SIZE}, got {tokens_per_value}")
        if not 1 <= layer_groups <= min(num_layers):
            of_group = "of the model's smallest KV group" if layout.groups else "the model's layers"
            raise ConfigError(f"layer_groups must be 1 to {min(num_layers)} ({of_group}), got {layer_groups}")
        shards = min(config.kv_shards, heads)  # more ranks than heads: heads are replicated, not cut
        if heads % shards or config.kv_shards % config.tp or config.kv_shards % shards:
            raise ConfigError(f"{heads} KV heads on {config.tp} ranks cannot be cut into {config.kv_shards} shards")
        self.layout = layout
        self.windows = layout.windows
        self.has_windows = any(self.windows)
        self.is_plain = len(self.windows) == 1 and not self.has_windows
        self.cut = Cut(tokens_per_value, shards, layer_groups, envelope.FORMAT, signer, codec)
        self.layer_groups = layer_groups
        self.value_tokens = [layout.block_size if window else tokens_per_value for window in self.windows]
        """For a whole value, by KV group."""
        spacing = lcm(tokens_per_value, layout.block_size)
        self.hit_tokens = spacing if self.has_windows else tokens_per_value
        self.forms = range(num_forms)
        parts = [self.cut.suffix(shard, group) for group in range(layer_groups) for shard in range(shards)]
        self.suffixes = [part + form_suffix(form) for part in parts for form in self.forms]  # of all ranks
        self._bounds = [[i * n // layer_groups for i in range(layer_groups + 1)] for n in num_layers]  # by KV group
        self._places = layout.places
        self._model = config.model
        self.parts = [self._parts_of_rank(config, shards, group) for group in range(layout.num_groups)]
        """Parts of this rank, by KV group and layer group."""
        self.more_parts: list[ValuePart] = []
        """Parts that a value of the first group may have beside them."""
        if layout.drafter:
            part = UnitPart(0, layout.num_kv_heads, layout.model_layers, layout.num_layers)
            suffix, stage = self.cut.suffix(0, 0) + layout.drafter.encode(), self.parts[0][-1].stage
            self.more_parts = [ValuePart(suffix, part, stage, owned=True, may_lack=True)]

    @property
    def num_stages(self) -> int:
        """Number of parts of a load that a forward pass waits for one by one."""
        return self.layer_groups * len(self.parts)

    def _parts_of_rank(self, config: ConnectorConfig, shards: int, kv_group: int) -> list[ValuePart]:
        heads, tp, rank = config.layout.kv_heads_of_all_ranks, config.tp, config.rank
        per_shard = heads // shards
        replicas = max(tp // heads, 1)
        first = rank // replicas * shards // min(tp, heads)
        count = max(shards // tp, 1)
        if count * per_shard != config.layout.num_kv_heads:
            raise ConfigError(
                f"rank {rank} of {tp} has {config.layout.num_kv_heads} of {heads} KV heads, but {shards} shards give "
                f"it {count * per_shard}"
            )
        bounds = self._bounds[kv_group]
        return [
            ValuePart(
                self.cut.suffix(first + i, group),
                UnitPart(i * per_shard, (i + 1) * per_shard, bounds[group], bounds[group + 1]),
                kv_group * self.layer_groups + group,
                rank % replicas == 0,
            )
            for group in range(self.layer_groups)
            for i in range(count)
        ]

    def owned(self, group: int) -> list[ValuePart]:
        """The parts of a KV group's values that this rank writes."""
        return [part for part in self.parts[group] if part.owned]

    def own_keys(self, value: Value) -> list[bytes]:
        """Keys of a value's parts that this rank writes, in all forms; the same number for each value."""
        return [value.key + part.suffix + form_suffix(form) for part in self.owned(value.group) for form in self.forms]

    def stage_that_begins_at(self, layer: int) -> int | None:
        """The stage with this layer of the model as its first."""
        kv_group, index = self._places[layer]
        bounds = self._bounds[kv_group][:-1]
        return kv_group * self.layer_groups + bounds.index(index) if index in bounds else None

    # --- values ---------------------------------------------------------------------------------------------------

    def is_whole(self, value: Value) -> bool:
        """Whether the value can be found by content."""
        return value.num_tokens == self.value_tokens[value.group]

    def whole_of(self, values: Sequence[Value]) -> list[Value]:
        """The values that can be found by content."""
        sizes = self.value_tokens
        return [value for value in values if value.num_tokens == sizes[value.group]]

    def of_group(self, values: Sequence[Value], group: int) -> Sequence[Value]:
        """The values of one KV group."""
        return values if len(self.windows) == 1 else [value for value in values if value.group == group]

    def whole_values(self, block_keys: Sequence[bytes], start: int, stop: int, group: int = 0) -> list[Value]:
        """Whole values of a KV group that end in (start, stop]. `block_keys`: one per hash block of the request."""
        size = self.value_tokens[group]
        keys = self.whole_keys(block_keys, start, stop, group)
        return list(map(_value_of, zip(keys, count(start // size * size, size), repeat(size), repeat(group))))

    def whole_keys(self, block_keys: Sequence[bytes], start: int, stop: int, group: int = 0) -> Sequence[bytes]:
        """The keys of the values that `whole_values` returns, at a fraction of the cost."""
        size = self.value_tokens[group]
        units, suffix = size // HASH_BLOCK_SIZE, _group_suffix(group)
        keys = block_keys[(start // size + 1) * units - 1 : stop // size * units : units]
        return [key + suffix for key in keys] if suffix else keys

    def tails(self, key: TransferKey, num_tokens: int) -> list[Value]:
        """The tokens of a prompt after the last whole value of each KV group; they are found only by their transfer's
        name.
        """
        transfer_id, attempt = key[:2]
        name = f"{len(self._model)}:{self._model}{len(transfer_id)}:{transfer_id}{attempt}".encode()
        digest = hashlib.blake2b(name, digest_size=_KEY_BYTES, person=b"pdkv-tail").digest()
        return [
            Value(digest + _group_suffix(group), num_tokens - length, length, group)
            for group, size in enumerate(self.value_tokens)
            if (length := num_tokens % size)
        ]

    def values_to_load(
        self,
        block_keys: Sequence[bytes],
        start: int,
        stop: int,
        tails: Sequence[Value] = (),
        *,
        windowed: bool | None = None,
    ) -> list[Value]:
        """Values that a load of tokens [start, stop) needs, in the order of their tokens.

        Args:
            tails: the hand-off's tails, if it is read to its end; they lie beyond the last whole value.
            windowed: only values of KV groups with a window (True) or without one (False); None: of all groups.
        """
        values: list[Value] = []
        for group, entries in enumerate(entries_to_load(self.layout, start, stop)):
            if windowed in (None, bool(self.windows[group])):
                size = self.value_tokens[group]
                last = stop if tails else -(-stop // size) * size
                values += self.whole_values(block_keys, entries.start * self.layout.block_size, last, group)
                values += [tail for tail in tails if tail.group == group]
        if len(self.windows) > 1:
            values.sort(key=itemgetter(1))  # by start
        return values

    def last_of_windows(self, block_keys: Sequence[bytes], ends: Sequence[int]) -> list[bytes]:
        """For each end of a hit, a multiple of `hit_tokens`: the key of the last value in the last group's window."""
        suffix = _group_suffix(len(self.windows) - 1)
        return [block_keys[end // HASH_BLOCK_SIZE - 1] + suffix for end in ends]

    def values_to_save(
        self, block_keys: Sequence[bytes], start: int, stop: int, group: int, table: Sequence[int], *, last: bool
    ) -> list[Value]:
        """Whole values that hits can use once tokens [start, stop) are final in a KV group's blocks.

        For a group with a window, only values still in blocks, for hits that end in (start, stop]; with `last` also for
        the hand-off that ends here.
        """
        window, size = self.windows[group], self.layout.block_size
        if not window:
            return self.whole_values(block_keys, start, stop, group)
        there = bisect_left(table, True, key=lambda block_id: block_id >= 0)
        ends = [*range((start // self.hit_tokens + 1) * self.hit_tokens, stop + 1, self.hit_tokens)]
        values: list[Value] = []
        done = 0
        for end in [*ends, stop] if last else ends:
            first = first_seen_block(window, end, size)
            if first >= there:
                values += self.whole_values(block_keys, max(first, done) * size, end, group)
                done = end // size
        return values


def form_suffix(form: int) -> bytes:
    """Distinguishes the forms of a part of a value: empty for the first."""
    return bytes([form]) if form else b""


def _group_suffix(group: int) -> bytes:
    """Distinguishes the KV groups of values: empty for the first."""
    return group.to_bytes(2, "little") if group else b""


# --- a step's orders ----------------------------------------------------------------------------------------------


class StoreLoad(msgspec.Struct):
    """Read the values' tokens [start, stop) into blocks."""

    key: TransferKey
    values: list[Value]  # the first one holds token `start`
    start: int  # a multiple of the block size
    stop: int
    block_tables: list[list[int]]  # by KV group, the first block begins with token `start`; -1: nothing is loaded there
    layerwise: bool = False  # the request computes in this step, after its load
    is_handoff: bool = False  # it is not computed for lack of time
    kv_terms: KVTerms | None = None  # of the reading request


class BlockSpan(NamedTuple):
    """Blocks of a request in one KV group."""

    first_token: int  # of the first block
    block_ids: list[int]


class StoreSave(msgspec.Struct, frozen=True):
    """Write values with tokens that are final in their blocks."""

    key: TransferKey  # a hand-off's transfer, or the batch
    batch: TransferKey
    values: list[Value]
    check: list[Value]  # believed to be stored; written if the store does not have them
    spans: list[BlockSpan]  # by KV group
    last: bool  # the transfer is complete with this save
    replaced: list[bytes] = []  # keys of damaged or expired values: anything still stored is deleted first
    kv_terms: KVTerms | None = None  # terms on which they are kept

    @property
    def is_handoff(self) -> bool:
        """Whether another engine waits for the save."""
        return self.key != self.batch

    @property
    def block_ids(self) -> list[int]:
        """All blocks that the save reads."""
        return [block_id for span in self.spans for block_id in span.block_ids]


class StoreDrop(msgspec.Struct, frozen=True):
    """The end of a hand-off: no more of it is saved, and its tails are deleted."""

    key: TransferKey
    batch: TransferKey  # of the deletion
    tails: list[Value]
    given_up: bool = True  # False: its first token was the last, and values being saved will be found by content


class StoreAhead(NamedTuple):
    """Values that a waiting request will load and no earlier request will."""

    key: TransferKey
    values: list[Value]
    kv_terms: KVTerms | None = None  # of the request


class StoreMetadata(KVConnectorMetadata, kw_only=True):
    """Loads, saves, drops, operators' orders and look-ahead that begin with a step."""

    loads: list[StoreLoad] = msgspec.field(default_factory=list)
    saves: list[StoreSave] = msgspec.field(default_factory=list)
    drops: list[StoreDrop] = msgspec.field(default_factory=list)
    orders: list[CacheOrder] = msgspec.field(default_factory=list)
    ahead: list[StoreAhead] = msgspec.field(default_factory=list)  # to be prefetched and kept
    passed: list[StoreAhead] = msgspec.field(default_factory=list)  # previous ones that are no longer wanted
