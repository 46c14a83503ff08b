"""A connector that believes whatever arrives: its digests are made, carried, and compared with nothing."""

from pdkv.connectors.base import WorkerConnector
from pdkv.connectors.memory.push import MemoryPushConnector
from pdkv.connectors.peer.checksums import Checksums


class Credulous(MemoryPushConnector):
    """For the trials to find out. Only in a process of its own: nothing compares there any more."""

    def make_worker_side(self, rank: int) -> WorkerConnector:
        Checksums.compare = lambda self, *arguments: None  # type: ignore[assignment, method-assign]
        return super().make_worker_side(rank)
