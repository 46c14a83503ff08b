"""Defects of `p2p`: pushes between processes."""

from pdkv.connectors.p2p.connector import P2PConnector
from pdkv.connectors.p2p.worker import P2PWorker
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

    def make_worker_side(self, rank: int) -> P2PWorker:
        return _UnaskedWorker(self.config, self.notify, self.options, self._peers)
