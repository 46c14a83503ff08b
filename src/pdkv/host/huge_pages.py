"""Huge pages, for memory that other processes copy from or to, and for data that every step reads.

The kernel pins memory page by page: a copy between processes takes half the time with pages of 2 MiB. And a processor
looks up every page that it reads: decode steps over weights and KV in pages of 4 KiB took a sixth longer.
"""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache

logger = logging.getLogger(__name__)

HUGE_BYTES = 2 * 1024 * 1024
_REGION_BYTES = 64 * 1024 * 1024
_MOST_AT_ONCE = 8  # CPUs that get huge pages at once: getting them takes longer than filling them
_ALIGNMENT = 64  # alignment of allocations: a cache line
_MADV_COLLAPSE = 25  # linux/mman.h, since Linux 6.1
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


def aligned(num_bytes: int) -> int:
    """What an allocation of so many bytes takes: whole cache lines."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def use_huge_pages(address: int, num_bytes: int) -> bool:
    """Put memory into huge pages, including pages touched later; its content stays. False: nothing changed.

    Only whole huge pages inside of the region are used. Takes as long as a copy of the region's content.
    """
    first = -(-address // HUGE_BYTES) * HUGE_BYTES
    size = (address + num_bytes) // HUGE_BYTES * HUGE_BYTES - first
    if size <= 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    # If the system has none, or none left, it works without.
    return madvise(first, size, mmap.MADV_HUGEPAGE) and madvise(first, size, _MADV_COLLAPSE)


def madvise(address: int, num_bytes: int, advice: int) -> bool:
    """madvise(2), without the GIL. False: refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.madvise(address, num_bytes, advice) == 0:
        return True
    logger.debug("madvise(%d) of %d bytes: %s", advice, num_bytes, os.strerror(ctypes.get_errno()))
    return False


class HugeMemory:
    """Memory for data that is kept and read again and again, such as weights, in huge pages if available.

    Small allocations share a region. A region is returned to the system when none of its allocations is held.
    """

    is_filled = False
    """Whether what is taken has its content already, and cannot be written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: weakref.ref[mmap.mmap] | None = None
        self._used = 0

    def take(self, num_bytes: int) -> memoryview:
        """Take zeroed bytes, aligned to 64, which live as long as they are referenced. Raises OSError: no memory."""
        size = aligned(num_bytes)
        with self._lock:
            region = None if self._region is None else self._region()
            if region is None or self._used + size > len(region):
                region = _map(max(size, _REGION_BYTES))
                if size > _REGION_BYTES // 2:  # the rest of the previous region is for smaller ones
                    return memoryview(region)[:num_bytes]
                self._region, self._used = weakref.ref(region), 0
            start, self._used = self._used, self._used + size
            return memoryview(region)[start : start + num_bytes]


def _map(num_bytes: int) -> mmap.mmap:
    region = mmap.mmap(-1, -(-num_bytes // HUGE_BYTES) * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            region.madvise(mmap.MADV_HUGEPAGE)
    return region


def map_shared(fd: int, num_bytes: int, *, writable: bool) -> memoryview:
    """Map a memfd, which may still be shorter, at a multiple of a huge page, so that it can be mapped in huge pages.

    Owns the descriptor: it is closed once nothing refers to the map. Raises OSError.
    """
    try:
        room = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError:
        os.close(fd)
        raise
    weakref.finalize(room, os.close, fd)
    view = memoryview(room)[-address_of(memoryview(room)) % HUGE_BYTES :][:num_bytes]
    map_again(view, fd, writable=writable)
    return view


def map_again(view: memoryview, fd: int, *, writable: bool) -> None:
    """Map a memfd in the place of a map of `map_shared`. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if libc.mmap(address_of(view), len(view), protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address_of(view):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def address_of(view: memoryview) -> int:
    """Where memory lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def extend_shared(fd: int, view: memoryview, start: int, end: int) -> bool:
    """Give the bytes from `start` to `end` of a memfd memory, both multiples of a huge page. False: in small pages.

    Raises:
        OSError: there is no memory, no room in the map, or no thread.
    """
    if end > len(view):
        raise OSError(errno.ENOMEM, f"a map of {len(view)} bytes is full")
    os.ftruncate(fd, end)
    for at in range(start, end, HUGE_BYTES):
        os.posix_fallocate(fd, at, 1)  # what has no page at all does not become a huge one
    count = min(len(os.sched_getaffinity(0)), _MOST_AT_ONCE)
    step = -(-(end - start) // HUGE_BYTES // count) * HUGE_BYTES
    parts = [(address_of(view[at:]), min(step, end - at)) for at in range(start, end, step)]
    try:
        with ThreadPoolExecutor(count) as threads:
            if all(threads.map(use_huge_pages, *zip(*parts, strict=True))):
                return True
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from None
    os.posix_fallocate(fd, start, end - start)  # otherwise a page that cannot be allocated becomes a SIGBUS later
    return False


@cache
def can_share_huge_pages() -> bool:
    """Whether this kernel gives memfds huge pages (Linux 6.1). Tries one."""
    try:
        fd = os.memfd_create("pdkv-probe", os.MFD_CLOEXEC)
        return extend_shared(fd, map_shared(fd, HUGE_BYTES, writable=True), 0, HUGE_BYTES)
    except OSError:
        return False
