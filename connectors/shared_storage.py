"""The `shared_storage` connector: safetensors files in a directory that all engines see."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from urllib.parse import quote

from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.store_base import StoreConnector
from pdkv.errors import ConfigError
from pdkv.kv_store.base import KVStore


class SharedStorageConnector(StoreConnector):
    """Options: path=DIRECTORY, capacity=SIZE (such as 10GiB), and those of TransferOptions."""

    option_types: ClassVar[Mapping[str, Callable[[str], Any]] | None] = {"path": str, "capacity": str}

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None]) -> None:
        """Raises ConfigError without an absolute path."""
        super().__init__(config, notify)
        if not self.store_options.get("path", "").startswith("/"):
            raise ConfigError(
                "connector shared_storage needs --connector-config path=DIRECTORY, absolute and seen by all engines"
            )

    def open_store(self) -> KVStore:
        from pdkv.kv_store.registry import open_store

        options = dict(self.store_options)
        return open_store(f"file://{quote(options.pop('path'))}", options)
