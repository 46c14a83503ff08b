"""The `memory` connector: engines of one process exchange KV over a MemoryFabric, by pull, push or through a store.

Product code for engines side by side in one process, and the reference implementation of base.py's contracts.
"""

from collections.abc import Mapping

import msgspec

from pdkv.connectors.base import KVConnector
from pdkv.connectors.memory.base import MemoryMode, MemoryOptions
from pdkv.connectors.memory.pull import MemoryPullConnector
from pdkv.connectors.memory.push import MemoryPushConnector
from pdkv.connectors.plan import ConnectorPlan
from pdkv.connectors.store.base import KVStore, StoreConnector, StoreConnectorOptions
from pdkv.errors import ConfigError
from pdkv.kv_store.memory_store import MemoryStore


class MemoryStoreOptions(StoreConnectorOptions, MemoryOptions):
    """--connector-config of mode=store, including the options of every store connector."""

    def open_store(self) -> KVStore:
        return MemoryStore(self.fabric)


class MemoryStoreConnector(StoreConnector):
    """The connector in store mode: any engine of the process saves what it computed, and any finds it by content."""

    declares = msgspec.structs.replace(StoreConnector.declares, one_process=True)
    options_type = MemoryStoreOptions


MODES: Mapping[str, type[KVConnector]] = {
    "pull": MemoryPullConnector,
    "push": MemoryPushConnector,
    "store": MemoryStoreConnector,
}


class MemoryConnector(KVConnector):
    """The `memory` connector; its option `mode` chooses the implementation."""

    declares = MemoryMode.declares
    options_type = MemoryStoreOptions  # has the options of all modes

    @classmethod
    def plan(cls, options: Mapping[str, str]) -> ConnectorPlan:
        mode = MemoryStoreOptions.parse(options).mode
        chosen = MODES[mode]
        foreign = sorted(options.keys() - chosen.options_type.names())
        if foreign:
            raise ConfigError(f"connector memory: option {foreign[0]!r} belongs to mode=store, but the mode is {mode}")
        return msgspec.structs.replace(chosen.plan(options), build=f"{chosen.__module__}:{chosen.__name__}.build")
