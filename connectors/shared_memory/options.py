"""What --connector-config of `shared_memory` may hold."""

from pdkv.base.options import Options, Positive, Seconds, Threads, option


class SharedMemoryOptions(Options):
    """--connector-config of this connector."""

    io_threads: Threads | None = option(None, "threads that copy; absent: 1, or 4 on a GPU")
    min_hit_tokens: Positive = option(64, "a shorter find in another engine's cache is computed, not copied")
    load_timeout_s: Seconds = option(10.0, "deadline of one copy, from its start")
    content_lookup: bool = option(True, "whether the caches of other engines are searched at all")
