"""A lane's link to one rank of a peer, made when it is needed, and again once it is gone."""

import logging

from pdkv.base.clock import MONOTONIC
from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.p2p.link import LinkEnd
from pdkv.connectors.p2p.options import P2POptions, P2PPeers
from pdkv.connectors.p2p.pieces import MovePlan, PiecePool, plan_sending
from pdkv.connectors.p2p.sockets import connect
from pdkv.connectors.p2p.wire import NCCL, Accepted, Address, Control, Welcome, why_not_nccl
from pdkv.connectors.peer.auth import Party
from pdkv.connectors.peer.push_worker import PushPiece
from pdkv.connectors.transfer.worker import Job
from pdkv.errors import PeerGone, TransferError, TransferTimeout, Unauthenticated

logger = logging.getLogger(__name__)

DIAL_PAUSES_S = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, None)
"""Seconds before a connection that ended during the greeting is made again."""

MAX_OFFERS = 3
"""Links on which one piece is offered, if the receiver closes them at that moment."""

SECOND_SOCKET_BYTES = 8 << 20
"""Bytes from which on a piece is sent over two sockets between hosts; within one host they only cost wake-ups."""


class Outbound:
    """One lane's end of a link. One thread uses it; any may `interrupt` it."""

    def __init__(self, config: ConnectorConfig, options: P2POptions, peers: P2PPeers, own: Address) -> None:
        self.num_links = 0  # links made since the start
        self._link: LinkEnd | None = None
        self._dialing: Control | None = None
        self._config = config
        self._options = options
        self._peers = peers
        self._own = own

    def offer(self, job: Job, piece: PushPiece, pool: PiecePool) -> tuple[LinkEnd, MovePlan]:
        """Connect if there is no link, offer a piece, and wait for the receiver to be ready.

        Raises:
            TransferError: it is not ready within the job's deadline.
        """
        address = self._peers.address(piece.card, piece.heads.peer_rank)
        plan = plan_sending(piece, pool, self._options.timeout_s, in_blocks=address.in_blocks)
        is_large = plan.offer.num_bytes >= SECOND_SOCKET_BYTES
        for number in range(MAX_OFFERS):
            link = self._take_link(job, piece, address, pool)
            try:
                if is_large and link.group is None and not link.control.connection.is_unix:
                    if link.second is None:
                        link.second = self._dial(job, piece, address, link.token)[0].connection
                    plan = plan.over_sockets(2)
                if not isinstance(link.control.ask(plan.offer, job.remaining_s()), Accepted):
                    raise PeerGone("the receiver did not accept the offer")
                return link, plan
            except PeerGone:  # it was closed as idle at that moment; nothing was sent, so a new link may have the offer
                self.close()
                if number == MAX_OFFERS - 1:
                    raise
            except (TransferTimeout, Unauthenticated):
                self.close()
                raise
        raise AssertionError("unreachable")

    def interrupt(self) -> None:
        """End the link from any thread: the lane's thread wakes up, whatever it waits for."""
        link, dialing = self._link, self._dialing
        if link is not None:
            link.interrupt()
        if dialing is not None:
            dialing.interrupt()

    def close(self) -> None:
        """End the link. Idempotent."""
        if self._link is not None:
            self._link.close()
        self._link = None

    def _take_link(self, job: Job, piece: PushPiece, address: Address, pool: PiecePool) -> LinkEnd:
        """The link, made if there is none. Raises a TransferError if it cannot be made, or is refused."""
        if self._link is not None and self._link.is_open:
            return self._link
        self.close()
        over_nccl = not (reason := why_not_nccl(self._own, address))
        control, welcome = self._dial(job, piece, address, NCCL if over_nccl else "")
        self._link = link = LinkEnd(control, welcome.token)
        if over_nccl:
            try:
                link.make_group(0, pool.device, job.remaining_s())
            except BaseException:
                self.close()
                raise
        elif not pool.on_host:
            who = (piece.card.engine, piece.heads.peer_rank)
            logger.info("KV for engine %s rank %d goes through host memory: %s", *who, reason)
        self.num_links += 1
        return link

    def _dial(self, job: Job, piece: PushPiece, address: Address, purpose: str) -> tuple[Control, Welcome]:
        """Connect to the peer's rank, and wait until it has room.

        Raises:
            TransferError: it cannot be reached within the job's deadline, or refuses.
        """
        now = job.clock.now
        deadline = now() + min(job.remaining_s(), self._options.handshake_timeout_s)
        mine, card, rank = self._config, piece.card, piece.heads.peer_rank
        parties = Party(mine.engine, mine.epoch, mine.rank), Party(card.engine, card.epoch, rank)
        for pause_s in DIAL_PAUSES_S:
            control = self._connect(address, f"engine {card.engine} rank {rank}", deadline - now())
            try:
                self._dialing = control
                job.check()  # until here, an interrupt finds no connection
                control.greet(address.secret, *parties, deadline - now(), purpose)
                welcome = control.expect(deadline - now())
                if not isinstance(welcome, Welcome):
                    raise TransferError(f"engine {card.engine} rank {rank} did not answer with a Welcome")
                return control, welcome
            except PeerGone:  # unauthenticated connections may have pushed this one out: so briefly that a retry pays
                control.close()
                if pause_s is None or now() + pause_s >= deadline:
                    raise
                MONOTONIC.sleep(pause_s)
            except BaseException:
                control.close()
                raise
            finally:
                self._dialing = None
        raise AssertionError("unreachable")

    def _connect(self, address: Address, peer: str, timeout_s: float) -> Control:
        """A connection to the listener at an address. Raises TransferTimeout or PeerGone."""
        unix_name = self._options.unix_name(address, self._own)
        try:
            return Control(connect(unix_name, (address.host, address.port), max(timeout_s, 1e-3)), peer)
        except OSError as error:
            kind = TransferTimeout if isinstance(error, TimeoutError | BlockingIOError) else PeerGone
            raise kind(f"{peer} cannot be reached at {unix_name or address.host}: {error}") from error
