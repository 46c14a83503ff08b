"""--connector-config that all store connectors have."""

from pdkv.base.options import Natural, Options, Positive, Seconds, Size, Threads, option
from pdkv.connectors.base import LoadMode
from pdkv.errors import ConfigError
from pdkv.kv_store.base import KVStore
from pdkv.kv_store.codecs.base import Codec
from pdkv.kv_store.codecs.registry import make_codec


class StoreConnectorOptions(Options):
    """Base of the options of one store connector: how it cuts, finds, loads and saves, what a subclass adds, and the
    store that all of them name.
    """

    tokens_per_value: Positive = option(
        64, "tokens stored together, a multiple of 16; the same on all engines that share the store"
    )
    layer_groups: Natural = option(
        0, "parts by layers of what is stored, the same on all engines; 0: 1, or 4 for load=layerwise"
    )
    load: LoadMode = option("async", "async: wait outside the batch; layerwise: compute while layers come in")
    min_hit_tokens: Natural = option(64, "a shorter find is computed rather than loaded; hand-offs are always loaded")
    lookup_timeout_s: Seconds = option(1.0, "a lookup that takes longer counts as a miss")
    transfer_timeout_s: Seconds = option(10.0, "deadline of a load or a save, from its start")
    layer_timeout_s: Seconds = option(2.0, "how long a forward pass waits for layerwise loads, all layers together")
    io_threads: Threads = option(2, "threads that load")
    save_threads: Threads = option(1, "threads that save")
    staging_bytes: Size | None = option(
        None,
        "size of each thread's buffer, at least one value; absent: 4 MiB, and eight values where a store is asked for "
        "each by itself, as a bucket",
    )
    max_save_bytes: Size = option(
        256 << 20,
        "KV on its way to the store, at most a quarter of the pool; beyond it only hand-offs are saved at once",
    )
    known_for_s: Seconds = option(30.0, "how long a value is believed to be stored: the store may evict it")
    codec: str = option(
        "raw", "form of the KV: raw, or with errors fp8, int8, cachegen; the same on all engines", metavar="NAME"
    )
    codec_level: Natural | None = option(None, "how coarse, from 0; absent: the codec's default")
    codec_deadline_s: Seconds | None = option(
        None, "store the coarsest level too, and load it, or compute, where a load would take longer than this"
    )
    sign: bool = option(False, "sign values, and read only those with the right signature; the same on all engines")
    sign_key_file: str = option(
        "", "file of the secret; empty: the variable PDKV_STORE_SIGN_KEY has it", metavar="FILE"
    )

    def make_codecs(self) -> list[Codec]:
        """The forms in which each value is stored, the finest first.

        Raises:
            ConfigError: no such codec or level, or a deadline and nothing to choose from.
        """
        codec = make_codec(self.codec, self.codec_level)
        if self.codec_deadline_s is None:
            return [codec]
        if codec.level == codec.levels[-1]:
            raise ConfigError(f"codec_deadline_s: codec={codec.name} has no level behind {codec.level} to choose")
        if self.load == "layerwise":
            raise ConfigError("codec_deadline_s: a forward pass waits for its layers, so load=async is needed")
        return [codec, make_codec(self.codec, codec.levels[-1])]

    def open_store(self) -> KVStore:
        """The store, whose methods may block: they are called on I/O threads. Called once in each process, at start.

        Connects on first use: a server that is down now may come up.

        Raises:
            ConfigError: a wrong option, or a package that is missing.
            StoreError: it cannot be opened.
        """
        raise NotImplementedError
