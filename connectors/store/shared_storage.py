"""The `shared_storage` connector: safetensors files in a directory that all engines see."""

from typing import Annotated

from msgspec import Meta

from pdkv.base.options import Size, option
from pdkv.connectors.store.base import KVStore, StoreConnector, StoreConnectorOptions
from pdkv.kv_store.file_store import FileStore
from pdkv.kv_store.options import StoreOptions

Absolute = Annotated[str, Meta(pattern="^/", extra={"expected": "an absolute path"})]


class SharedStorageOptions(StoreConnectorOptions):
    """Options of every store connector, and the directory of the files."""

    path: Absolute = option(help="directory of the files, an absolute path", metavar="DIRECTORY")
    capacity: Size | None = option(None, "maximum size of all files, such as 10GiB (default: unlimited)")

    def open_store(self) -> KVStore:
        """Raises ConfigError for a path that cannot be read and written."""
        return FileStore(self.path, StoreOptions(capacity=self.capacity))


class SharedStorageConnector(StoreConnector):
    """A store connector over a FileStore."""

    options_type = SharedStorageOptions
    options: SharedStorageOptions
