"""Defects of `p2p`: pushes between processes."""

from collections.abc import Callable

from pdkv.connectors.base import Built, ConnectorConfig
from pdkv.connectors.p2p.connector import P2PConnector
from pdkv.connectors.p2p.options import P2POptions, P2PPeers
from pdkv.connectors.p2p.worker import P2PWorker
from pdkv.connectors.peer.push_scheduler import PushScheduler
from pdkv.connectors.transfer.worker import Job


class _UnaskedWorker(P2PWorker):
    def enter(self, job: Job) -> bool:
        with self._lock:
            return job.state in ("running", "posted") and not job.stop_code

    def leave(self, job: Job) -> None:
        pass

    def interrupt(self, job: Job) -> bool:
        return True


class GivesBackWhatIsStillWritten(P2PConnector):
    """A cancelled load has ended at once, though a thread is in the middle of receiving it."""

    @classmethod
    def build(cls, config: ConnectorConfig, notify: Callable[[], None]) -> Built:
        options, peers = P2POptions.parse(config.plan.options), P2PPeers(config)
        return Built(lambda: PushScheduler(config, peers), lambda: _UnaskedWorker(config, notify, options, peers))
