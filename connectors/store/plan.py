"""What a store connector keeps under which key: values of several units, cut by KV heads and layers, and a step's
orders about them. Pure; nothing here touches a store or a pool.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pdkv.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import ConnectorConfig, KVConnectorMetadata, TransferKey
from pdkv.connectors.store import envelope
from pdkv.connectors.transfer.units import UnitPart
from pdkv.errors import ConfigError

_SUFFIX = struct.Struct("<IHHHHH8s")  # tokens_per_value, shards, groups, shard, group, format, signer
_KEY_BYTES = 16


class Cut(NamedTuple):
    """How stored KV is cut, and into which form of value. Engines that do it differently miss each other."""

    tokens_per_value: int
    kv_shards: int
    layer_groups: int
    format: int = 0  # of the envelope; 0: values without one, as they were before
    signer: bytes = b""  # which secret values are signed with; empty: unsigned

    def suffix(self, shard: int, group: int) -> bytes:
        """What tells one part of a value's tokens from the others."""
        cut = (self.tokens_per_value, self.kv_shards, self.layer_groups)
        return _SUFFIX.pack(*cut, shard, group, self.format, self.signer)


class Value(NamedTuple):
    """Tokens [start, start + num_tokens) of a request; every part of them is stored under `key` + its suffix."""

    key: bytes  # of the last hash block, or of a transfer's tail
    start: int  # a multiple of tokens_per_value
    num_tokens: int  # fewer than tokens_per_value: a tail, whose last unit may be partly filled

    @property
    def stop(self) -> int:
        """The token behind the last one."""
        return self.start + self.num_tokens

    @property
    def num_units(self) -> int:
        """Units of its image."""
        return -(-self.num_tokens // HASH_BLOCK_SIZE)


class ValuePart(NamedTuple):
    """Heads and layers of values, as one rank sees them."""

    suffix: bytes
    part: UnitPart
    group: int
    owned: bool  # this rank writes it; others may hold the same heads


class StoreCut:
    """The cut of one rank's KV.

    Raises:
        ConfigError: heads, layers or tokens that cannot be cut so.
    """

    def __init__(
        self, config: ConnectorConfig, *, tokens_per_value: int, layer_groups: int, signer: bytes = b""
    ) -> None:
        layout = config.layout
        heads, layers = layout.kv_heads_of_all_ranks, layout.num_layers
        if tokens_per_value < HASH_BLOCK_SIZE or tokens_per_value % HASH_BLOCK_SIZE:
            raise ConfigError(f"tokens_per_value must be a multiple of {HASH_BLOCK_SIZE}, got {tokens_per_value}")
        if not 1 <= layer_groups <= layers:
            raise ConfigError(f"layer_groups must be 1 to {layers} (the model's layers), got {layer_groups}")
        shards = min(config.kv_shards, heads)  # more ranks than heads: heads are replicated, not cut
        if heads % shards or config.kv_shards % config.tp or config.kv_shards % shards:
            raise ConfigError(f"{heads} KV heads on {config.tp} ranks cannot be cut into {config.kv_shards} shards")
        self.cut = Cut(tokens_per_value, shards, layer_groups, envelope.FORMAT, signer)
        self.tokens_per_value = tokens_per_value
        self.layer_groups = layer_groups
        self.suffixes = [self.cut.suffix(s, g) for g in range(layer_groups) for s in range(shards)]  # of all ranks
        self._bounds = [group * layers // layer_groups for group in range(layer_groups + 1)]
        self._model = config.model
        self.parts = self._parts_of_rank(config, shards)
        """Of this rank, by layer group."""

    def _parts_of_rank(self, config: ConnectorConfig, shards: int) -> list[ValuePart]:
        heads, tp, rank = config.layout.kv_heads_of_all_ranks, config.tp, config.rank
        per_shard = heads // shards
        replicas = max(tp // heads, 1)
        first = rank // replicas * shards // min(tp, heads)
        count = max(shards // tp, 1)
        if count * per_shard != config.layout.num_kv_heads:
            raise ConfigError(
                f"rank {rank} of {tp} has {config.layout.num_kv_heads} of {heads} KV heads, {shards} shards give it "
                f"{count * per_shard}"
            )
        return [
            ValuePart(
                self.cut.suffix(first + i, group),
                UnitPart(i * per_shard, (i + 1) * per_shard, self._bounds[group], self._bounds[group + 1]),
                group,
                rank % replicas == 0,
            )
            for group in range(self.layer_groups)
            for i in range(count)
        ]

    def group_that_begins_at(self, layer: int) -> int | None:
        """The layer group whose first layer this is."""
        return self._bounds.index(layer) if layer in self._bounds[:-1] else None

    def whole_values(self, block_keys: Sequence[bytes], start: int, stop: int) -> list[Value]:
        """Whole values that end in (start, stop]. `block_keys`: one per hash block of the request."""
        size, units = self.tokens_per_value, self.tokens_per_value // HASH_BLOCK_SIZE
        last = min(stop // size, len(block_keys) // units)
        return [Value(block_keys[(i + 1) * units - 1], i * size, size) for i in range(start // size, last)]

    def tail(self, key: TransferKey, num_tokens: int) -> Value | None:
        """The tokens of a prompt behind its last whole value; found by their transfer only. None: there are none."""
        length = num_tokens % self.tokens_per_value
        if not length:
            return None
        transfer_id, attempt = key
        name = f"{len(self._model)}:{self._model}{len(transfer_id)}:{transfer_id}{attempt}".encode()
        digest = hashlib.blake2b(name, digest_size=_KEY_BYTES, person=b"pdkv-tail").digest()
        return Value(digest, num_tokens - length, length)


# --- a step's orders ----------------------------------------------------------------------------------------------


class StoreLoad(msgspec.Struct):
    """Read the values' tokens [start, stop) into blocks."""

    key: TransferKey
    values: list[Value]  # the first one holds token `start`
    start: int  # a multiple of the block size
    stop: int
    block_ids: list[int]  # the first one begins with token `start`
    layerwise: bool = False  # the request computes in this step, behind its load


class StoreSave(msgspec.Struct, frozen=True):
    """Write values whose tokens are in their blocks for good."""

    key: TransferKey  # a hand-off's transfer, or the batch
    batch: TransferKey
    values: list[Value]
    check: list[Value]  # believed to be stored; written where the store does not have them
    first_token: int
    block_ids: list[int]  # the first one begins with first_token
    last: bool  # the transfer is complete with this save
    replaced: list[bytes] = []  # keys of values that were damaged: what may still be there goes first


class StoreDrop(msgspec.Struct, frozen=True):
    """A hand-off is over: nothing more of it is saved, and its tail is deleted."""

    key: TransferKey
    tail: Value | None


class StoreMetadata(KVConnectorMetadata, kw_only=True):
    """Loads, saves and drops that begin with a step."""

    loads: list[StoreLoad] = msgspec.field(default_factory=list)
    saves: list[StoreSave] = msgspec.field(default_factory=list)
    drops: list[StoreDrop] = msgspec.field(default_factory=list)
