"""Huge pages: for memory that other processes copy from or to, and for what every step reads.

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
_ALIGNMENT = 64  # of what is taken: a line of a cache
_MADV_COLLAPSE = 25  # linux/mman.h, since Linux 6.1


def use_huge_pages(address: int, num_bytes: int) -> bool:
    """Put private memory into huge pages, now and what is touched later; its content stays. False: as it was.

    Only whole huge pages inside of the region are taken. Takes as long as a copy of what is in the region.
    """
    first = -(-address // _HUGE_BYTES) * _HUGE_BYTES
    size = (address + num_bytes) // _HUGE_BYTES * _HUGE_BYTES - first
    if size <= 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for advice in (mmap.MADV_HUGEPAGE, _MADV_COLLAPSE):
        if libc.madvise(first, size, advice) != 0:  # the system has none, or none left: it works without
            logger.debug("madvise(%d) of %d bytes: %s", advice, size, os.strerror(ctypes.get_errno()))
            return False
    return True


class HugeMemory:
    """Memory for what is kept and read again and again, as weights: side by side, in huge pages where there are any.

    What is small by itself lies in a region with others. A region goes back to the system when nothing of it is held.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: weakref.ref[mmap.mmap] | None = None
        self._used = 0

    def take(self, num_bytes: int) -> memoryview:
        """So many bytes of 0 at a multiple of 64, for as long as somebody holds them. Raises OSError: no memory."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            region = None if self._region is None else self._region()
            if region is None or self._used + size > len(region):
                region = _map(max(size, _REGION_BYTES))
                if size > _REGION_BYTES // 2:  # the rest of the region before is for smaller ones
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
