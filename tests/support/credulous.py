"""A connector that believes whatever arrives: its digests are made, carried, and compared with nothing."""

from collections.abc import Callable

from pdkv.connectors.base import Built, ConnectorConfig
from pdkv.connectors.memory.push import MemoryPushConnector
from pdkv.connectors.peer.checksums import Checksums


class Credulous(MemoryPushConnector):
    """For the trials to find out. Only in a process of its own: nothing compares there any more."""

    @classmethod
    def build(cls, config: ConnectorConfig, notify: Callable[[], None]) -> Built:
        Checksums.compare = lambda self, *arguments: None  # type: ignore[assignment, method-assign]
        return super().build(config, notify)
