"""--connector-config of `shared_memory`."""

from pdkv.base.options import Options, Positive, Seconds, Threads, option


class SharedMemoryOptions(Options):
    """Options of the `shared_memory` connector."""

    io_threads: Threads | None = option(None, "number of threads that copy (default: 1, or 4 on a GPU)")
    min_hit_tokens: Positive = option(
        64, "minimum number of matching tokens in another engine's cache to copy; shorter matches are computed"
    )
    load_timeout_s: Seconds = option(10.0, "deadline of one copy, counted from its start")
    content_lookup: bool = option(True, "search the caches of other engines")
