"""glibc's malloc and freed memory: what it keeps, and what it gives back; with other C libraries nothing is changed."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # mallopt's names for what it sets


def set_malloc(*, mmap_threshold: int, trim_threshold: int, max_arenas: int | None = None) -> bool:
    """Set for this process. Call it before there are threads.

    Args:
        mmap_threshold: allocations from so many bytes on are mapped one by one, and go back as soon as they are freed.
        trim_threshold: as many free bytes at the heap's end are given back.
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
    """Return all free pages to the system, those between allocations included, whatever `set_malloc` keeps."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
