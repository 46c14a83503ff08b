"""Push over NIXL: prefill offers what is confirmed, and decode reads it into the blocks that it has allocated; with the
option `writes` prefill writes there itself (sender.py, receiver.py).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.nixl.blocks import Post, cut_layers, cut_runs
from pdkv.connectors.nixl.endpoint import NixlEndpoint
from pdkv.connectors.nixl.options import NixlOptions
from pdkv.connectors.nixl.receiver import PushReceiver
from pdkv.connectors.nixl.sender import PushSender
from pdkv.connectors.nixl.worker import NixlWorker
from pdkv.connectors.peer.push_worker import Incoming, PushPiece, PushWorker
from pdkv.connectors.transfer.planning import as_ids, merge_runs
from pdkv.connectors.transfer.worker import Job
from pdkv.errors import TransferError

if TYPE_CHECKING:
    import torch


class NixlPushWorker(NixlWorker, PushWorker):
    """Worker side of mode=push."""

    def __init__(
        self, config: ConnectorConfig, notify: Callable[[], None], endpoint: NixlEndpoint, options: NixlOptions
    ) -> None:
        super().__init__(config, notify, endpoint, options)
        self.receiver = PushReceiver(self, self.rank, options.lanes)
        self._sender = PushSender(self, self.rank)

    def register_kv_caches(self, kv_cache: "torch.Tensor") -> None:
        """Register the pool with NIXL. Raises ConfigError."""
        super().register_kv_caches(kv_cache)
        self.rank.open(kv_cache, None, self._sender.offered, self.wake_if_late)
        self._sender.listen()
        self.receiver.listen()
        self.rank.endpoint.start()
        self.start_threads()

    def forget_agents(self, agents: Sequence[str]) -> None:
        self.receiver.forget(agents)

    def stop_receiving(self) -> None:
        self.receiver.shutdown()

    def register(self, job: Job, incoming: Incoming) -> None:
        self.receiver.register(job)

    def interrupt(self, job: Job) -> bool:
        """Receives ask their writers to stop; what was offered is not gathered any more."""
        if isinstance(job.order, Incoming):
            return self.receiver.interrupt(job)
        self._sender.withdraw(job)
        return True

    def send(self, job: Job, piece: PushPiece, scratch: Any) -> int | None:
        """Offer the batch, or (option `writes`) write its runs where they are large and cut alike on both sides."""
        layout, peer, send = self.config.layout, piece.card.layout, piece.send
        blob = self._ranks.rank(piece.card.engine, piece.card.epoch, piece.heads.peer_rank)
        whole = layout == peer and send.start % layout.block_size == send.ticket.start % layout.block_size == 0
        if whole and self._options.writes and self.rank.endpoint.sources.source(blob) is None:
            posts, num_pieces = self._posts(piece)
            num_bytes = len(send.block_ids) * layout.layer_bytes * len(piece.layers)
            if not self._options.gate.gathers(num_pieces, num_bytes // max(num_pieces, 1)):
                return self._sender.write(job, piece, blob, posts)
        self._sender.offer(job, piece, blob, whole=whole)
        return None

    def _posts(self, piece: PushPiece) -> tuple[list[Post], int]:
        """What of a batch's blocks is sent, and in how many pieces. Raises a TransferError."""
        send, layout = piece.send, self.config.layout
        block_size = layout.block_size
        first = (send.start - send.ticket.start) // block_size
        theirs = send.ticket.block_ids(block_size)[first : first + len(send.block_ids)]
        if len(theirs) != len(send.block_ids):
            raise TransferError("the ticket has too few blocks", transfer_id=send.key[0], attempt=send.key[1])
        if len(piece.layers) == layout.num_layers:
            runs = merge_runs(send.block_ids, theirs)
            return cut_runs(runs, layout.block_bytes), len(runs)
        source, destination = as_ids(send.block_ids), as_ids(theirs)
        posts = cut_layers(source, destination, layout.block_bytes, piece.layers, layout.num_layers)
        return posts, source.size
