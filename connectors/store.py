"""The `store` connector: KV in any store that kv_store/ opens by URL; several URLs make tiers, fastest first."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.store_base import StoreConnector
from pdkv.errors import ConfigError
from pdkv.kv_store.base import KVStore


class StoreUrlConnector(StoreConnector):
    """Options: url=URL[,URL…], those of TransferOptions, and those of the stores, which are passed on."""

    option_types: ClassVar[Mapping[str, Callable[[str], Any]] | None] = None

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None]) -> None:
        """Raises ConfigError without a URL."""
        super().__init__(config, notify)
        if not self.store_options.get("url"):
            raise ConfigError("connector store needs --connector-config url=URL, such as file:///var/cache/kv")

    def open_store(self) -> KVStore:
        from pdkv.kv_store.registry import open_store

        options = dict(self.store_options)
        return open_store(options.pop("url"), options)
