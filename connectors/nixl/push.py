"""Push over NIXL: prefill offers confirmed KV, and decode reads it into the blocks that it has allocated (sender.py,
receiver.py).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.nixl.endpoint import NixlEndpoint
from pdkv.connectors.nixl.options import NixlOptions
from pdkv.connectors.nixl.receiver import PushReceiver
from pdkv.connectors.nixl.sender import PushSender
from pdkv.connectors.nixl.worker import NixlPush
from pdkv.connectors.peer.push_worker import Incoming, PushPiece
from pdkv.connectors.transfer.worker import Job

if TYPE_CHECKING:
    import torch


class NixlPushWorker(NixlPush):
    """Worker side of mode=push."""

    def __init__(
        self, config: ConnectorConfig, notify: Callable[[], None], endpoint: NixlEndpoint, options: NixlOptions
    ) -> None:
        super().__init__(config, notify, endpoint, options)
        self._receiver = PushReceiver(self, options.lanes)
        self._sender = PushSender(self)

    def register_kv_caches(self, kv_cache: "torch.Tensor") -> None:
        """Register the pool with NIXL. Raises ConfigError."""
        super().register_kv_caches(kv_cache)
        self.open(kv_cache, None, self._sender.offered)
        self._sender.listen()
        self._receiver.listen()
        self.endpoint.start()
        self.start_threads()

    def forget_agents(self, agents: Sequence[str]) -> None:
        self._receiver.retire(agents)

    def stop_receiving(self) -> None:
        self._receiver.shutdown()

    def register(self, job: Job, incoming: Incoming) -> None:
        self._receiver.register(job.key)

    def interrupt(self, job: Job) -> bool:
        """Stop offering: offered KV is no longer gathered. Receives need nothing, since only this rank's threads write
        them.
        """
        if not isinstance(job.order, Incoming):
            self._sender.withdraw(job)
        return True

    def send(self, job: Job, piece: PushPiece, scratch: Any) -> None:
        """Offer the batch."""
        layout, peer, send = self.config.layout, piece.card.layout, piece.send
        blob = self._ranks.rank(piece.card.engine, piece.card.epoch, piece.heads.peer_rank)
        whole = layout == peer and send.start % layout.block_size == send.ticket.start % layout.block_size == 0
        self._sender.offer(job, piece, blob, whole=whole)
