"""The --connector-config options that all store connectors have."""

from collections.abc import Iterable

from pdkv.base.options import Natural, Options, Positive, Seconds, Size, Threads, option
from pdkv.connectors.base import LoadMode
from pdkv.errors import ConfigError
from pdkv.kv_store.base import KVStore
from pdkv.kv_store.codecs.base import Codec
from pdkv.kv_store.codecs.registry import make_codec


class StoreConnectorOptions(Options):
    """Base of a store connector's options: how KV is cut, found, loaded and saved. A subclass adds options of its own,
    and opens the store.
    """

    tokens_per_value: Positive = option(
        64, "tokens stored together, a multiple of 16; must be the same on all engines that share the store"
    )
    layer_groups: Natural = option(
        0, "groups of layers into which stored KV is cut, the same on all engines; 0: 1, or 4 with load=layerwise"
    )
    load: LoadMode = option(
        "async", "async: requests wait outside the batch; layerwise: they compute while layers arrive"
    )
    min_hit_tokens: Natural = option(
        64, "minimum number of matching tokens to load; shorter matches are computed, but hand-offs are always loaded"
    )
    lookup_timeout_s: Seconds = option(1.0, "a lookup that takes longer counts as a miss")
    transfer_timeout_s: Seconds = option(10.0, "deadline of a load or a save, counted from its start")
    layer_timeout_s: Seconds = option(2.0, "how long a forward pass waits for layerwise loads, for all layers together")
    io_threads: Threads = option(2, "number of threads for loads")
    save_threads: Threads = option(1, "number of threads for saves")
    staging_bytes: Size | None = option(
        None,
        "size of each thread's buffer, at least one value (default: 4 MiB, and at least eight values for stores that "
        "take a request per value, such as buckets)",
    )
    max_save_bytes: Size = option(
        256 << 20,
        "maximum KV waiting to be saved, at most a quarter of the pool; beyond it, only hand-offs are saved at once",
    )
    known_for_s: Seconds = option(30.0, "how long a value is assumed to be still stored, since the store may evict it")
    codec: str = option(
        "raw",
        "encoding of stored KV: raw, or one of the lossy codecs fp8, int8 and cachegen; the same on all engines",
        metavar="NAME",
    )
    codec_level: Natural | None = option(None, "coarseness of the codec; 0: finest (default: the codec's own)")
    codec_deadline_s: Seconds | None = option(
        None, "also store the coarsest level; if a load would take longer than this, load that level or compute the KV"
    )
    sign: bool = option(False, "sign values, and read only those with a valid signature; the same on all engines")
    sign_key_file: str = option(
        "", "file with the secret for signatures (default: the variable PDKV_STORE_SIGN_KEY)", metavar="FILE"
    )

    def make_codecs(self) -> list[Codec]:
        """The forms in which each value is stored, the finest first.

        Raises:
            ConfigError: unknown codec or level, or a deadline without levels to choose from.
        """
        codec = make_codec(self.codec, self.codec_level)
        if self.codec_deadline_s is None:
            return [codec]
        if codec.level == codec.levels[-1]:
            raise ConfigError(f"codec_deadline_s: codec={codec.name} has no level coarser than {codec.level} to choose")
        if self.load == "layerwise":
            raise ConfigError(
                "codec_deadline_s requires load=async, since otherwise a forward pass waits for its layers"
            )
        return [codec, make_codec(self.codec, codec.levels[-1])]

    def probed_stores(self) -> Iterable[KVStore]:
        """Stores that others must keep running for this connector to work, opened for a look and closed by the
        caller, one after the other.
        """
        return (self.open_store(),)

    def open_store(self) -> KVStore:
        """The store, whose methods may block: they are called on I/O threads. Called once in each process, at start.

        Connects on first use: a server that is down now may come up.

        Raises:
            ConfigError: a wrong option, or a package that is missing.
            StoreError: it cannot be opened.
        """
        raise NotImplementedError
