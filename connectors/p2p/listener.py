"""Accepts links of a rank's `p2p` peers: a listener that authenticates them, a thread per link, and limits for all.

Every incoming connection is a link of a peer that knows the secret, or is refused, counted and closed
(peer/auth_listener.py).
"""

import hmac
import itertools
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from pdkv.base.clock import MONOTONIC
from pdkv.base.service_thread import start_thread
from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.p2p.link import LinkEnd
from pdkv.connectors.p2p.sockets import listen
from pdkv.connectors.p2p.wire import CHANNEL, NCCL, Control, Offer, Welcome, refusal
from pdkv.connectors.peer.auth import Hello, Party, Session
from pdkv.connectors.peer.auth_listener import AuthListener
from pdkv.errors import PdkvError, PeerGone, ServerBusy, StaleEpoch, TransferCancelled, TransferError, TransferTimeout

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_WAITING = 64
"""The most links of peers that wait for room."""


class LinkLimits(NamedTuple):
    """Limits and times of links."""

    max_links: int
    idle_s: float  # seconds after which a link without traffic closes
    handshake_timeout_s: float
    make_group_s: float  # seconds to make an NCCL group


class Link(LinkEnd):
    """A link from a peer. One thread serves it."""

    def __init__(self, control: Control, peer: Party) -> None:
        super().__init__(control, secrets.token_hex(16))
        self.peer = peer
        self.has_room = False  # among the served links
        self.is_idle = False
        self.gives_way = False  # its place goes to another one: its next offer is not accepted


class LinkListener:
    """Accepts links and serves each on its own thread.

    Args:
        device: of the rank's pool.
        serve: handles one offer on a link; an error that it raises closes the link.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        host: str,
        secret: bytes,
        limits: LinkLimits,
        device: "torch.device",
        serve: Callable[[Link, Offer], None],
    ) -> None:
        """Listen. Raises OSError if the host's address cannot be listened on."""
        self._num_failed = 0  # links that broke the rules
        self._clock = config.clock
        self._party = Party(config.engine, config.epoch, config.rank)
        self._limits = limits
        self._device = device
        self._serve_offer = serve
        self._changed = threading.Condition()  # guards the following
        self._links: set[Link] = set()
        self._threads: set[threading.Thread] = set()
        self._stopping = False
        within, between, self.unix_name = listen(host)
        self.port: int = between.getsockname()[1]
        self.auth_listener = AuthListener(
            (within, between),
            secret,
            CHANNEL,
            handshake_timeout_s=limits.handshake_timeout_s,
            welcome=self._welcome,
            name="pdkv-p2p-listen",
            clock=config.clock,
        )

    @property
    def num_refused(self) -> int:
        """Number of connections that were not from peers, and of links that broke the rules."""
        return self.auth_listener.num_refused + self._num_failed

    @property
    def num_links(self) -> int:
        """Number of links of peers."""
        with self._changed:
            return self._num_known()

    def drop(self, engine: str, epoch: str) -> None:
        """End the links of an incarnation that is gone, without waiting for them."""
        with self._changed:
            gone = [link for link in self._links if (link.peer.engine, link.peer.epoch) == (engine, epoch)]
        for link in gone:
            link.interrupt()

    def close(self, timeout_s: float) -> None:
        """End all links and wait for their threads, for a limited time. Idempotent."""
        deadline = MONOTONIC.now() + timeout_s
        self.auth_listener.close(timeout_s)  # so that no more links come; a thread that does not end is in the log
        with self._changed:
            self._stopping = True
            links, threads = list(self._links), list(self._threads)
            self._changed.notify_all()
        for link in links:
            link.interrupt()
        for thread in (thread for thread in threads if thread.ident is not None):
            thread.join(max(deadline - MONOTONIC.now(), 0.0))
            if thread.is_alive():
                logger.error("thread %s does not end", thread.name)

    # --- threads --------------------------------------------------------------------------------------------------

    def _welcome(self, connection: socket.socket, session: Session, source: str) -> None:
        """Serve an authenticated peer on its own thread; called on the listener's thread."""
        hello = session.hello
        peer = hello.source
        control = Control(connection, f"engine {peer.engine} rank {peer.rank} at {source}", session)
        if hello.purpose not in ("", NCCL):
            self._attach(control, hello)
            return
        link = Link(control, peer)
        name = f"pdkv-p2p-link-{peer.engine}-{peer.rank}"
        thread = threading.Thread(target=self._serve, args=(link, hello), name=name, daemon=True)
        with self._changed:
            welcome = not self._stopping and len(self._links) - self._num_known() < MAX_WAITING
            if welcome:
                self._links.add(link)
                self._threads.add(thread)
        if not (welcome and self._start(link, thread)):
            self._num_failed += 1
            link.close()

    def _attach(self, control: Control, hello: Hello) -> None:
        """Make a connection the second socket of its peer's link, which is idle."""
        token = hello.purpose.encode()
        with self._changed:
            links = [link for link in self._links if hmac.compare_digest(link.token.encode(), token)]
            if links and links[0].peer == hello.source and links[0].second is None and hello.target == self._party:
                control.send(Welcome(), self._limits.handshake_timeout_s)  # an empty socket takes it at once
                links[0].second = control.connection
                return
        self._num_failed += 1
        control.close()

    def _start(self, link: Link, thread: threading.Thread) -> bool:
        """Start a thread. Returns whether there was room for another one."""
        try:
            start_thread(thread)
        except ServerBusy as error:
            logger.warning("a link could not be served: %s", error)
            with self._changed:
                self._links.discard(link)
                self._threads.discard(thread)
            return False
        return True

    def _serve(self, link: Link, hello: Hello) -> None:
        """Serve one link to its end."""
        try:
            if self._greet(link, hello):
                self._serve_offers(link)
        except Exception:  # an error in a link must not affect anything else
            self._num_failed += 1
            logger.exception("a link failed")
        finally:
            with self._changed:
                link.token = ""  # no second socket from here on
            link.close()
            with self._changed:
                self._links.discard(link)
                self._threads.discard(threading.current_thread())
                self._changed.notify_all()

    def _greet(self, link: Link, hello: Hello) -> bool:
        """Check which engine the peer means, find room, and welcome it. False: the link failed."""
        limit_s = self._limits.handshake_timeout_s
        timeout_s = hello.timeout_s if 0.0 <= hello.timeout_s <= limit_s else limit_s
        try:
            if hello.target != self._party:
                raise StaleEpoch(f"this is {self._party}, not {hello.target}")
            self._find_room(link, timeout_s)
            link.control.send(Welcome(link.token), timeout_s)
            if hello.purpose == NCCL:
                link.make_group(1, self._device, self._limits.make_group_s)
        except PdkvError as error:
            self._refuse(link, error)
            return False
        return True

    def _serve_offers(self, link: Link) -> None:
        """Serve a link until it is idle for too long, its peer leaves, or an error occurs."""
        timeout_s = self._limits.handshake_timeout_s
        for number in itertools.count():
            with self._changed:
                if self._stopping:
                    return
                link.is_idle = number > 0  # a new link is about to be used
                self._changed.notify_all()
            try:
                frame = link.control.receive(timeout_s, idle_s=self._limits.idle_s if number else timeout_s)
                with self._changed:
                    link.is_idle = False
                    if link.gives_way:
                        return  # before the offer is accepted, so that the peer may repeat it on another link
                if not isinstance(frame, Offer):
                    raise TransferError(f"{type(frame).__name__} instead of an offer")
                self._serve_offer(link, frame)
            except (PeerGone, TransferCancelled, TransferTimeout) as error:
                logger.debug("the link of engine %s rank %d ends: %s", link.peer.engine, link.peer.rank, error)
                return
            except PdkvError as error:
                self._num_failed += 1
                self._refuse(link, error)
                return

    def _refuse(self, link: Link, error: PdkvError) -> None:
        """Send the reason, if the peer still listens."""
        try:
            link.control.send(refusal(error), self._limits.handshake_timeout_s)
        except TransferError as problem:
            logger.debug("a refusal did not arrive: %s", problem)

    def _find_room(self, link: Link, timeout_s: float) -> None:
        """Find a place for the link. If there are too many, an idle one gives way; otherwise wait for one.

        Raises:
            TransferTimeout: all stay busy.
        """

        def has_room() -> bool:
            return self._stopping or self._num_known() < self._limits.max_links or self._close_idle()

        with self._changed:
            if not self._clock.wait_for(self._changed, has_room, self._clock.now() + timeout_s):
                raise TransferTimeout(f"all {self._limits.max_links} links are busy")
            link.has_room = True

    # --- under the lock -------------------------------------------------------------------------------------------

    def _num_known(self) -> int:
        return sum(link.has_room for link in self._links)

    def _close_idle(self) -> bool:
        """Ask an idle link to end. Always returns False: there is room once it has."""
        idle = next((link for link in self._links if link.has_room and link.is_idle), None)
        if idle is not None:
            idle.is_idle, idle.gives_way = False, True
            idle.interrupt()
        return False
