"""Controls which freed memory glibc's malloc keeps and which it returns; no effect with other C libraries."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # mallopt's names of the parameters


def set_malloc(*, mmap_threshold: int, trim_threshold: int, max_arenas: int | None = None) -> bool:
    """Set for this process. Call it before there are threads.

    Args:
        mmap_threshold: allocations of this size or more are mapped separately, and returned as soon as they are freed.
        trim_threshold: free bytes at the heap's end above which they are returned.
        max_arenas: heaps that threads share; None: glibc's own choice, eight per core.

    Returns:
        Whether it took effect: False without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = [(_MMAP_THRESHOLD, mmap_threshold), (_TRIM_THRESHOLD, trim_threshold)]
    if max_arenas is not None:
        settings.append((_ARENA_MAX, max_arenas))
    return all(mallopt(name, value) for name, value in settings)


def give_back_freed() -> None:
    """Return all free pages to the system, including those between allocations, whatever `set_malloc` keeps."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
