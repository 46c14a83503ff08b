"""How this process' allocator treats large freed pieces."""

import ctypes
import logging

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_HEAP_UP_TO_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Let glibc keep what a step's temporaries freed instead of returning it; False where there is no mallopt.

    Fresh pages cost a fault each: activations of 1 MiB and more would be 10x slower to write than to compute.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        logger.debug("no mallopt in this C library: freed memory goes back to the system")
        return False
    done = mallopt(_M_MMAP_THRESHOLD, _HEAP_UP_TO_BYTES) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    return bool(done)
