"""The `shared_storage` connector: safetensors files in a directory that all engines see."""

from pdkv.base.options import option
from pdkv.connectors.store.base import KVStore, StoreConnector, StoreConnectorOptions
from pdkv.kv_store.file_store import FileStore
from pdkv.kv_store.options import StoreOptions


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("an absolute path")
    return path


class SharedStorageOptions(StoreConnectorOptions):
    """Those of every store connector, and where the files are."""

    path: str = option(help="directory of the files, an absolute path", convert=_absolute, metavar="DIRECTORY")
    capacity: int | None = option(None, "most bytes of files, such as 10GiB; absent: no bound", size=True)

    def open_store(self) -> KVStore:
        """Raises ConfigError for a path that cannot be read and written."""
        return FileStore(self.path, StoreOptions(capacity=self.capacity))


class SharedStorageConnector(StoreConnector):
    """Its store is a FileStore."""

    options_type = SharedStorageOptions
    options: SharedStorageOptions
