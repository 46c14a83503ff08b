"""Ordering of memory accesses, for tables that other processes read without a lock."""

import threading

_FENCE = threading.Lock()
_ACQUIRE, _RELEASE = _FENCE.acquire, _FENCE.release


def fence() -> None:
    """Order the memory accesses before and after it.

    On x86-64 loads are not reordered with loads nor stores with stores, and the lock's atomic instruction is a full
    barrier for the rest. On AArch64 releasing a lock and acquiring it orders what was before with what comes after.
    """
    _ACQUIRE()
    _RELEASE()
    _ACQUIRE()
    _RELEASE()
