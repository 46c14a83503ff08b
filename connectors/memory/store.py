"""Store mode of the `memory` connector: the `store` connector on `memory://`, under the fabric's name."""

import msgspec

from pdkv.connectors.memory.base import MemoryOptions
from pdkv.connectors.store.base import KVStore, StoreConnector, StoreConnectorOptions
from pdkv.kv_store.memory_store import MemoryStore


class MemoryStoreOptions(StoreConnectorOptions, MemoryOptions):
    """--connector-config of mode=store, including the options of every store connector."""

    def open_store(self) -> KVStore:
        return MemoryStore(self.fabric)


class MemoryStoreConnector(StoreConnector):
    """The connector in store mode: any engine of the process saves what it computed, and any finds it by content."""

    declares = msgspec.structs.replace(StoreConnector.declares, one_process=True)
    options_type = MemoryStoreOptions
