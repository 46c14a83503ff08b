"""The `memory` connector: engines of one process exchange KV over a MemoryFabric, by pull, push or through a store.

Product code for engines side by side in one process, and the reference implementation of base.py's contracts.
"""

from collections.abc import Mapping
from typing import ClassVar

from pdkv.connectors.base import KVConnector
from pdkv.connectors.memory.pull import MemoryPullConnector
from pdkv.connectors.memory.push import MemoryPushConnector
from pdkv.connectors.memory.store import MemoryStoreConnector, MemoryStoreOptions
from pdkv.errors import ConfigError
from pdkv.wire.kv import ConnectorKind

MODES: Mapping[str, type[KVConnector]] = {
    "pull": MemoryPullConnector,
    "push": MemoryPushConnector,
    "store": MemoryStoreConnector,
}


class MemoryConnector(KVConnector):
    """Its option `mode` chooses the class."""

    kind: ClassVar[ConnectorKind] = "pull"
    one_process: ClassVar[bool] = True
    options_type = MemoryStoreOptions  # has those of all modes

    @classmethod
    def for_options(cls, options: Mapping[str, str]) -> type[KVConnector]:
        mode = MemoryStoreOptions.parse(options).mode
        chosen = MODES[mode]
        foreign = sorted(options.keys() - chosen.options_type.names())
        if foreign:
            raise ConfigError(f"connector memory: option {foreign[0]!r} is one of mode=store, and this is mode={mode}")
        return chosen
