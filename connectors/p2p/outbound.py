"""A lane's link to one rank of a peer: made when it is needed, made again when it is gone."""

import socket
import threading
import time

from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.p2p.group import Group, GroupFactory
from pdkv.connectors.p2p.options import P2POptions, P2PPeers
from pdkv.connectors.p2p.pieces import PieceBuffers
from pdkv.connectors.p2p.wire import Accepted, Address, Control, Offer, Welcome
from pdkv.connectors.peer.auth import Party
from pdkv.connectors.peer.push_worker import PushPiece
from pdkv.connectors.transfer.worker import Job
from pdkv.errors import PeerGone, TransferError, TransferTimeout, Unauthenticated

DIAL_PAUSES_S = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, None)
"""Before a connection that ended during the greeting is made again."""

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
                    raise PeerGone("the receiver did not answer with a Welcome")
                return self.control, self.group
            except PeerGone:  # it was closed as idle at that moment; nothing was sent, so a new link may have the offer
                self.close()
                if number == MAX_OFFERS - 1:
                    raise
            except (TransferTimeout, Unauthenticated):
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
        deadline = time.monotonic() + min(job.remaining_s(), self._options.handshake_timeout_s)
        source, target = Party(mine.engine, mine.epoch, mine.rank), Party(card.engine, card.epoch, rank)
        for pause_s in DIAL_PAUSES_S:
            timeout_s = max(deadline - time.monotonic(), 1e-3)
            control = self.control = _dial(address, target, timeout_s)
            try:
                job.check()  # an interrupt has found no connection until here
                control.greet(address.secret, source, target, timeout_s)
                if not isinstance(control.expect(max(deadline - time.monotonic(), 1e-3)), Welcome):
                    raise TransferError(f"engine {card.engine} rank {rank} did not answer with a Welcome")
                break
            except PeerGone:  # strangers may have pushed this connection out again: so briefly that it pays
                self.close()
                if pause_s is None or time.monotonic() + pause_s >= deadline:
                    raise
                threading.Event().wait(pause_s)
            except BaseException:
                self.close()
                raise
        try:
            self.group = self._factory.make(control, rank=0, timeout_s=max(deadline - time.monotonic(), 1e-3))
        except BaseException:
            self.close()
            raise
        self.num_groups += 1


def _dial(address: Address, target: Party, timeout_s: float) -> Control:
    """A connection to whoever listens at an address. Raises TransferTimeout or PeerGone."""
    peer = f"engine {target.engine} rank {target.rank}"
    try:
        return Control(socket.create_connection((address.host, address.port), timeout_s), peer)
    except OSError as error:
        kind = TransferTimeout if isinstance(error, TimeoutError) else PeerGone
        raise kind(f"{peer} cannot be reached: {error}") from error
