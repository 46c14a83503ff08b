"""KV events in the form in which vLLM publishes them: MessagePack, as maps; SGLang and earlier vLLMs send arrays."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pdkv.wire.decoding import decode_total
from pdkv.wire.types import MAX_LIST, TokenIds

BlockHash = Annotated[bytes, Meta(max_length=64)] | int
"""A server's own name of a block."""

Hashes = Annotated[list[BlockHash], Meta(max_length=MAX_LIST)]


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """A chain of blocks entered the cache. `extra_keys`: what the hash of each covers besides tokens."""

    block_hashes: Hashes
    parent_block_hash: BlockHash | None
    token_ids: TokenIds
    block_size: Annotated[int, Meta(ge=1, lt=2**31)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """These blocks left the cache."""

    block_hashes: Hashes
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The cache is empty."""


class _StoredRow(BlockStored, tag="BlockStored", array_like=True):
    pass


class _RemovedRow(BlockRemoved, tag="BlockRemoved", array_like=True):
    pass


class _ClearedRow(AllBlocksCleared, tag="AllBlocksCleared", array_like=True):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    """The events of one step."""

    ts: float  # seconds since 1970
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


VllmEvent = BlockStored | BlockRemoved | AllBlocksCleared

_batches = msgspec.msgpack.Decoder(Batch)
_maps = msgspec.msgpack.Decoder(VllmEvent)
_rows = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)


def decode_batch(payload: bytes) -> list[VllmEvent]:
    """The events in a payload. Raises MalformedMessage."""
    return [_decode(bytes(event)) for event in decode_total(_batches, payload).events]


def _decode(event: bytes) -> VllmEvent:
    is_map = event[:1] < b"\x90" or event[:1] in (b"\xde", b"\xdf")
    decoded: VllmEvent = decode_total(_maps if is_map else _rows, event)
    return decoded
