"""A lane's link to one rank of a peer: made when it is needed, made again when it is gone."""

import socket

from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.p2p_group import Group, GroupFactory
from pdkv.connectors.p2p_options import P2POptions, P2PPeers
from pdkv.connectors.p2p_pieces import PieceBuffers
from pdkv.connectors.p2p_wire import Accepted, Control, Hello, Offer, Welcome
from pdkv.connectors.push import PushPiece
from pdkv.connectors.transfer_worker import Job
from pdkv.errors import PeerGone, TransferError, TransferTimeout

MAX_OFFERS = 3
"""Links on which one piece is offered, where the receiver closes them at that moment."""


class Outbound:
    """One lane's end of a link, with its buffers. One thread uses it; any may `interrupt` it."""

    def __init__(
        self,
        config: ConnectorConfig,
        options: P2POptions,
        peers: P2PPeers,
        factory: GroupFactory,
    ) -> None:
        self.num_groups = 0  # made since the start
        self.buffers: PieceBuffers | None = None  # made for the first piece
        self.control: Control | None = None
        self.group: Group | None = None
        self._config = config
        self._options = options
        self._peers = peers
        self._factory = factory

    def offer(self, job: Job, piece: PushPiece, offer: Offer) -> tuple[Control, Group]:
        """Connect where there is no link, offer a piece, and wait for the receiver to be ready.

        Raises:
            TransferError: it is not, within the job's deadline.
        """
        for number in range(MAX_OFFERS):
            if self.control is None or self.group is None or not self.control.is_open:
                self.close()
                self._connect(job, piece)
            assert self.control is not None
            assert self.group is not None
            try:
                if not isinstance(self.control.ask(offer, job.remaining_s()), Accepted):
                    raise PeerGone("the receiver answers something else")
                return self.control, self.group
            except PeerGone:  # it was closed as idle at that moment; nothing was sent, so a new link may have the offer
                self.close()
                if number == MAX_OFFERS - 1:
                    raise
            except TransferTimeout:
                self.close()
                raise
        raise AssertionError("unreachable")

    def interrupt(self) -> None:
        """By any thread: whatever the lane's thread waits for, it wakes up, and the link ends."""
        control, group = self.control, self.group
        if control is not None:
            control.interrupt()
        if group is not None:
            group.interrupt()

    def close(self) -> None:
        """Tear the group down, then the connection. Idempotent."""
        if self.group is not None:
            self.group.close()
        if self.control is not None:
            self.control.close()
        self.group = self.control = None

    def _connect(self, job: Job, piece: PushPiece) -> None:
        """Make the link and its group.

        Raises:
            TransferError: it cannot be had within the job's deadline, or is refused.
        """
        card, rank, mine = piece.card, piece.heads.peer_rank, self._config
        address = self._peers.address(card, rank)
        if address.backend != self._factory.backend:
            raise TransferError(f"{address.backend} in engine {card.engine}, {self._factory.backend} here")
        peer = f"engine {card.engine} rank {rank}"
        timeout_s = min(job.remaining_s(), self._options.handshake_timeout_s)
        try:
            connection = socket.create_connection((address.host, address.port), timeout_s)
        except OSError as error:
            kind = TransferTimeout if isinstance(error, TimeoutError) else PeerGone
            raise kind(f"{peer} cannot be reached: {error}") from error
        self.control = Control(connection, peer)
        try:
            job.check()  # an interrupt has found no connection until here
            hello = Hello(address.token, mine.engine, mine.epoch, mine.rank, card.engine, card.epoch, rank, timeout_s)
            if not isinstance(self.control.ask(hello, timeout_s), Welcome):
                raise PeerGone(f"{peer} answers something else")
            self.group = self._factory.make(self.control, rank=0, timeout_s=timeout_s)
        except BaseException:
            self.close()
            raise
        self.num_groups += 1
