"""The `lmcache` connector: KV in LMCache's own chunks, which engines with LMCache find, and whose chunks it finds.

A chunk is one value: all layers and heads of one worker, without a checksum. Its key contains the model's name and a
hash of tokens, but nothing of the weights, and no salt. So loaded KV is only as trustworthy as everyone who can write
to the server.
"""

import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

import msgspec
import numpy as np
from msgspec import Meta

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.base.options import Seconds, option
from pdkv.connectors.base import (
    ASK_AGAIN,
    BlockTables,
    ConnectorConfig,
    KVConnectorMetadata,
    MatchedTokens,
    RequestView,
    SchedulerConnector,
    SchedulerView,
    TransferKey,
)
from pdkv.connectors.store.base import StoreConnector, StoreConnectorOptions
from pdkv.connectors.store.coding import ValueCoder
from pdkv.connectors.store.envelope import ENVELOPE_BYTES, Check, Sealer
from pdkv.connectors.store.lmcache_keys import ChunkKeys, HashName
from pdkv.connectors.store.lookup import KeyLookups
from pdkv.connectors.store.news import StoreNews
from pdkv.connectors.store.orders import StoreTiers
from pdkv.connectors.store.plan import StoreCut, Value
from pdkv.connectors.store.scheduler import StoreScheduler
from pdkv.errors import ConfigError
from pdkv.kv_store.base import Buffer, KVStore, Scattered
from pdkv.kv_store.codecs.base import Bytes, Codec, PartShape
from pdkv.kv_store.lmcache_chunks import DTYPES, ChunkForm, LMCacheChunks
from pdkv.kv_store.options import StoreOptions
from pdkv.wire.tiers import CacheOrder


class LMCacheOptions(StoreConnectorOptions):
    """Options of every store connector, and the settings of the engines that run LMCache."""

    url: str = option(help="URL of LMCache's server: lmcache://host:port", metavar="URL")
    model_name: str = option(
        help="the model's name as given to the engines with LMCache; for a path, exactly as written there",
        metavar="NAME",
    )
    tokens_per_value: Annotated[int, Meta(ge=HASH_BLOCK_SIZE)] = option(256, "LMCache's chunk_size, a multiple of 16")
    hash: HashName = option(
        help="LMCache's pre_caching_hash_algorithm; with builtin, colliding prompts are easy to construct"
    )
    hash_seed: str = option(
        "",
        "PYTHONHASHSEED of the engines with LMCache, which must be set; empty: they run without vLLM",
        metavar="TEXT",
    )
    connect_timeout_s: Seconds = option(2.0, "deadline for connecting")
    operation_timeout_s: Seconds = option(10.0, "deadline of one call, whatever the size of its batch")

    @classmethod
    def parse(cls, texts: Mapping[str, str], *, only: Collection[str] | None = None) -> Self:
        """Raises ConfigError if the URL is not one of an LMCache server."""
        options = super().parse(texts, only=only)
        options.address()
        return options

    def open_store(self) -> KVStore:
        """The store, used only to see whether the server answers: the content of a chunk depends on the model."""
        return self.open_chunks(1, "float32", (2, 1, self.tokens_per_value, 1))

    def open_chunks(self, world_size: int, dtype: str, shape: tuple[int, int, int, int]) -> KVStore:
        """The store of chunks. Raises ConfigError for a model name that no key of LMCache can contain."""
        form = ChunkForm(self.model_name, world_size, dtype, shape)
        timeouts = StoreOptions(connect_timeout_s=self.connect_timeout_s, operation_timeout_s=self.operation_timeout_s)
        return LMCacheChunks(*self.address(), timeouts, form, trailer_bytes=ENVELOPE_BYTES)

    def address(self) -> tuple[str, int]:
        """The server's address. Raises ConfigError if the URL is not one of an LMCache server."""
        try:
            parts = urlsplit(self.url)
            if (
                parts.scheme == "lmcache"
                and parts.hostname
                and parts.port
                and not (parts.path.strip("/") or parts.query)
            ):
                return parts.hostname, parts.port
        except ValueError:
            pass
        raise ConfigError(f"option url: lmcache://host:port was expected, got {self.url!r}")


class LMCacheConnector(StoreConnector):
    """A StoreConnector with LMCache's keys, bodies and store."""

    declares = msgspec.structs.replace(StoreConnector.declares, layouts=("heads", "windows"), positions=("rotated",))
    options_type = LMCacheOptions
    options: LMCacheOptions

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None]) -> None:
        super().__init__(config, notify)
        options, layout = self.options, config.layout
        if options.sign or options.codec != "raw" or options.layer_groups > 1:
            raise ConfigError(
                "LMCache's chunks have no signature, no codec and all layers: remove the options sign, codec and "
                "layer_groups"
            )
        if layout.num_groups > 1 or any(layout.windows):
            raise ConfigError("LMCache's chunks require a model in which all layers see all tokens")
        if layout.dtype not in DTYPES:
            raise ConfigError(f"LMCache's chunks support KV in {', '.join(DTYPES)}, not in {layout.dtype}")
        self.sealer = Unsealed()
        codec = ChunkCodec()
        self.coder = ValueCoder([codec], layout)
        self.cut = ChunkCut(config, options, codec.identity)

    def open_store(self) -> KVStore:
        layout, shards = self.config.layout, self.cut.cut.kv_shards
        width = layout.kv_heads_of_all_ranks // shards * layout.head_size
        shape = (2, layout.num_layers, self.options.tokens_per_value, width)
        return self.options.open_chunks(shards, layout.dtype, shape)

    def make_scheduler_side(self) -> SchedulerConnector:
        options = self.options
        try:
            keys = ChunkKeys(options.tokens_per_value, options.hash, options.hash_seed)
        except subprocess.SubprocessError as error:
            raise ConfigError(f"option hash_seed: Python does not accept {options.hash_seed!r}: {error}") from None
        lookups, news = self.make_lookups(), _NoNews(self.store, self.cut)
        return _ChunkScheduler(self.config, options, self.cut, lookups, news, keys, self.notify)


class ChunkCut(StoreCut):
    """Cuts KV into whole chunks only: the end of a prompt that does not fill a chunk is never stored, and decode
    engines compute it.
    """

    def __init__(self, config: ConnectorConfig, options: LMCacheOptions, form: str) -> None:
        engines = f"{form} of {options.model_name}, {options.hash} {options.hash_seed}"
        super().__init__(config, tokens_per_value=options.tokens_per_value, layer_groups=1, codec=engines)
        workers = {self.cut.suffix(shard, 0): b"@%d" % shard for shard in range(self.cut.kv_shards)}
        self.suffixes = list(workers.values())
        self.parts = [[part._replace(suffix=workers[part.suffix]) for part in parts] for parts in self.parts]

    def tails(self, key: TransferKey, num_tokens: int) -> list[Value]:
        return []


class ChunkCodec(Codec):
    """Images of units to (2, num_layers, num_tokens, num_heads * head_size), LMCache's KV_2LTD, and back."""

    name = "lmcache"
    lossy = False
    number = 0

    def max_bytes(self, shape: PartShape) -> int:
        return shape.num_bytes

    def encode(self, images: Bytes, shape: PartShape) -> Bytes:
        shape.check(images)
        units = _numbers(images, shape).reshape(shape.dimensions)
        return np.ascontiguousarray(units.transpose(2, 1, 0, 4, 3, 5)).reshape(-1).view(np.uint8)

    def decode(self, coded: Bytes, shape: PartShape, out: Bytes) -> None:
        shape.check(out)
        tokens = _numbers(coded, shape).reshape(
            2, shape.num_layers, shape.num_units, HASH_BLOCK_SIZE, shape.num_heads, shape.head_size
        )
        units = _numbers(out, shape).reshape(shape.dimensions)
        units[:] = tokens.transpose(2, 1, 0, 4, 3, 5)

    def trim(self, padded: Bytes) -> Bytes:
        return padded


def _numbers(data: Bytes, shape: PartShape) -> "np.ndarray[Any, np.dtype[Any]]":
    """Reinterpreted as integers of the same width, which are never changed."""
    return data.view(np.uint32 if shape.dtype == "float32" else np.uint16)


class Unsealed(Sealer):
    """Accepts every value: values written by LMCache have no envelope that could be checked."""

    def seal(self, key: bytes, value: Buffer, expires_at: int = 0) -> None:
        pass

    def check(self, key: bytes, value: Scattered) -> Check:
        return _Believed(self._hash(b""), value, self._bind, is_signed=False)


class _Believed(Check):
    def arrived(self, stop: int) -> None:
        pass

    def is_whole(self) -> bool:
        return True

    @property
    def expires_at(self) -> int:
        return 0


class _NoNews(StoreNews):
    """Routers know keys of blocks, not of chunks."""

    def _note(self, values: Iterable[Value], *, is_there: bool) -> None:
        pass


class _ChunkTiers(StoreTiers):
    """Orders name keys of blocks, by which no chunks are found."""

    def order(self, order: CacheOrder) -> int:
        return 0


class _ChunkScheduler(StoreScheduler):
    """A StoreScheduler that is shown chunks' keys in place of blocks' keys."""

    def __init__(
        self,
        config: ConnectorConfig,
        options: LMCacheOptions,
        cut: StoreCut,
        lookups: KeyLookups,
        news: StoreNews,
        keys: ChunkKeys,
        notify: Callable[[], None],
    ) -> None:
        super().__init__(config, options, cut, lookups, news)
        self.tiers = _ChunkTiers(news, lookups)
        self._keys = keys
        self._notify = notify

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> MatchedTokens:
        if not self._keys.are_ready(request):
            self._notify()  # the next step continues
            return ASK_AGAIN
        return super().get_num_new_matched_tokens(self._shown(request), num_computed_tokens)

    def update_state_after_alloc(
        self, request: RequestView, block_tables: BlockTables, num_external_tokens: int
    ) -> bytes | None:
        return super().update_state_after_alloc(self._shown(request), block_tables, num_external_tokens)

    def build_connector_meta(self, view: SchedulerView) -> KVConnectorMetadata:
        self._keys.begin_step()
        confirmed = [msgspec.structs.replace(item, request=self._shown(item.request)) for item in view.confirmed]
        unseen = {"waiting_keys": (), "waiting_terms": ()}  # keys of blocks, which cannot be looked up
        return super().build_connector_meta(msgspec.structs.replace(view, confirmed=confirmed, **unseen))

    def _shown(self, request: RequestView) -> RequestView:
        return msgspec.structs.replace(request, block_keys=self._keys.of(request))
