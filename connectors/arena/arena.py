"""One rank's shared memory: a sealed memfd with a header, the block table, words and the KV pool, which only it can
write. A pool on a GPU is in the GPU's memory, and everything else is here (device_pool.py).

A peer opens it through /proc/<pid>/fd/<fd>. Nothing has a name in a file system: the kernel frees the memory with the
last mapping, however the processes end.
"""

import errno
import fcntl
import logging
import mmap
import os
import threading
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.base.service_thread import ServiceThread
from pdkv.connectors.arena.block_table import BlockTableReader, TableArrays, TableShape
from pdkv.connectors.arena.device_pool import DevicePoolAddress, ExportedPool, PoolDevice
from pdkv.connectors.transfer.digest_table import DigestTable, table_bytes
from pdkv.connectors.transfer.planning import Bytes
from pdkv.errors import ConfigError, IncompatiblePeers, MalformedMessage, PeerGone, StaleEpoch, TransferError
from pdkv.host.fence import fence
from pdkv.host.held_file import HeldFile, held_here
from pdkv.host.host_id import host_id
from pdkv.host.huge_pages import madvise
from pdkv.wire.decoding import decode_total
from pdkv.wire.kv import EngineCard, KVLayout

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAGIC = b"pdkvKV02"
HEADER_BYTES = 4096
NUM_WORDS = 4096
"""Int64 words next to the table, which the owner's connector shows its peers."""

_DATA_ALIGNMENT = 2 * 1024 * 1024  # a huge page, if the kernel supports them for shared memory
_TOUCH_BYTES = 4 * 1024 * 1024  # per call, so that a stop or a waiting load is noticed soon
_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; Python 3.11's fcntl lacks it
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # linux/mman.h
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
_OWN_FAULTS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
_LINK_PREFIX = "/memfd:pdkv:"


class ArenaHeader(msgspec.Struct, frozen=True):
    """Written once by the owner at the arena's start."""

    engine: str
    epoch: str
    pid: int
    start_time: int  # clock ticks from boot to the owner's start: reveals a recycled pid
    layout: KVLayout
    num_blocks: int
    hash_block_size: int
    reserved: bool = True  # whether all of the pool has memory from the start


_headers = msgspec.msgpack.Decoder(ArenaHeader)


class ArenaAddress(HeldFile, frozen=True):
    """How a peer reaches an arena; part of the engine's card. `host` is the boot id: only processes on this host can
    reach the arena.
    """

    host: str
    size: int
    pool: DevicePoolAddress | None = None  # if the pool is not in the arena


class ArenaShape(NamedTuple):
    """The layout of an arena."""

    table: TableShape
    num_heads: int
    data_offset: int
    block_bytes: int
    holds_pool: bool

    @classmethod
    def of(cls, layout: KVLayout, num_blocks: int, *, holds_pool: bool = True) -> "ArenaShape":
        """The shape of an arena for `num_blocks` blocks; their data is elsewhere if the arena does not hold the
        pool.
        """
        table = TableShape(num_blocks, layout.block_size // HASH_BLOCK_SIZE)
        end = _digests_offset(table) + table_bytes(table.num_units, layout.num_kv_heads)
        offset = -(-end // _DATA_ALIGNMENT) * _DATA_ALIGNMENT
        return cls(table, layout.num_kv_heads, offset, layout.block_bytes, holds_pool)

    def digests(self, memory: memoryview) -> DigestTable:
        """The table of digests of the rank's KV, in a mapping of the arena."""
        table = memory[_digests_offset(self.table) : self.data_offset]
        return DigestTable(table, self.table.num_units, self.num_heads)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV pool, wherever it is."""
        return self.table.num_blocks * self.block_bytes

    @property
    def size(self) -> int:
        """Bytes of the whole arena."""
        return self.data_offset + (self.pool_bytes if self.holds_pool else 0)


class Arena:
    """The arena on its owner's side. The mapping lives as long as anything refers to its memory, such as the KV pool's
    tensor.
    """

    def __init__(
        self,
        *,
        engine: str,
        epoch: str,
        layout: KVLayout,
        num_blocks: int,
        device: PoolDevice | None = None,
        reserves: bool = True,
    ) -> None:
        """Create, map and seal. Only the table is allocated: `kv_cache` and `allocate_data` do the rest.

        Args:
            device: where the pool will lie; None: in the arena.
            reserves: whether the pool's memory is committed when it is allocated; False: page by page, as it is used.

        Raises:
            ConfigError: the memory cannot be allocated.
        """
        self.shape = ArenaShape.of(layout, num_blocks, holds_pool=device is None)
        self.exported: ExportedPool | None = None  # the pool, if it is on a device, once it is allocated
        self._device = device
        self._reserves = reserves
        self._layout = layout
        self._toucher = ServiceThread(self._touch, lambda: None, "pdkv-touch")
        self._fd = os.memfd_create(f"pdkv:{engine}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self._reserve(0, self.shape.data_offset, grow=True)
            self._memory: mmap.mmap | None = mmap.mmap(self._fd, self.shape.size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(self._fd)
            raise
        self.address = ArenaAddress(*held_here(self._fd), host_id(), self.shape.size)
        process = self.address.pid, self.address.start_time
        header = ArenaHeader(engine, epoch, *process, layout, num_blocks, HASH_BLOCK_SIZE, reserves)
        _write_header(self._memory, header)
        view = memoryview(self._memory)
        self.table_arrays = TableArrays.over(view[HEADER_BYTES : self.shape.data_offset], self.shape.table)
        self.words = _words(view, self.shape)

    def allocate_data(self) -> None:
        """If the pool is reserved, allocate its memory and begin to touch it on a thread, from its first block on.

        Raises:
            ConfigError: the memory cannot be allocated.
        """
        if not self._reserves:
            _advise(self.data(), 0, self.data().nbytes, mmap.MADV_HUGEPAGE)
            return
        self._reserve(self.shape.data_offset, self.shape.size - self.shape.data_offset)
        self._toucher.start()

    def data(self) -> Bytes:
        """The KV pool, (num_blocks, block_bytes)."""
        assert self._memory is not None, "the arena is closed"
        return _data(memoryview(self._memory), self.shape)

    def digests(self) -> DigestTable:
        """The table of digests of the pool's content."""
        assert self._memory is not None, "the arena is closed"
        return self.shape.digests(memoryview(self._memory))

    def kv_cache(self) -> "torch.Tensor":
        """Allocate the KV pool, zeroed. It stays mapped while the tensor lives. Raises ConfigError."""
        import torch

        layout = self._layout
        if self._device is not None:
            self.exported = self._device.export(self.shape.pool_bytes)
            self.address = msgspec.structs.replace(self.address, pool=self.exported.address)
            data = self.exported.data
        else:
            self.allocate_data()
            data = torch.from_numpy(self.data().reshape(-1))
        return data.view(getattr(torch, layout.dtype)).view(layout.pool_shape(self.shape.table.num_blocks))

    def holds(self, kv_cache: "torch.Tensor") -> bool:
        """Whether `kv_cache` is the pool that peers see."""
        data = self.data()
        return kv_cache.data_ptr() == data.ctypes.data and kv_cache.nbytes == data.nbytes

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last reference to it. Idempotent."""
        if self._memory is None:
            return
        self._toucher.stop()  # at most one call's time
        self._memory = self.exported = None
        del self.table_arrays, self.words
        os.close(self._fd)

    def _reserve(self, offset: int, num_bytes: int, *, grow: bool = False) -> None:
        """Allocate a part of the memory; with `grow`, first extend it to its size."""
        try:
            if grow:
                os.ftruncate(self._fd, self.shape.size)
            os.posix_fallocate(
                self._fd, offset, num_bytes
            )  # otherwise a page that cannot be allocated becomes a SIGBUS later
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise ConfigError(
                f"cannot allocate {self.shape.size} bytes of shared memory for {self.shape.table.num_blocks} KV "
                f"blocks: {error.strerror}; a smaller --kv-cache-memory helps"
            ) from error

    def _touch(self, stopping: threading.Event) -> None:
        """Map the pool's pages (a first write to shared memory costs ten times a warm one)."""
        data = self.data()
        _advise(data, 0, data.nbytes, mmap.MADV_HUGEPAGE)  # it does not matter if there are none
        for offset in range(0, data.nbytes, _TOUCH_BYTES):
            if stopping.is_set() or not _advise(data, offset, _TOUCH_BYTES, _MADV_POPULATE_WRITE):
                return


class PeerArena:
    """A reader's view of a peer's arena. It is freed once nothing refers to it, so a copy in flight keeps it mapped."""

    def __init__(self, memory: mmap.mmap, header: ArenaHeader, address: ArenaAddress) -> None:
        self.header = header
        self.address = address
        self.shape = ArenaShape.of(header.layout, header.num_blocks, holds_pool=address.pool is None)
        view = memoryview(memory)
        arrays = TableArrays.over(view[HEADER_BYTES : self.shape.data_offset], self.shape.table)
        self.table = BlockTableReader(arrays, self.shape.table)
        self.words = _words(view, self.shape)
        self.digests = self.shape.digests(view)
        self.data = _data(view, self.shape)  # (num_blocks, block_bytes), read-only; no rows if the pool is on a device
        self.is_source = False  # of hand-offs: all of the pool will be read sooner or later
        self.num_mapped_bytes = 0  # bytes of the pool mapped by `map_ahead`
        self.pool: torch.Tensor | None = None  # if it is on a device, once it is mapped

    def check_owner(self) -> None:
        """Check that the owner still has its files, and so its device memory, which the kernel treats as files, too.

        A process that ends loses its file table before the first of its files is closed, and counts as alive for some
        time after the last.

        Raises:
            PeerGone: it has ended, or begun to.
        """
        address = self.address
        try:
            inode = os.stat(f"/proc/{address.pid}/fd/{address.fd}").st_ino
        except OSError as error:
            raise _open_error(f"engine {self.header.engine}: process {address.pid} has ended", error) from error
        if inode != address.inode:
            raise PeerGone(f"engine {self.header.engine}: process {address.pid} has closed its arena")

    def word(self, number: int) -> int:
        """The current value of one of the owner's words, read after all earlier copies. Raises TransferError."""
        if not 0 <= number < self.words.size:
            raise TransferError(f"word {number} does not exist: there are {self.words.size}")
        fence()
        return int(self.words[number])

    def map_ahead(self) -> bool:
        """Map the next pages of a source's pool, so that the first read of a block runs at full speed, and resident
        memory does not creep up with the blocks read.

        False: no pages are left, or they get memory only when they are used.
        """
        if not self.is_source or self.num_mapped_bytes >= self.data.nbytes or not self.header.reserved:
            return False
        done = _advise(self.data, self.num_mapped_bytes, _TOUCH_BYTES, _MADV_POPULATE_READ)
        self.num_mapped_bytes = self.num_mapped_bytes + _TOUCH_BYTES if done else self.data.nbytes
        return True


def open_peer_arena(address: ArenaAddress, card: EngineCard) -> PeerArena:
    """Map the arena of one rank of a peer, read-only, after checking that it is the one on the card.

    Raises:
        PeerGone: its process is gone, or the pid or descriptor is now used by another process.
        StaleEpoch: the arena belongs to another incarnation of the engine.
        IncompatiblePeers: it is on another host, is not an arena of this version, or does not match the card.
        TransferError: this process lacks descriptors or memory for it now.
    """
    engine = card.engine
    if address.host != host_id():
        raise IncompatiblePeers(
            f"engine {engine}: shared memory works within one host only; this host is {host_id()}, the engine's "
            f"{address.host}"
        )
    try:
        fd = address.open(os.O_RDONLY, _LINK_PREFIX)
    except OSError as error:
        raise _open_error(f"engine {engine}: its arena in process {address.pid} cannot be opened", error) from error
    try:
        _check_sealed(fd, address, engine)
        memory = mmap.mmap(fd, address.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as error:
        raise _open_error(f"engine {engine}: its arena cannot be mapped", error) from error
    finally:
        os.close(fd)
    header = _read_header(memory, engine)
    if (header.engine, header.epoch, header.pid) != (engine, card.epoch, address.pid):
        raise StaleEpoch(f"engine {engine} epoch {card.epoch}: the arena is {header.engine}'s, epoch {header.epoch}")
    said, meant = (header.layout, header.num_blocks), (card.layout, card.num_blocks)
    if said != meant:  # reads are limited by the card's numbers
        raise IncompatiblePeers(
            f"engine {engine}: its arena has (layout, blocks) {said!r}, but its card says {meant!r}: restart that "
            "engine"
        )
    if ArenaShape.of(header.layout, header.num_blocks, holds_pool=address.pool is None).size != address.size:
        raise IncompatiblePeers(
            f"engine {engine}: an arena of {address.size} bytes has another shape than its header's"
        )
    return PeerArena(memory, header, address)


def _open_error(what: str, error: OSError) -> TransferError:
    """An error that is the peer's fault, or this process's own, which is no reason to give the peer up."""
    kind = TransferError if error.errno in _OWN_FAULTS else PeerGone
    return kind(f"{what}: {error.strerror}")


def _check_sealed(fd: int, address: ArenaAddress, engine: str) -> None:
    """Check that the open file cannot shrink under the mapping, and only its owner writes it."""
    size = os.fstat(fd).st_size
    if size != address.size:
        raise PeerGone(f"engine {engine}: its arena has {size} bytes, its card says {address.size}")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise IncompatiblePeers(f"engine {engine}: its arena is not sealed")


def _advise(data: Bytes, offset: int, num_bytes: int, advice: int) -> bool:
    """madvise for data[offset : offset + num_bytes] (its end cut off). False: refused.

    Before Linux 5.14 nothing can be populated: pages are then mapped one by one at their first use.
    """
    return madvise(data.ctypes.data + offset, min(num_bytes, data.nbytes - offset), advice)


def _digests_offset(table: TableShape) -> int:
    return _words_offset(table) + 8 * NUM_WORDS


def _words_offset(table: TableShape) -> int:
    return HEADER_BYTES + table.num_bytes


def _words(memory: memoryview, shape: ArenaShape) -> npt.NDArray[np.int64]:
    return np.frombuffer(memory, dtype=np.int64, count=NUM_WORDS, offset=_words_offset(shape.table))


def _data(memory: memoryview, shape: ArenaShape) -> Bytes:
    """The pool, (num_blocks, block_bytes); no rows if it is elsewhere."""
    data = np.frombuffer(memory[shape.data_offset : shape.size], dtype=np.uint8)
    return data.reshape(-1, shape.block_bytes)


def _write_header(memory: mmap.mmap, header: ArenaHeader) -> None:
    body = msgspec.msgpack.encode(header)
    if len(body) > HEADER_BYTES - 12:
        raise ConfigError(f"engine name {header.engine!r} is too long")
    memory[8:12] = len(body).to_bytes(4, "little")
    memory[12 : 12 + len(body)] = body
    memory[:8] = MAGIC  # last: a header without it is not complete


def _read_header(memory: mmap.mmap, engine: str) -> ArenaHeader:
    size = int.from_bytes(memory[8:12], "little")
    if memory[:8] != MAGIC or size > HEADER_BYTES - 12:
        raise IncompatiblePeers(f"engine {engine}: its arena has magic {memory[:8]!r}, expected {MAGIC!r}")
    try:
        return decode_total(_headers, memory[12 : 12 + size])
    except MalformedMessage as error:
        raise IncompatiblePeers(f"engine {engine}: its arena's header cannot be read: {error}") from error
