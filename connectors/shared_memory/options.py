"""What --connector-config of `shared_memory` may hold."""

from pdkv.base.options import MAX_THREADS, Options, option, seconds


class SharedMemoryOptions(Options):
    """--connector-config of this connector."""

    io_threads: int | None = option(None, "threads that copy; absent: 1, or 4 on a GPU", ge=1, le=MAX_THREADS)
    min_hit_tokens: int = option(64, "a shorter find in another engine's cache is computed, not copied", ge=1)
    load_timeout_s: float = seconds(10.0, "deadline of one copy, from its start")
    content_lookup: bool = option(True, "whether the caches of other engines are searched at all")
