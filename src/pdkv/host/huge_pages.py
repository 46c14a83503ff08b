"""Huge pages, for memory that other processes copy from or to, and for data that every step reads.

The kernel pins memory page by page: a copy between processes takes half the time with pages of 2 MiB. And a processor
looks up every page that it reads: decode steps over weights and KV in pages of 4 KiB took a sixth longer.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import weakref

logger = logging.getLogger(__name__)

_HUGE_BYTES = 2 * 1024 * 1024
_REGION_BYTES = 64 * 1024 * 1024
_ALIGNMENT = 64  # alignment of allocations: a cache line
_MADV_COLLAPSE = 25  # linux/mman.h, since Linux 6.1


def use_huge_pages(address: int, num_bytes: int) -> bool:
    """Put private memory into huge pages, including pages touched later; its content stays. False: nothing changed.

    Only whole huge pages inside of the region are used. Takes as long as a copy of the region's content.
    """
    first = -(-address // _HUGE_BYTES) * _HUGE_BYTES
    size = (address + num_bytes) // _HUGE_BYTES * _HUGE_BYTES - first
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

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: weakref.ref[mmap.mmap] | None = None
        self._used = 0

    def take(self, num_bytes: int) -> memoryview:
        """Take zeroed bytes, aligned to 64, which live as long as they are referenced. Raises OSError: no memory."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
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
    region = mmap.mmap(-1, -(-num_bytes // _HUGE_BYTES) * _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            region.madvise(mmap.MADV_HUGEPAGE)
    return region
