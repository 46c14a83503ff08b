"""The `store` connector: KV in any store that kv_store/ opens by URL; several URLs make tiers, fastest first."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.base.options import option, options_of
from pdkv.connectors.base import Requirement
from pdkv.connectors.store.base import KVStore, StoreConnector, StoreConnectorOptions
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.registry import plan_store


class StoreUrlOptions(StoreConnectorOptions, StoreOptions):
    """Those of every store connector, and those of the stores, which the URLs must know."""

    url: str = option(
        help="redis://host:port/db, rediss://…, unix:///socket, lmcache://host:port, mooncake://host:port, "
        "s3://bucket/prefix, gs://…, az://…, file:///directory, host:///directory, memory://; several, separated by "
        "commas, are tiers, the fastest first",
        metavar="URL[,URL…]",
    )

    @classmethod
    def parse(cls, texts: Mapping[str, str], *, only: Collection[str] | None = None) -> Self:
        """Raises ConfigError without a URL, for one that no store has, and for an option that no URL knows."""
        options = super().parse(texts, only=only)
        plan_store(options.url, {name: text for name, text in texts.items() if name in StoreOptions.names()})
        return options

    def open_store(self, clock: Clock = MONOTONIC) -> KVStore:
        """`clock`: of its deadlines."""
        values = {name: (getattr(self, name), item.default) for name, item in options_of(StoreOptions).items()}
        given: dict[str, Any] = {name: value for name, (value, default) in values.items() if value != default}
        return plan_store(self.url, given).open(clock)


class StoreUrlConnector(StoreConnector):
    """Its option `url` says which store."""

    options_type = StoreUrlOptions
    options: StoreUrlOptions

    def open_store(self) -> KVStore:
        return self.options.open_store(self.config.clock)

    @classmethod
    def requirements(cls, options: Mapping[str, str]) -> Sequence[Requirement]:
        url = options.get("url", "redis:// mooncake:// s3://")
        redis = Requirement(["redis"], "pip install 'pdkv[redis]'", "url=redis://…, rediss://… or unix://…")
        objects = Requirement(["obstore"], "pip install 'pdkv[objects]'", "url=s3://…, gs://… or az://…")
        mooncake = Requirement(["mooncake"], "pip install 'pdkv[mooncake]'", "url=mooncake://…")
        named = {"redis|unix://": redis, "mooncake://": mooncake, "(s3|gs|az)://": objects}
        return [requirement for pattern, requirement in named.items() if re.search(pattern, url)]
