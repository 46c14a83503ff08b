"""A peer's mapped arena as a reader sees it: its KV pool, its generations and its words.

Each of the peer's ranks is a source. Data counts only if the generations or words read after it have the expected
values.
"""

from pdkv.connectors.arena.arena import PeerArena
from pdkv.connectors.transfer.planning import Bytes, Ids
from pdkv.connectors.transfer.pool_copy import Pieces, copy_pieces
from pdkv.errors import TransferError
from pdkv.host.fence import fence


class MappedSource:
    """A mapped arena of the peer. Thread-safe."""

    def __init__(self, arena: PeerArena) -> None:
        self._arena = arena
        self.pool = arena.data
        """(blocks, bytes); readers call `will_read` first."""

    def copy(self, target: Bytes, pieces: Pieces) -> None:
        """Copy pieces of the peer's pool into the own one, without holding the GIL. Raises a TransferError."""
        self.will_read()
        copy_pieces(target, self.pool.reshape(-1), pieces)

    def will_read(self) -> None:
        """Announce that its memory is read from now on, sooner or later all of it."""
        self._arena.is_source = True

    def generations(self, blocks: Ids) -> Ids:
        """The current generations of blocks, read after all earlier copies; only of rank 0. Raises a TransferError."""
        fence()
        return self._arena.table.generations(blocks)

    def word(self, number: int) -> int:
        """The current value of one of the peer's words, read after all earlier copies. Raises a TransferError."""
        fence()
        words = self._arena.words
        if not 0 <= number < words.size:
            raise TransferError(f"word {number} does not exist: there are {words.size}")
        return int(words[number])

    def digest_rows(self, units: Ids) -> Ids:
        """The table of digests' rows of these hash blocks now, (n, 1 + heads) words. Raises a TransferError."""
        fence()
        return self._arena.digests.rows(units)

    def map_ahead(self) -> bool:
        """Do a little work that makes later copies faster; False: nothing is left to do."""
        return self._arena.is_source and self._arena.map_ahead()
