"""Damage on the way, for the kit and for tests of any transport that carries digests (docs/kv-integrity.md).

What travels is what lies in the source's blocks when the transport reads them. So damage is done there, behind the
digest's back: as soon as a digest of some tokens was made, what it is of changes in memory. To the reader that is a
bit that flipped, or a block that went astray, between the two. A pull reads as soon as it hears of a hand-off, so the
source's digests are made at once by the step that tells what is in the blocks: it has to come before the load. Push
or pull, and whatever moves the bytes, it is the same one line:

    damage = Damage(source_worker, "flip", seed=trial)  # each `damage.arm()` spoils one more digest
    ... hand a request off: its load must end with KVCorrupted.code before its first token is computed ...
    damage.undo()  # the source's blocks are as they were

Of many transfers at once each is damaged once: `Damage(worker, "flip", seed, [its hash blocks that are read, ...])`
chooses one of each one's, and `damage.struck` says which were met.

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
"""One bit of one token; a hash block and another one of the transfer in each other's place, their bytes intact; one of
another transfer in the place of one; and, of a receiver's worker side, an end that is reported but has not arrived: of
a hash block, or where one pass copies and digests, of all that it copies."""


def has_digests(worker: Any) -> bool:
    """Whether a worker side makes digests of what it hands off."""
    return hasattr(getattr(worker, "checksums", None), "pool")


class Damage:
    """What happens to a source's blocks. Made before the KV is handed off; armed for the next digest.

    Args:
        worker: the source's worker side; its KV is in host memory.
        seed: of the choice among the tokens.
        targets: hash blocks (block * hash blocks per block + number) of each transfer that is to be damaged; none: the
            next digest is, whatever it is of.
    """

    def __init__(self, worker: Any, how: How, seed: int = 0, targets: Sequence[Sequence[int]] = ()) -> None:
        self.num_done = 0
        self.struck: list[int] = []  # targets, as they were damaged
        self._pool: PoolDigests = worker.checksums.pool
        self._how = how
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._num_armed = 0 if targets else 1
        self._chosen = {self._chance.choice(units): number for number, units in enumerate(targets)}
        self._undone: list[tuple[Bytes, Bytes, Bytes]] = []  # views of the pool, what was there, and what is there
        self._earlier = self._blocks().copy() if how == "lost" else None  # what lay where something arrives now
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
        """Spoil the next digest, too."""
        with self._lock:
            self._num_armed += 1

    def undo(self) -> None:
        """The blocks hold what they held, and nothing more is damaged."""
        with self._lock:
            self._num_armed = 0
            self._chosen.clear()
            for place, content, damaged in reversed(self._undone):
                if np.array_equal(place, damaged):  # else somebody has it who wrote it
                    place[:] = content
            self._undone.clear()
        for name in ("digests", "begin", "copy_pieces"):
            self._pool.__dict__.pop(name, None)
        if self._source is not None:
            self._source.__dict__.pop("put", None)

    def _make_apart(self, tokens: Tokens, part: UnitPart, key: TransferKey, first_token: int) -> PieceDigests:
        """Before the piece moves (of a receiver: when it is in), so that it can change in between."""
        piece = self._begin(tokens, part, key, first_token)
        if self._how == "lost":  # the kernel that moves it makes none, one that copies it does
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
        """A copy that is too short: what is behind its end holds what it held, and has no digests."""
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
        """Which of them are damaged now."""
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
        if is_within:  # else the digest of the other one may be still to come
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
