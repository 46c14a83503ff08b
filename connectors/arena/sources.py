"""The memory of a peer on this host as a reader sees it: its KV pool, its generations and its words.

Each of the peer's ranks is a source. Its arena is mapped here, or the kernel copies from its process into this one.
Data counts only if the generations or words read after it have the expected values.
"""

import errno
import threading
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np

from pdkv.connectors.arena.arena import PeerArena
from pdkv.connectors.transfer.planning import Bytes, Ids
from pdkv.connectors.transfer.pool_copy import Pieces, copy_pieces
from pdkv.errors import PeerGone, TransferError
from pdkv.host.fence import fence
from pdkv.host.process_memory import ProcessMemory

WORD_BYTES = 8


class PoolSource(ABC):
    """A peer's memory. Thread-safe."""

    path: ClassVar[str]
    mapped: Bytes | None = None
    """The pool, (blocks, bytes), if it is mapped; readers call `will_read` first."""

    @abstractmethod
    def copy(self, target: Bytes, pieces: Pieces) -> None:
        """Copy pieces of the peer's pool into the own one, without holding the GIL. Raises a TransferError."""

    @abstractmethod
    def generations(self, blocks: Ids) -> Ids:
        """The current generations of blocks, read after all earlier copies; only of rank 0. Raises a TransferError."""

    @abstractmethod
    def word(self, number: int) -> int:
        """The current value of one of the peer's words, read after all earlier copies. Raises a TransferError."""

    @abstractmethod
    def digest_rows(self, units: Ids) -> Ids:
        """The table of digests' rows of these hash blocks now, (n, 1 + heads) words. Raises a TransferError."""

    def will_read(self) -> None:
        """Announce that its memory is read from now on, sooner or later all of it."""

    def map_ahead(self) -> bool:
        """Do a little work that makes later copies faster; False: nothing is left to do."""
        return False

    def close(self) -> None:
        """Close: later reads raise a TransferError."""


class MappedSource(PoolSource):
    """A mapped arena of the peer."""

    path = "arena"

    def __init__(self, arena: PeerArena) -> None:
        self._arena = arena
        self.mapped = arena.data

    def copy(self, target: Bytes, pieces: Pieces) -> None:
        self.will_read()
        copy_pieces(target, self._arena.data.reshape(-1), pieces)

    def will_read(self) -> None:
        self._arena.is_source = True

    def generations(self, blocks: Ids) -> Ids:
        fence()
        return self._arena.table.generations(blocks)

    def word(self, number: int) -> int:
        fence()
        words = self._arena.words
        if not 0 <= number < words.size:
            raise TransferError(f"word {number} does not exist: there are {words.size}")
        return int(words[number])

    def digest_rows(self, units: Ids) -> Ids:
        fence()
        return self._arena.digests.rows(units)

    def map_ahead(self) -> bool:
        return self._arena.is_source and self._arena.map_ahead()


class Span(NamedTuple):
    """A range of another process's memory."""

    address: int
    size: int


class ProcessSource(PoolSource):
    """A peer's memory, read by address through the kernel.

    Args:
        pool, generations, words, digests: their addresses and sizes.
        nonce: the expected first word, which is different for another incarnation in that process.
    """

    path = "cma"

    def __init__(
        self,
        memory: ProcessMemory,
        *,
        pool: Span,
        generations: Span | None,
        words: Span,
        digests: Span | None,
        row_words: int,
        nonce: int,
        name: str,
    ) -> None:
        self._memory = memory
        self._pool = pool
        self._generations = generations
        self._words = words
        self._digests = digests
        self._row_words = row_words  # of the table of digests
        self._nonce = nonce
        self._name = name
        self._lock = threading.Lock()  # guards the next two
        self._num_readers = 0
        self._closed = False

    def copy(self, target: Bytes, pieces: Pieces) -> None:
        pieces.check(target.nbytes, self._pool.size)
        to, start = pieces.row_offsets()
        self._read(to + target.ctypes.data, start + self._pool.address, pieces.rows.row_bytes)

    def generations(self, blocks: Ids) -> Ids:
        if self._generations is None:
            raise TransferError(f"{self._name} publishes no generations")
        return self._read_words(self._generations, blocks)

    def word(self, number: int) -> int:
        return int(self._read_words(self._words, np.asarray([number], dtype=np.int64))[0])

    def digest_rows(self, units: Ids) -> Ids:
        if self._digests is None:
            raise TransferError(f"{self._name} publishes no digests")
        numbers = units[:, None] * self._row_words + np.arange(self._row_words, dtype=np.int64)
        return self._read_words(self._digests, numbers.ravel()).reshape(numbers.shape)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._close_if_unused()

    def _read_words(self, span: Span, numbers: Ids) -> Ids:
        """Words, if the process is the expected one and has not ended. Raises a TransferError."""
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < span.size // WORD_BYTES:
            raise TransferError(
                f"words {numbers.min()} to {numbers.max()} do not exist: there are {span.size // WORD_BYTES}"
            )
        words = np.empty(numbers.size + 1, dtype=np.int64)
        target = words.ctypes.data + np.arange(words.size, dtype=np.int64) * WORD_BYTES
        self._read(target, np.append(span.address + numbers * WORD_BYTES, self._words.address), WORD_BYTES)
        if words[-1] != self._nonce:
            raise PeerGone(f"{self._name}: its process belongs to another incarnation now")
        return words[:-1]

    def _read(self, target: Ids, source: Ids, size: int) -> None:
        with self._lock:
            if self._closed:
                raise PeerGone(f"{self._name} is gone")
            self._num_readers += 1
        try:
            self._memory.read(target, source, size)
            if not self._memory.is_alive():
                raise PeerGone(f"{self._name}: its process has ended")
        except OSError as error:
            gone = error.errno in (errno.ESRCH, errno.EFAULT)
            raise (PeerGone if gone else TransferError)(f"{self._name} cannot be read: {error}") from error
        finally:
            with self._lock:
                self._num_readers -= 1
                self._close_if_unused()

    def _close_if_unused(self) -> None:
        """Called under the lock after either of the two has changed."""
        if self._closed and not self._num_readers:
            self._memory.close()
