"""The ring broadcast queue: one rank writes, every other one reads each message, through shared memory.

N chunks of equal size. Each has one written flag and one read flag per reader; it is writable when unwritten or read by
all. A longer message goes over the readers' channels, and its chunk only says so. Nothing spins: a reader sleeps on a
semaphore that counts its unread messages, the writer on one that readers raise when they free a chunk. Both kinds are
eventfds, so each flag is read after a system call that orders memory. The memory is a memfd without a name, passed
over the channels: the kernel frees it with the last process.
"""

import mmap
import os
import select
import struct
from collections.abc import Sequence
from typing import NamedTuple

from pdkv.base.clock import MONOTONIC
from pdkv.engine.worker.ranks.channel import RankChannel
from pdkv.errors import ConfigError, RankGone, RankTimeout

NUM_CHUNKS = 10
CHUNK_BYTES = 1 << 20
"""Bytes of a chunk: more than the plan of any step without long new prompts. Memory is only taken once it is used."""

_HEAD = struct.Struct("<QBB")  # per chunk: bytes of the message, whether it overflows, whether the chunk is written
_WRITTEN = 9  # offset of that flag
_GEOMETRY = struct.Struct("<QQQQ")  # at the memory's start: chunks, bytes of each, readers, this layout's version
_VERSION = 1


class _Layout(NamedTuple):
    """Offsets in the shared memory: the geometry, heads with their flags, then the chunks."""

    num_chunks: int
    chunk_bytes: int
    num_readers: int

    @property
    def head_bytes(self) -> int:
        return -(-(_HEAD.size + self.num_readers) // 64) * 64  # a separate cache line for each chunk

    def head(self, chunk: int) -> int:
        return 64 + chunk * self.head_bytes

    def read_flag(self, chunk: int, reader: int) -> int:
        return self.head(chunk) + _HEAD.size + reader

    def data(self, chunk: int) -> int:
        return self.head(self.num_chunks) + chunk * self.chunk_bytes

    @property
    def size(self) -> int:
        return self.data(self.num_chunks)


class RingWriter:
    """The writing side. Single-threaded."""

    def __init__(
        self, readers: Sequence[RankChannel], *, num_chunks: int = NUM_CHUNKS, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """Make the ring and offer it to each reader over its channel, before anything else is sent there.

        Raises:
            ConfigError: the memory cannot be allocated.
            RankGone: a reader is gone.
        """
        self._readers = readers
        self._layout = layout = _Layout(num_chunks, chunk_bytes, len(readers))
        self._next = 0
        self._freed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._unread = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE) for _ in readers]
        memory_fd = os.memfd_create("pdkv-ring", os.MFD_CLOEXEC)
        try:
            try:
                os.ftruncate(memory_fd, layout.size)
                self._memory = mmap.mmap(memory_fd, layout.size)
            except OSError as error:
                raise ConfigError(
                    f"cannot allocate {layout.size} bytes of shared memory for the ranks' queue: {error.strerror}"
                ) from error
            _GEOMETRY.pack_into(self._memory, 0, *layout, _VERSION)
            for channel, unread in zip(readers, self._unread, strict=True):
                channel.send_fds([memory_fd, unread, self._freed])
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory_fd)

    def put(self, message: bytes, timeout_s: float) -> None:
        """Write one message for all readers; waits while the ring is full.

        Raises:
            RankTimeout: a reader is so late that no chunk became free.
            RankGone: a reader is gone.
        """
        deadline = MONOTONIC.now() + timeout_s
        layout, chunk, memory = self._layout, self._next, self._memory
        self._wait_writable(chunk, deadline)
        overflows = len(message) > layout.chunk_bytes
        head, flags = layout.head(chunk), layout.read_flag(chunk, 0)
        memory[head + _WRITTEN] = 0
        memory[flags : flags + layout.num_readers] = bytes(layout.num_readers)
        if not overflows:
            data = layout.data(chunk)
            memory[data : data + len(message)] = message
        _HEAD.pack_into(memory, head, len(message), overflows, True)
        self._next = (chunk + 1) % layout.num_chunks
        for unread in self._unread:
            os.eventfd_write(unread, 1)
        if overflows:
            for channel in self._readers:
                channel.send(message, max(0.0, deadline - MONOTONIC.now()))

    def _wait_writable(self, chunk: int, deadline: float) -> None:
        while (late := self._late_readers(chunk)) is not None:
            poll = select.poll()
            poll.register(self._freed, select.POLLIN)
            for reader in late:
                poll.register(self._readers[reader], select.POLLRDHUP)
            events = poll.poll(max(0.0, deadline - MONOTONIC.now()) * 1000)
            names = ", ".join(self._readers[reader].peer for reader in late)
            if not events:
                raise RankTimeout(f"{names} did not read in time: the ring is full")
            if self._freed not in {fd for fd, _ in events}:
                raise RankGone(f"one of {names} is gone")
            os.eventfd_read(self._freed)  # after this, check again: a flag is set before the semaphore is raised

    def _late_readers(self, chunk: int) -> list[int] | None:
        """The readers that have not read the chunk; None: it is writable."""
        layout, memory = self._layout, self._memory
        if not memory[layout.head(chunk) + _WRITTEN]:
            return None
        return [r for r in range(layout.num_readers) if not memory[layout.read_flag(chunk, r)]] or None

    def close(self) -> None:
        """Close; readers keep what was written. Idempotent."""
        for fd in (self._freed, *self._unread):
            if fd >= 0:
                os.close(fd)
        self._freed, self._unread = -1, []
        if hasattr(self, "_memory"):
            self._memory.close()


class RingReader:
    """One reading side. Single-threaded."""

    def __init__(self, channel: RankChannel, index: int, timeout_s: float) -> None:
        """Take the ring that the writer offers over `channel`; `index` is this reader's place among the readers.

        Raises:
            RankTimeout, RankGone: it did not arrive.
        """
        self._channel = channel
        self._index = index
        self._next = 0
        memory_fd, self._unread, self._freed = channel.receive_fds(3, timeout_s)
        try:
            self._memory = mmap.mmap(memory_fd, os.fstat(memory_fd).st_size)
        finally:
            os.close(memory_fd)
        *geometry, version = _GEOMETRY.unpack_from(self._memory, 0)
        self._layout = _Layout(*geometry)
        assert version == _VERSION, version
        assert index < self._layout.num_readers, index
        self._poll = select.poll()
        self._poll.register(self._unread, select.POLLIN)
        self._poll.register(channel, select.POLLRDHUP)

    @property
    def has_news(self) -> bool:
        """Whether `get` would not wait."""
        return bool(self._poll.poll(0))

    def get(self, timeout_s: float | None) -> bytes | bytearray:
        """The next message, a copy; `timeout_s` None: wait without a limit.

        Raises:
            RankTimeout: none came in time.
            RankGone: the writer is gone, and all of its messages were read.
        """
        deadline = None if timeout_s is None else MONOTONIC.now() + timeout_s
        self._take_unread(timeout_s)
        layout, chunk, memory = self._layout, self._next, self._memory
        size, overflows, written = _HEAD.unpack_from(memory, layout.head(chunk))
        assert written, chunk
        assert not memory[layout.read_flag(chunk, self._index)], chunk
        message: bytes | bytearray
        if overflows:
            message = self._channel.receive(None if deadline is None else max(0.0, deadline - MONOTONIC.now()))
        else:
            data = layout.data(chunk)
            message = memory[data : data + size]
        memory[layout.read_flag(chunk, self._index)] = 1
        os.eventfd_write(self._freed, 1)
        self._next = (chunk + 1) % layout.num_chunks
        return message

    def _take_unread(self, timeout_s: float | None) -> None:
        """Count one unread message down, or wait for it."""
        events = self._poll.poll(None if timeout_s is None else timeout_s * 1000)
        if not events:
            raise RankTimeout(f"{self._channel.peer} sent nothing in time")
        if self._unread not in {fd for fd, _ in events}:
            raise RankGone(f"{self._channel.peer} is gone")
        os.eventfd_read(self._unread)

    def close(self) -> None:
        """Idempotent."""
        for fd in (self._freed, self._unread):
            if fd >= 0:
                os.close(fd)
        self._freed = self._unread = -1
        self._memory.close()
