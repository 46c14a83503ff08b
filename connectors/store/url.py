"""The `store` connector: KV in any store that kv_store/ opens by URL; several URLs make tiers, fastest first."""

from collections.abc import Mapping

from pdkv.connectors.base import KVConnector
from pdkv.connectors.store.base import KVStore, StoreConnector, TransferOptions
from pdkv.kv_store.options import StoreOptions
from pdkv.kv_store.registry import StorePlan, plan_store
from pdkv.options import option


class StoreUrlOptions(TransferOptions, StoreOptions):
    """Those of every store connector, and those of the stores, which the URLs must know."""

    url: str = option(
        help="redis://host:port/db, rediss://…, unix:///socket, lmcache://host:port, file:///directory, memory://; "
        "several, separated by commas, are tiers, the fastest first",
        metavar="URL[,URL…]",
    )


class StoreUrlConnector(StoreConnector):
    """Its option `url` says which store."""

    options_type = StoreUrlOptions
    options: StoreUrlOptions

    @classmethod
    def for_options(cls, options: Mapping[str, str]) -> type[KVConnector]:
        """Raises ConfigError without a URL, for one that no store has, and for an option that no URL knows."""
        connector = super().for_options(options)
        cls._plan(options)
        return connector

    @staticmethod
    def _plan(options: Mapping[str, str]) -> StorePlan:
        return plan_store(options["url"], {k: v for k, v in options.items() if k in StoreOptions.names()})

    def open_store(self) -> KVStore:
        return self._plan(self.config.options).open()
