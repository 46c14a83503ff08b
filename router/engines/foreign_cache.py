"""What a server of another engine has cached: its blocks, hashed anew from the tokens in its KV events. No I/O."""

from collections.abc import Callable, Iterator, Sequence

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.errors import MalformedMessage
from pdkv.kernels.block_keys import KEY_BYTES, keys_behind
from pdkv.router.engines import vllm_events as theirs
from pdkv.wire.messages import BlockRemoved, BlockStored, CacheCleared, KVEvent

MAX_KEYS = 1 << 20
"""Most keys that are known of one server, whatever it reports: 200 MB."""

_KEYS_PER_EVENT = 1 << 14
_FASTEST = (None, "GPU")  # memory, which a server on a CPU calls so, too
_WHOLE = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Kinds of layers that need all of a prefix: blocks of windows and states are no prefix."""


class ForeignCache:
    """The blocks of one server by its own hashes. It may lie: what it says costs memory up to a limit, and hits."""

    def __init__(self, root_of: Callable[[str], bytes | None], max_keys: int) -> None:
        """`root_of`: the parent of the first key of a chain with this cache salt; None: no request has that salt."""
        self.num_excess = 0  # blocks for which there was no room
        self._root_of = root_of
        self._most = min(max_keys, MAX_KEYS)
        self.num_keys = 0
        self._blocks: dict[tuple[int | None, bytes | int], bytes] = {}  # (group, hash) -> its keys

    @property
    def is_empty(self) -> bool:
        """Whether it holds no block."""
        return not self._blocks

    def clear(self) -> list[KVEvent]:
        """Forget everything."""
        self._blocks.clear()
        self.num_keys = 0
        return [CacheCleared()]

    def snapshot(self) -> list[KVEvent]:
        """All that it holds."""
        keys = [key for block in self._blocks.values() for key in _cut(block)]
        starts = range(0, len(keys), _KEYS_PER_EVENT)
        return [CacheCleared(), *(BlockStored(keys[start : start + _KEYS_PER_EVENT], None) for start in starts)]

    def take(self, payload: bytes) -> list[KVEvent]:
        """The changes by one batch. Raises MalformedMessage; the cache is then to be cleared."""
        return [change for event in theirs.decode_batch(payload) for change in self._changes(event)]

    def _changes(self, event: theirs.VllmEvent) -> Sequence[KVEvent]:
        match event:
            case theirs.BlockStored():
                return self._store(event)
            case theirs.BlockRemoved() if event.medium in _FASTEST:
                blocks = (self._blocks.pop((event.group_idx, block), b"") for block in event.block_hashes)
                keys = [key for block in blocks for key in _cut(block)]
                self.num_keys -= len(keys)
                return [BlockRemoved(keys)] if keys else ()
            case theirs.BlockRemoved():
                return ()
            case _:
                return self.clear()

    def _store(self, event: theirs.BlockStored) -> Sequence[KVEvent]:
        hashes, size = event.block_hashes, event.block_size
        if len(event.token_ids) != size * len(hashes):
            raise MalformedMessage(f"{len(event.token_ids)} tokens in {len(hashes)} blocks of {size}")
        parent, num_blocks = self._parent(event), self._num_usable(event)
        if parent is None or not num_blocks:
            return ()
        keys = keys_behind(parent, event.token_ids[: num_blocks * size], hash_block_size=HASH_BLOCK_SIZE)
        per_block = size // HASH_BLOCK_SIZE
        new = [
            key
            for i in range(num_blocks)
            for key in self._add((event.group_idx, hashes[i]), keys[i * per_block : (i + 1) * per_block])
        ]
        return [BlockStored(new, None)] if new else ()

    def _parent(self, event: theirs.BlockStored) -> bytes | None:
        """The key before the event's first one; None: it is not known."""
        if event.parent_block_hash is not None:
            return self._blocks.get((event.group_idx, event.parent_block_hash), b"")[-KEY_BYTES:] or None
        match (event.extra_keys or [None])[0]:
            case None:
                return self._root_of("")
            case [str(salt)]:
                return self._root_of(salt)
        return None

    def _num_usable(self, event: theirs.BlockStored) -> int:
        """How many of the first blocks are a text's alone, in the server's fastest memory."""
        of_adapter = event.lora_id is not None or event.lora_name is not None
        if of_adapter or event.medium not in _FASTEST or event.kv_cache_spec_kind not in _WHOLE:
            return 0
        if event.block_size % HASH_BLOCK_SIZE:
            return 0
        extras = event.extra_keys or []
        first = 1 if event.parent_block_hash is None else 0  # a salt stands in a chain's first block
        return next((i for i, extra in enumerate(extras) if extra and i >= first), len(event.block_hashes))

    def _add(self, block: tuple[int | None, bytes | int], keys: Sequence[bytes]) -> Sequence[bytes]:
        """Note a block; returns those of its keys that are new."""
        if block in self._blocks:
            return ()
        if len(keys) > self._most - self.num_keys:
            self.num_excess += 1
            return ()
        self._blocks[block] = b"".join(keys)
        self.num_keys += len(keys)
        return keys


def _cut(keys: bytes) -> Iterator[bytes]:
    return (keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES))
