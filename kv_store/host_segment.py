"""A segment of host memory with values: one process writes it while others read it without a lock.

| bytes | |
|---|---|
| header, 4096 | magic, bytes of a page, number of pages |
| entries, 64 each | one per value, as many as pages: `_ENTRY` |
| chains | int32 per page: the value's next page; int32 per entry: the bucket's next one, plus 1 |
| buckets | int32 each: the first entry, plus 1, of the keys whose lowest bits are its number |
| pages | of the values, from a multiple of 4096 on; memory is taken when a page is first written |

An entry's version is even while it holds a value, and odd, or 0, while it does not. A reader checks the version before
and after it reads: if it has changed, what was read may be another value's, and is a miss. So a writer that dies leaves
nothing half visible, and its successor continues with every complete entry.

The index is mapped. Values are written by system calls, and read by them, too, which fail where a mapping would end the
process; from a file that cannot be shortened, such as a launch's, they are copied from a mapping in half the time.
"""

import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from pdkv.base.clock import unix_time
from pdkv.errors import StoreUnavailable
from pdkv.host.fence import fence
from pdkv.kv_store.base import PART_BYTES, Buffer, LockPages, Scattered
from pdkv.kv_store.terms import NO_TERMS, Terms

MAGIC: Final = b"pdkvHS01"
PAGE_BYTES: Final = 64 << 10
MIN_BYTES: Final = 1 << 20
LAST_END: Final = 2**32 - 1
"""The latest time, in 2106, at which an entry can say that a value expires."""

_HEADER = struct.Struct("<8sQQ")
_HEADER_BYTES = 4096
_MAX_STEPS = 256  # along a bucket, which a dying writer may have left in a circle
_ENTRY = np.dtype(
    [
        ("version", "<u8"),
        ("key", "<u8", 2),
        ("size", "<u8"),
        ("first_page", "<i4"),
        ("expires_at", "<u4"),  # unix time in seconds, from which on it is not there any more; 0: it stays
        ("stamp", "<u8"),  # of its last use: the order in which a successor finds values
        ("check", "<u8"),  # over key, size, pages and terms
        ("owner", "<u8"),  # owner; 0: unknown
    ]
)
assert _ENTRY.itemsize == 64

Key = tuple[int, int]
"""128 bits made of a key."""


def key_of(key: bytes) -> Key:
    """The hash of a key; two keys with the same hash are taken for one, which readers notice when they verify
    values.
    """
    number = xxhash.xxh3_128_intdigest(key)
    return number & 0xFFFFFFFFFFFFFFFF, number >> 64


class Found(NamedTuple):
    """A value at its last known place."""

    entry: int
    version: int
    size: int
    first_page: int


class Segment:
    """A mapped segment. It is closed with its last reference, which every reader holds, so references can be dropped at
    any time. The caller must not close it while it is read.
    """

    def __init__(self, fd: int, *, writable: bool, unix_time: Callable[[], float] = unix_time) -> None:
        """Takes ownership of the descriptor. `unix_time`: the clock by which values expire.

        Raises:
            StoreUnavailable: it is not a segment of this version, or is shorter than its header says.
            OSError: it cannot be mapped.
        """
        self.fd = fd
        self.unix_time = unix_time
        self._close = weakref.finalize(self, os.close, fd)
        try:
            self.num_pages = _read_header(fd)
            shape = _Shape(self.num_pages)
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._memory = mmap.mmap(fd, shape.pages_at, access=access)
            self._pages = _map_pages(fd, shape, access)
        except BaseException:
            self._close()
            raise
        view = memoryview(self._memory)
        self.entries: npt.NDArray[Any] = np.frombuffer(view, _ENTRY, self.num_pages, shape.entries_at)
        self.versions: npt.NDArray[np.uint64] = self.entries["version"]
        self.next_page = np.frombuffer(view, np.int32, self.num_pages, shape.next_page_at)
        self.next_entry = np.frombuffer(view, np.int32, self.num_pages, shape.next_entry_at)
        self.buckets = np.frombuffer(view, np.int32, shape.num_buckets, shape.buckets_at)
        self._pages_at = shape.pages_at
        self._unlock: weakref.finalize[[], Segment] | None = None

    def lock_pages(self, lock: LockPages) -> None:
        """Page-lock all of it, once, as `KVStore.lock_pages`; it is unlocked with `close`."""
        if self._pages is not None and self._unlock is None and (unlock := lock(self._pages)) is not None:
            self._unlock = weakref.finalize(self, unlock)
            self._unlock.atexit = False  # the driver has gone by then

    def view(self, found: Found) -> memoryview | None:
        """A value in its place; None: it lies in several, or is not page-locked (any more)."""
        runs = list(self._runs(found)) if self._unlock is not None and self._unlock.alive else []
        if len(runs) != 1 or self._pages is None:
            return None
        offset, size = runs[0]
        return memoryview(self._pages[offset : offset + size].data)

    def bucket_of(self, key: Key) -> int:
        """The bucket that a key's entry is in."""
        return key[0] & (len(self.buckets) - 1)

    def may_have(self, lows: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """For the lower halves of keys: False if `find` would find nothing, since their buckets are empty, as
        most are.
        """
        may_have: npt.NDArray[np.bool_] = self.buckets[lows & np.uint64(len(self.buckets) - 1)] != 0
        return may_have

    def find(self, key: Key) -> Found | None:
        """The place of a key's value."""
        number = int(self.buckets[self.bucket_of(key)])
        for _ in range(_MAX_STEPS):
            if not 0 < number <= self.num_pages:
                return None
            entry = number - 1
            version = int(self.versions[entry])
            fence()
            fields = self.entries[entry]
            if version and not version & 1 and (int(fields["key"][0]), int(fields["key"][1])) == key:
                if (expires_at := int(fields["expires_at"])) and expires_at <= self.unix_time():
                    return None
                return Found(entry, version, int(fields["size"]), int(fields["first_page"]))
            number = int(self.next_entry[entry])
        return None

    def is_there(self, found: Found) -> bool:
        """Whether the value is still there; if so, data read before this call is valid."""
        fence()
        return int(self.versions[found.entry]) == found.version

    def read(self, found: Found, out: Scattered, arrived: Callable[[int], None]) -> bool:
        """Read a value into buffers of its size; `arrived` is called with its progress. False: it is gone."""
        assert found.size == len(out)
        stop = 0
        for offset, size in self._runs(found):
            for start in range(offset, offset + size, PART_BYTES):
                stop_here = stop + min(PART_BYTES, offset + size - start)
                if not self._read_part(start, out.stretch(stop, stop_here)):
                    return False
                stop = stop_here
                arrived(stop)
        return stop == found.size and self.is_there(found)

    def _read_part(self, offset: int, targets: Iterable[Buffer]) -> bool:
        """Read the content, one target after the other."""
        for target in targets:
            if self._pages is not None:
                np.copyto(np.frombuffer(target, np.uint8), self._pages[offset : offset + len(target)])
            elif not _read_all(self.fd, target, offset):
                return False
            offset += len(target)
        return True

    def write(self, pages: list[int], value: Buffer) -> None:
        """Write a value across these pages. Raises OSError if there is no memory."""
        done = 0
        for offset, size in _joined(pages, self._pages_at, value.nbytes):
            while size:
                written = os.pwrite(self.fd, value[done : done + size], offset)
                done, offset, size = done + written, offset + written, size - written

    def pages_of(self, found: Found) -> list[int] | None:
        """A value's pages; None: they are not valid, since the value is gone or its writer is damaged."""
        pages, page = [], found.first_page
        if found.size > self.num_pages * PAGE_BYTES:
            return None
        for _ in range(num_pages_for(found.size)):
            if not 0 <= page < self.num_pages:
                return None
            pages.append(page)
            page = int(self.next_page[page])
        return pages

    def close(self) -> None:
        """Idempotent."""
        if self._unlock is not None:
            self._unlock()
        self._close()  # the mapping goes with its last view
        self.fd = -1

    def _runs(self, found: Found) -> Iterator[tuple[int, int]]:
        yield from _joined(self.pages_of(found) or [], self._pages_at, found.size)


class _Shape:
    """Offsets in a segment."""

    def __init__(self, num_pages: int) -> None:
        self.num_buckets = 1 << max(num_pages - 1, 1).bit_length()
        self.entries_at = _HEADER_BYTES
        self.next_page_at = self.entries_at + num_pages * _ENTRY.itemsize
        self.next_entry_at = self.next_page_at + 4 * num_pages
        self.buckets_at = self.next_entry_at + 4 * num_pages
        self.pages_at = -(-(self.buckets_at + 4 * self.num_buckets) // 4096) * 4096
        self.num_bytes = self.pages_at + num_pages * PAGE_BYTES


def num_pages_for(num_bytes: int) -> int:
    """Number of pages of a value; an empty value has one, too."""
    return max(-(-num_bytes // PAGE_BYTES), 1)


def format_segment(fd: int, capacity: int) -> None:
    """Make an empty file a segment for values of `capacity` bytes; its index takes memory at once, its pages do not.

    Raises:
        OSError: there is no memory for the index.
    """
    num_pages = capacity // PAGE_BYTES
    shape = _Shape(num_pages)
    os.ftruncate(fd, shape.num_bytes)
    os.posix_fallocate(fd, 0, shape.pages_at)  # otherwise a page that cannot be allocated becomes a SIGBUS later
    os.pwrite(fd, _HEADER.pack(MAGIC, PAGE_BYTES, num_pages), 0)


def check_of(key: Key, size: int, pages: list[int], terms: Terms = NO_TERMS) -> int:
    """The value of an entry's `check`, covering the rest of it except the version and the stamp."""
    limits = [terms.expires_at, terms.owner] if terms.expires_at or terms.owner else []
    fields = np.array([*key, size, *pages, *limits], np.uint64)
    return int(xxhash.xxh3_64_intdigest(fields.tobytes()))


def _read_header(fd: int) -> int:
    """The number of pages."""
    data = os.pread(fd, _HEADER.size, 0)
    magic, page_bytes, num_pages = _HEADER.unpack(data) if len(data) == _HEADER.size else (data, 0, 0)
    if magic != MAGIC or page_bytes != PAGE_BYTES or not 0 < num_pages < 1 << 31:
        raise StoreUnavailable(f"host memory: expected a segment to begin with {MAGIC!r}, got {data[:8]!r}")
    if os.fstat(fd).st_size != _Shape(num_pages).num_bytes:
        size, expected = os.fstat(fd).st_size, _Shape(num_pages).num_bytes
        raise StoreUnavailable(f"host memory: a segment of {num_pages} pages has {size} bytes, expected {expected}")
    return int(num_pages)


def _map_pages(fd: int, shape: _Shape, access: int) -> npt.NDArray[np.uint8] | None:
    """Map all of a segment; None: it could be shortened, which would end the process, or there is
    no room.
    """
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return None
        return np.frombuffer(mmap.mmap(fd, shape.num_bytes, access=access), np.uint8)
    except OSError:  # a file that is no memfd has no seals
        return None


def _joined(pages: list[int], pages_at: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of consecutive pages, as far as the value goes."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            size = min((i - start) * PAGE_BYTES, num_bytes - start * PAGE_BYTES)
            yield pages_at + pages[start] * PAGE_BYTES, size
            start = i


def _read_all(fd: int, out: Buffer, offset: int) -> bool:
    done = 0
    while done < len(out):
        count = os.preadv(fd, [out[done:]], offset + done)
        if not count:
            return False
        done += count
    return True
