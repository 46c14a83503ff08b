"""Digests next to a pool that others read: per hash block a stamp, and a digest for each KV head of the rank.

The stamp names the generation of the block and the number of digested tokens, so that digests of former content, or of
another tail, are not taken for those of the current content. One writer, any number of readers in other processes: a
stamp is 0 while its digests are written.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.transfer.planning import Ids
from pdkv.errors import KVNotFound
from pdkv.host.fence import fence
from pdkv.kernels.digest import Digests

_COUNTS = 32
"""Larger than the number of tokens in a hash block."""


class DigestRows(NamedTuple):
    """A table's digests of some hash blocks. `counts`: number of digested tokens; 0: there is no digest of that
    generation.
    """

    counts: Ids
    digests: Digests  # (n, heads)


class DigestTable:
    """A table over a zeroed buffer of `table_bytes`, 8-byte aligned."""

    def __init__(self, buffer: memoryview, num_units: int, num_heads: int) -> None:
        self.words = np.frombuffer(buffer, dtype=np.uint64, count=num_units * (1 + num_heads))
        table = self.words.reshape(num_units, 1 + num_heads)
        self._stamps: Ids = table[:, 0].view(np.int64)
        self._digests: Digests = table[:, 1:]

    def write(self, units: Ids, generations: Ids, counts: Ids, digests: Digests) -> None:
        """Write the digests of units, each with its block's current generation."""
        self._stamps[units] = 0
        fence()
        self._digests[units] = digests
        fence()
        self._stamps[units] = _stamps(generations, counts)

    def counts(self, units: Ids, generations: Ids) -> Ids:
        """Number of digested tokens of each unit; 0 if its digest is of another generation."""
        return _counts(self._stamps[units], generations)

    def read(self, units: Ids, generations: Ids) -> DigestRows:
        """The digests of units, given the generations of their blocks. Raises KVNotFound."""
        if units.size and not 0 <= units.min() <= units.max() < len(self._stamps):
            raise KVNotFound(f"hash blocks {units.min()} to {units.max()} do not exist: there are {len(self._stamps)}")
        before = self._stamps[units].copy()
        fence()
        digests = self._digests[units]
        fence()
        before[self._stamps[units] != before] = 0
        return DigestRows(_counts(before, generations), digests)


def table_bytes(num_units: int, num_heads: int) -> int:
    """Bytes of a table."""
    return 8 * num_units * (1 + num_heads)


def rows_of(words: npt.NDArray[np.int64], generations: Ids) -> DigestRows:
    """Decode a table's rows that were read through a transport.

    Args:
        words: (n, 1 + heads).
    """
    return DigestRows(_counts(words[:, 0], generations), words[:, 1:].view(np.uint64))


def _stamps(generations: Ids, counts: Ids) -> Ids:
    return (generations + 1) * _COUNTS + counts


def _counts(stamps: Ids, generations: Ids) -> Ids:
    """No more than a hash block has, whatever a peer's table says: as many are digested here."""
    return np.where(stamps // _COUNTS == generations + 1, np.minimum(stamps % _COUNTS, HASH_BLOCK_SIZE), 0)
