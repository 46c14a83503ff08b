"""Damage on the way, for the kit and for tests of any transport that carries digests (docs/kv-integrity.md).

A transport sends the content of the source's blocks at the time it reads them. So damage is done there, after the
digest: as soon as a digest of some tokens has been made, their memory is changed. To the reader that looks like a
flipped bit or a misplaced block on the way. A pull reads as soon as it is told of a hand-off, so the source's digests
are made at once by the step that reports the blocks' content, which must come before the load. For a push or a pull,
and any transport, the call is the same:

    damage = Damage(source_worker, "flip", seed=trial)  # each `damage.arm()` spoils one more digest
    ... hand a request off: its load must end with KVCorrupted.code before its first token is computed ...
    damage.undo()  # the source's blocks are as they were

To damage each of many concurrent transfers once, `Damage(worker, "flip", seed, [the hash blocks that it reads, ...])`
chooses one hash block of each transfer; `damage.struck` lists those that were damaged.

A worker side that carries digests has `checksums` (connectors/peer/checksums.py): its `pool` makes all of them.
"""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from pdkv.connectors.base import TransferKey
from pdkv.connectors.peer.source_digests import SourceDigests
from pdkv.connectors.transfer.digest import PieceDigests, PoolDigests, Tokens
from pdkv.connectors.transfer.pool_copy import Pieces
from pdkv.connectors.transfer.units import UnitPart
from pdkv.kernels.digest import Bytes, Digests

How = Literal["flip", "swap", "foreign", "lost"]
"""Kinds of damage: one bit of one token; two hash blocks of the transfer swapped, their bytes intact; a hash block
replaced by one of another transfer; and, on a receiver's worker side, data that is reported but has not arrived: the
end of a hash block, or if one pass copies and digests, of everything it copies.
"""


def has_digests(worker: Any) -> bool:
    """Whether a worker side makes digests of the KV that it hands off."""
    return hasattr(getattr(worker, "checksums", None), "pool")


class Damage:
    """Damage to a source's blocks. Made before the KV is handed off; armed for the next digest.

    Args:
        worker: the source's worker side; its KV is in host memory.
        seed: seed of the choice among the tokens.
        targets: hash blocks (block * hash blocks per block + number) of each transfer to be damaged; none: the next
            digest, whatever it covers.
    """

    def __init__(self, worker: Any, how: How, seed: int = 0, targets: Sequence[Sequence[int]] = ()) -> None:
        self.num_done = 0
        self.struck: list[int] = []  # damaged targets
        self._pool: PoolDigests = worker.checksums.pool
        self._how = how
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._num_armed = 0 if targets else 1
        self._chosen = {self._chance.choice(units): number for number, units in enumerate(targets)}
        self._undone: list[
            tuple[Bytes, Bytes, Bytes]
        ] = []  # views of the pool, with the original and the damaged content
        self._earlier = self._blocks().copy() if how == "lost" else None  # content that was at a destination before
        self._make: Callable[[Tokens, UnitPart], Digests] = self._pool.digests
        self._begin: Callable[[Tokens, UnitPart, TransferKey, int], PieceDigests] = self._pool.begin
        setattr(self._pool, "digests", self._spoil)  # noqa: B010 (mypy takes no assignment to a method)
        self._copy: Callable[[Tokens, UnitPart, Bytes, Pieces], Digests] = self._pool.copy_pieces
        setattr(self._pool, "begin", self._make_apart)  # noqa: B010
        if how == "lost":
            setattr(self._pool, "copy_pieces", self._copy_some)  # noqa: B010
        self._source: SourceDigests | None = getattr(worker, "source_digests", None)
        if self._source is not None:
            setattr(self._source, "put", self._source.make)  # noqa: B010

    def arm(self) -> None:
        """Damage the next digest, too."""
        with self._lock:
            self._num_armed += 1

    def undo(self) -> None:
        """Restore the blocks, and damage nothing more."""
        with self._lock:
            self._num_armed = 0
            self._chosen.clear()
            for place, content, damaged in reversed(self._undone):
                if np.array_equal(place, damaged):  # otherwise the block has been written by a new owner
                    place[:] = content
            self._undone.clear()
        for name in ("digests", "begin", "copy_pieces"):
            self._pool.__dict__.pop(name, None)
        if self._source is not None:
            self._source.__dict__.pop("put", None)

    def _make_apart(self, tokens: Tokens, part: UnitPart, key: TransferKey, first_token: int) -> PieceDigests:
        """Make digests before the piece moves (on a receiver: when it has arrived), so that it can change in
        between.
        """
        piece = self._begin(tokens, part, key, first_token)
        if self._how == "lost":  # the kernel that moves it makes none, the one that copies it does
            setattr(piece, "fill", lambda *_: None)  # noqa: B010
        else:
            piece.in_kernel = False
            piece.make()
        return piece

    def _spoil(self, tokens: Tokens, part: UnitPart) -> Digests:
        if self._how == "lost":
            self._damage(tokens, part)
            return self._make(tokens, part)
        digests: Digests = self._make(tokens, part)
        self._damage(tokens, part)
        return digests

    def _copy_some(self, tokens: Tokens, part: UnitPart, source: Bytes, pieces: Pieces) -> Digests:
        """A copy that is too short: memory after its end keeps its content, and has no digests."""
        with self._lock:
            stop = min(self._strike(tokens), default=tokens.units.size)
        some = Tokens(*(column[:stop] for column in tokens))
        first = pieces._replace(target=pieces.target[:stop], source=pieces.source[:stop])
        digests = np.zeros((tokens.units.size, part.num_heads), dtype=np.uint64)
        digests[:stop] = self._copy(some, part, source, first)
        return digests

    def _damage(self, tokens: Tokens, part: UnitPart) -> None:
        with self._lock:
            for index in self._strike(tokens):
                self._damage_unit(tokens, index, part)

    def _strike(self, tokens: Tokens) -> list[int]:
        """The tokens to damage now."""
        if not self._num_armed:
            struck = [index for index, unit in enumerate(tokens.units.tolist()) if unit in self._chosen]
            self.struck += [self._chosen.pop(int(tokens.units[index])) for index in struck]
        elif tokens.units.size:
            self._num_armed -= 1
            struck = [self._chance.randrange(tokens.units.size)]
        else:
            struck = []
        self.num_done += len(struck)
        return struck

    def _damage_unit(self, tokens: Tokens, index: int, part: UnitPart) -> None:
        unit, first = int(tokens.units[index]), int(tokens.skipped[index])
        own = (..., slice(first, first + int(tokens.counts[index])), slice(None))
        place = self._place(self._blocks(), unit, part)[own]
        if self._how == "flip":
            self._flip(place)
        elif self._earlier is not None:
            lost = self._chance.randrange(place.shape[0])
            place[lost:] = self._place(self._earlier, unit, part)[own][lost:]
        else:
            self._swap(place, tokens, index, part, own)

    def _put(self, place: Bytes, content: Bytes) -> None:
        before = place.copy()
        place[:] = content
        self._undone.append((place, before, content))

    def _flip(self, place: Bytes) -> None:
        byte = place[tuple(slice(i, i + 1) for i in (self._chance.randrange(size) for size in place.shape))]
        self._put(byte, byte ^ np.uint8(1 << self._chance.randrange(8)))

    def _swap(self, place: Bytes, tokens: Tokens, index: int, part: UnitPart, own: Any) -> None:
        unit, blocks, content = int(tokens.units[index]), self._blocks(), place.copy()
        inside = {int(other) for other in tokens.units}
        is_within = self._how == "swap" and inside != {unit}
        others = sorted(inside - {unit} if is_within else set(range(len(blocks) * self._units_per_block)) - inside)
        self._chance.shuffle(others)
        places = (self._place(blocks, other, part)[own] for other in others)
        other = next(place for place in places if not np.array_equal(place, content))
        self._put(place, other.copy())
        if is_within:  # otherwise the digest of the other one may still be to come
            self._put(other, content)

    @property
    def _units_per_block(self) -> int:
        return self._pool.layout.block_size // self._pool.unit_tokens

    def _blocks(self) -> Bytes:
        layout, flat = self._pool.layout, self._pool.flat
        assert flat is not None, "KV in device memory cannot be damaged here"
        return flat.reshape(-1, *layout.pool_shape(1)[1:5], layout.row_bytes)

    def _place(self, blocks: Bytes, unit: int, part: UnitPart) -> Bytes:
        """A part of a unit, (layers, sides, heads, tokens, bytes of a head's token)."""
        block, position = divmod(unit, self._units_per_block)
        first = position * self._pool.unit_tokens
        layers, heads = slice(part.layer_start, part.layer_stop), slice(part.head_start, part.head_stop)
        return blocks[block, layers, :, heads, first : first + self._pool.unit_tokens]
