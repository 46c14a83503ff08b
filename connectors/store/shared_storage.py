"""The `shared_storage` connector: safetensors files in a directory that all engines see."""

from collections.abc import Sequence
from typing import ClassVar
from urllib.parse import quote

from pdkv.connectors.store.base import KVStore, StoreConnector
from pdkv.errors import ConfigError


class SharedStorageConnector(StoreConnector):
    """Options: path=DIRECTORY, capacity=SIZE (such as 10GiB; none: no bound), and those of TransferOptions."""

    option_names: ClassVar[Sequence[str] | None] = ("path", "capacity")

    def open_store(self) -> KVStore:
        """Raises ConfigError without an absolute path that can be read and written."""
        from pdkv.kv_store.registry import open_store

        path = self.required_option("path")
        if not path.startswith("/"):
            raise ConfigError(f"connector shared_storage needs an absolute path, got {path!r}")
        return open_store(f"file://{quote(path)}", {k: v for k, v in self.store_options.items() if k != "path"})
