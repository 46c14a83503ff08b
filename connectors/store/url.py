"""The `store` connector: KV in any store that kv_store/ opens by URL; several URLs make tiers, fastest first."""

from collections.abc import Sequence
from typing import ClassVar

from pdkv.connectors.store.base import KVStore, StoreConnector


class StoreUrlConnector(StoreConnector):
    """Options: url=URL[,URL…], those of TransferOptions, and those of the stores, which are passed on."""

    option_names: ClassVar[Sequence[str] | None] = None

    def open_store(self) -> KVStore:
        """Raises ConfigError without a URL, and for one that no store has."""
        from pdkv.kv_store.registry import open_store

        url = self.required_option("url")
        return open_store(url, {name: text for name, text in self.store_options.items() if name != "url"})
