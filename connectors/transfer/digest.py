"""Digests of KV in a rank's pool, equal to those of the same KV anywhere else.

A cell is the K and V of one KV head of one layer for the tokens of a hash block. Its digest is seeded with layer and
head, as all ranks count them, and digests of cells add up modulo 2^64. So a hash block's digest depends neither on
block size and number of ranks, nor on how a transfer is cut by layers, heads and tokens.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import TransferKey
from pdkv.connectors.transfer.planning import Bytes, Ids, as_ids, rank_heads
from pdkv.connectors.transfer.pool_copy import COPY_BYTES, Pieces
from pdkv.connectors.transfer.units import COPY_TIMEOUT_S, UnitPart
from pdkv.kernels.digest import Digests, add_digests, available, mix, seeds_of
from pdkv.kernels.host import Rows
from pdkv.kernels.stream import StreamArgs
from pdkv.kernels.streams import streams_of
from pdkv.wire.kv import KVLayout

if TYPE_CHECKING:
    import torch

WORD_BYTES = 8
MAX_BYTES = 8 << 10
"""The most bytes of a piece's digests, since messages are limited."""


class Tokens(NamedTuple):
    """Tokens in order, cut at hash blocks: the first may have only its end, the last only its beginning."""

    units: Ids  # block * units_per_block + position in the block
    skipped: Ids  # earlier tokens of each unit
    counts: Ids  # number of meant tokens of each unit

    def at(self, index: Any) -> "Tokens":
        """A selection of the units: `index` as of an array."""
        return Tokens(*(column[index] for column in self))


def unit_tokens(block_size: int) -> int:
    """Tokens covered by one digest: a hash block's, unless blocks are smaller."""
    return gcd(HASH_BLOCK_SIZE, block_size)


def cut_tokens(block_ids: Sequence[int] | Ids, block_size: int, start: int, stop: int, *, first: int) -> Tokens:
    """Tokens [start, stop) in a pool.

    Args:
        block_ids: the first of them holds token `first`, possibly as its last one.
    """
    size = unit_tokens(block_size)
    positions = np.arange(start // size, -(-stop // size), dtype=np.int64)
    begin = np.maximum(positions * size, start)
    in_table = positions - first // block_size * (block_size // size)
    blocks, places = np.divmod(in_table, block_size // size)
    units = as_ids(block_ids)[blocks] * (block_size // size) + places
    return Tokens(units, begin - positions * size, np.minimum((positions + 1) * size, stop) - begin)


class PoolDigests:
    """Makes digests of a rank's pool. Threads may share it.

    Args:
        kv_cache: of `layout`'s shape, contiguous; a tensor on any device, or an array.
        layout: the pool's layout; `rank` of `tp` says which of the model's heads it has.
    """

    def __init__(self, kv_cache: Any, layout: KVLayout, *, rank: int = 0, tp: int = 1) -> None:
        num_bytes = kv_cache.nbytes
        if num_bytes != len(kv_cache) * layout.block_bytes:
            raise ValueError(f"{len(kv_cache)} blocks of {layout.block_bytes} bytes do not match a pool of {num_bytes}")
        self.layout = layout
        self.unit_tokens = unit_tokens(layout.block_size)
        self.first_head = rank_heads(rank, tp, layout.kv_heads_of_all_ranks).start
        self._token_bytes = layout.row_bytes
        self.flat: Bytes | None = None
        self._words: torch.Tensor | None = None
        if isinstance(kv_cache, np.ndarray):
            self.flat = kv_cache.reshape(-1).view(np.uint8)
        elif streams_of(kv_cache.device).is_host:
            import torch

            self.flat = kv_cache.view(-1).view(torch.uint8).numpy()
        else:
            import torch

            self._words = kv_cache.view(-1).view(torch.int64)
            self._streams = streams_of(kv_cache.device)
            self._stream = self._streams.make_stream()
        available()  # the library is loaded here, not in the middle of a step

    @property
    def on_device(self) -> bool:
        """Whether an asynchronous device computes the digests."""
        return self.flat is None

    @property
    def whole(self) -> UnitPart:
        """All heads and layers of this rank, but for a drafter's."""
        return UnitPart(0, self.layout.num_kv_heads, 0, self.layout.model_layers)

    def unit_bytes(self, part: UnitPart) -> int:
        """Bytes of a part of one unit."""
        return self.layout.sides * part.num_layers * part.num_heads * self.unit_tokens * self._token_bytes

    def digests(self, tokens: Tokens, part: UnitPart) -> Digests:
        """Digests by unit and head of the part, (n, heads), summed over the part's layers. Writes must have been
        awaited.
        """
        if self.flat is None:
            return self._device_digests(tokens, part)
        offsets, sizes = self._offsets(tokens, part), tokens.counts * self._token_bytes
        result = np.zeros((tokens.units.size, part.num_heads), dtype=np.uint64)
        add_digests(result, self._seeds(part), self.flat, offsets, self._rows(part), sizes=sizes)
        return result

    def compile_kernels(self) -> None:
        """Compile a device's kernel now, so that no transfer waits for that."""
        if self.flat is None:
            first = as_ids([0])
            self.digests(Tokens(first, first, as_ids([self.unit_tokens])), self.whole)

    def begin(self, tokens: Tokens, part: UnitPart, key: TransferKey, first_token: int) -> "PieceDigests":
        """Begin digests of a piece that is about to move out of this pool, or into it."""
        return PieceDigests(self, tokens, part, key, first_token)

    def copy(
        self,
        tokens: Tokens,
        part: UnitPart,
        source: Bytes,
        pieces: Pieces,
        check: Callable[[], None],
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Digests:
        """Copy units out of another pool into this one, and return the digests of `tokens` as they arrive here.

        Args:
            tokens: tokens of this pool to digest; all tokens of each unit are copied in any case.
            source: the other pool's bytes.
            pieces: those units in both pools, of one size, as `unit_pieces` has them.
            check: called now and then.
            guard: a context around each write.

        Raises:
            TransferError: a piece is not within its pool; nothing is copied. Also raises what `check` and `guard`
                raise.
        """
        assert self.flat is not None
        pieces.check(self.flat.nbytes, source.nbytes)
        digests, first = [np.zeros((0, part.num_heads), dtype=np.uint64)], 0
        for some in pieces.cut(COPY_BYTES):
            check()
            cut = slice(first, first + some.target.size)
            first = cut.stop
            with guard():
                digests.append(self.copy_pieces(tokens.at(cut), part, source, some))
        return np.concatenate(digests)

    def copy_pieces(self, tokens: Tokens, part: UnitPart, source: Bytes, pieces: Pieces) -> Digests:
        """Copy as many of the pieces as one call can. The caller has checked the bounds."""
        assert self.flat is not None
        digests = np.zeros((tokens.units.size, part.num_heads), dtype=np.uint64)
        add_digests(
            digests, self._seeds(part), source, np.ascontiguousarray(pieces.source), pieces.rows,
            sizes=tokens.counts * self._token_bytes, target=self.flat,
            target_offsets=np.ascontiguousarray(pieces.target),
        )  # fmt: skip
        return digests

    def _seeds(self, part: UnitPart) -> Digests:
        return _seeds(self.first_head, self.layout.sides, part)

    def _offsets(self, tokens: Tokens, part: UnitPart) -> Ids:
        """The offset of the first row of each unit's part, in bytes."""
        layout, size = self.layout, self._token_bytes
        blocks, places = np.divmod(tokens.units, layout.block_size // self.unit_tokens)
        head_bytes = layout.block_size * size
        first = (part.layer_start * layout.sides * layout.num_kv_heads + part.head_start) * head_bytes
        return blocks * layout.block_bytes + (places * self.unit_tokens + tokens.skipped) * size + first

    def _rows(self, part: UnitPart) -> Rows:
        head_bytes = self.layout.block_size * self._token_bytes
        side_bytes, row_bytes = self.layout.num_kv_heads * head_bytes, self.unit_tokens * self._token_bytes
        outer = self.layout.sides * part.num_layers
        return Rows(outer, side_bytes, side_bytes, part.num_heads, head_bytes, head_bytes, row_bytes)

    def queue(self, tokens: Tokens, part: UnitPart) -> "QueuedDigests":
        """As `digests`, for a pool on a device, after the work on its current stream, which may write the KV. Does not
        wait.
        """
        import torch

        from pdkv.kernels.digest_triton import digests_triton
        from pdkv.kernels.upload import to_tensor

        words, rows, seeds = self._words, self._rows(part), self._seeds(part).view(np.int64)
        assert words is not None
        offsets, sizes = self._offsets(tokens, part), tokens.counts * self._token_bytes
        begins, counts, keys = (
            to_tensor(array, words.device) for array in (offsets // WORD_BYTES, sizes // WORD_BYTES, seeds)
        )
        strides = (rows.source_outer_stride // WORD_BYTES, rows.source_inner_stride // WORD_BYTES)
        digests = digests_triton(words, begins, counts, keys, strides, rows.row_bytes // WORD_BYTES)
        result = self._streams.make_pinned(digests.nbytes).view(torch.int64).view(digests.shape)
        result.copy_(digests, non_blocking=True)
        return QueuedDigests(result)

    def _device_digests(self, tokens: Tokens, part: UnitPart) -> Digests:
        done = self._streams.make_event()
        with self._stream.on():
            queued = self.queue(tokens, part)
            done.record()
        done.synchronize(COPY_TIMEOUT_S)
        return queued.read()


class QueuedDigests(NamedTuple):
    """Digests that a device is computing."""

    result: "torch.Tensor"  # (n, heads) int64, in host memory

    def read(self) -> Digests:
        """Read the digests, once the stream's work has been awaited."""
        return self.result.numpy().view(np.uint64)


@lru_cache(maxsize=1024)
def _seeds(first_head: int, sides: int, part: UnitPart) -> Digests:
    """Seeds of the rows of a part, with heads counted from `first_head` of the model on."""
    heads = range(first_head + part.head_start, first_head + part.head_stop)
    return seeds_of(range(part.layer_start, part.layer_stop), heads, sides)


class PieceDigests:
    """Digests of one piece: made by the kernel that moves it, while it is in the cache, or at the end."""

    def __init__(self, pool: PoolDigests, tokens: Tokens, part: UnitPart, key: TransferKey, first_token: int) -> None:
        self.in_kernel = True  # may be made while the piece moves
        self.tokens = tokens
        self.pool = pool
        self._part = part
        self._key = key
        self._first_token = first_token
        self._digests: Digests | None = None
        self._kept: tuple[Ids, Ids, Digests] | None = None  # objects that the kernel has pointers to

    def fill(self, args: StreamArgs, first: int, count: int, per_step: int) -> None:
        """Have the kernel digest units [first, first + count), `per_step` at a time. Host memory only."""
        if not self.in_kernel:
            return
        if self._kept is None:
            offsets, sizes = (self.pool._offsets(self.tokens, self._part), self.tokens.counts * self.pool._token_bytes)
            self._kept = offsets, sizes, self.pool._seeds(self._part)
            self._digests = np.zeros((offsets.size, self._part.num_heads), dtype=np.uint64)
        assert self._digests is not None
        (offsets, sizes, seeds), rows = self._kept, self.pool._rows(self._part)
        args.digests, args.seeds = self._digests[first:].ctypes.data, seeds.ctypes.data
        args.sizes, args.offsets = sizes[first:].ctypes.data, offsets[first:].ctypes.data
        args.num_units, args.units_per_step = max(min(count, offsets.size - first), 0), per_step
        args.outer, args.outer_stride, args.inner = rows.outer, rows.source_outer_stride, rows.inner
        args.inner_stride, args.row_bytes = rows.source_inner_stride, rows.row_bytes

    def take(self, digests: Digests) -> None:
        """Take digests that were made while the piece moved."""
        self._digests = digests

    def make(self) -> Digests:
        """Make the digests that no kernel has made."""
        if self._digests is None:
            self._digests = self.pool.digests(self.tokens, self._part)
        return self._digests

    def finish(self) -> bytes:
        """The digests in their transfer format."""
        bound = bind(self.make(), self._key, self._first_token, self.pool.unit_tokens)
        return bound if len(bound) <= MAX_BYTES else xxhash.xxh3_128_digest(bound)


def bind(digests: Digests, key: TransferKey, start: int, size: int) -> bytes:
    """Digests of a piece in their transfer format: 8 bytes for each hash block, bound to its transfer and its place in
    it.

    Args:
        digests: (n, heads), for tokens from `start` on.
        size: tokens per unit.
    """
    transfer_id, attempt = key[:2]
    name = xxhash.xxh3_64_intdigest(transfer_id.encode(), seed=attempt)
    places = np.arange(start // size, start // size + len(digests), dtype=np.uint64)
    return mix(digests.sum(axis=1, dtype=np.uint64) + mix(places + np.uint64(name))).tobytes()
