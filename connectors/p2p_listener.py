"""Where a rank's `p2p` peers connect: one thread that accepts, one per link, and bounds for all of them.

Whatever comes in is either a link of a peer that knows the token, or refused, counted and closed.
"""

import contextlib
import hmac
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.p2p_group import Group, GroupFactory
from pdkv.connectors.p2p_pieces import PieceBuffers
from pdkv.connectors.p2p_wire import Control, Hello, Offer, Welcome, refusal
from pdkv.errors import PdkvError, PeerGone, StaleEpoch, TransferCancelled, TransferError, TransferTimeout

logger = logging.getLogger(__name__)

MAX_STRANGERS = 64
"""Connections that have not said who they are."""


class LinkLimits(NamedTuple):
    """Bounds and times of links."""

    max_links: int
    idle_s: float  # a link without traffic closes after so long
    handshake_timeout_s: float


class Link:
    """One connection from a peer: its frames and its group. One thread serves it."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.hello: Hello | None = None  # None: a stranger yet
        self.group: Group | None = None
        self.is_idle = False
        self.gives_way = False  # to another one: its next offer is not taken any more
        self.buffers: PieceBuffers | None = None  # made for the first piece

    def interrupt(self) -> None:
        """By any thread: whatever the link's thread waits for, it wakes up, and the link ends."""
        self.control.interrupt()
        if self.group is not None:
            self.group.interrupt()

    def close(self) -> None:
        """Tear the group down, then the connection. By the link's own thread."""
        if self.group is not None:
            self.group.close()
        self.control.close()


class LinkListener:
    """Accepts links and serves each on a thread of its own.

    Args:
        serve: handles one offer on a link; an error that it raises closes the link.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        factory: GroupFactory,
        token: bytes,
        limits: LinkLimits,
        serve: Callable[[Link, Offer], None],
    ) -> None:
        """Raises OSError if the host's address cannot be listened on."""
        self.num_refused = 0  # connections that were no peer's, or broke the rules
        self._config = config
        self._factory = factory
        self._token = token
        self._limits = limits
        self._serve_offer = serve
        self._changed = threading.Condition()  # guards what follows
        self._links: set[Link] = set()
        self._threads: set[threading.Thread] = set()
        self._stopping = False
        self._listener = socket.create_server((factory.host, 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="pdkv-p2p-listen", daemon=True)
        self._thread.start()

    @property
    def num_links(self) -> int:
        """Links of peers."""
        with self._changed:
            return self._num_known()

    def drop(self, engine: str, epoch: str) -> None:
        """An incarnation is gone: its links end. Does not wait for them."""
        with self._changed:
            gone = [link for link in self._links if _is_of(link, engine, epoch)]
        for link in gone:
            link.control.interrupt()

    def close(self, timeout_s: float) -> None:
        """End all links and wait for their threads, for a bounded time. Idempotent."""
        with self._changed:
            self._stopping = True
            links, threads = list(self._links), list(self._threads)
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for link in links:
            link.control.interrupt()
        deadline = time.monotonic() + timeout_s
        for thread in (self._thread, *threads):
            thread.join(max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                logger.error("thread %s does not end", thread.name)

    # --- threads --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, port, *_) = self._listener.accept()
            except OSError as error:
                if self._stopping:
                    return
                logger.warning("a link could not be accepted: %s", error)  # no descriptors left, for example
                threading.Event().wait(0.1)
                continue
            link = Link(Control(connection, f"{host}:{port}"))
            thread = threading.Thread(target=self._serve, args=(link,), name=f"pdkv-p2p-link-{port}", daemon=True)
            with self._changed:
                welcome = not self._stopping and len(self._links) - self._num_known() < MAX_STRANGERS
                if welcome:
                    self._links.add(link)
                    self._threads.add(thread)
            if not (welcome and self._start(link, thread)):
                self.num_refused += 1
                link.close()

    def _start(self, link: Link, thread: threading.Thread) -> bool:
        """Whether there was room for another thread."""
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("a link could not be served: %s", error)
            with self._changed:
                self._links.discard(link)
                self._threads.discard(thread)
            return False
        return True

    def _serve(self, link: Link) -> None:
        """One link's life."""
        try:
            if self._greet(link):
                self._serve_offers(link)
        except Exception:  # a link must not take anything else with it
            self.num_refused += 1
            logger.exception("a link failed")
        finally:
            link.close()
            with self._changed:
                self._links.discard(link)
                self._threads.discard(threading.current_thread())
                self._changed.notify_all()

    def _greet(self, link: Link) -> bool:
        """Find out who connects, find room, and make the group. False: it came to nothing."""
        try:
            frame = link.control.receive(self._limits.handshake_timeout_s)
            if not isinstance(frame, Hello) or not hmac.compare_digest(frame.token, self._token):
                raise TransferError("not a peer")
        except TransferError as error:
            self.num_refused += 1
            logger.debug("a connection was refused: %s", error)
            return False
        timeout_s = min(max(frame.timeout_s, 0.0), self._limits.handshake_timeout_s)
        try:
            self._check(frame)
            self._find_room(link, frame, timeout_s)
            link.control.send(Welcome(), timeout_s)
            link.group = self._factory.make(link.control, rank=1, timeout_s=timeout_s)
        except PdkvError as error:
            self._refuse(link, error)
            return False
        return True

    def _serve_offers(self, link: Link) -> None:
        """Serve a link until it is idle for too long, its peer leaves, or something goes wrong."""
        assert link.hello is not None
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
                logger.debug("the link of engine %s rank %d ends: %s", link.hello.engine, link.hello.rank, error)
                return
            except PdkvError as error:
                self.num_refused += 1
                self._refuse(link, error)
                return

    def _refuse(self, link: Link, error: PdkvError) -> None:
        """Say why, if the peer still listens."""
        try:
            link.control.send(refusal(error), self._limits.handshake_timeout_s)
        except TransferError as problem:
            logger.debug("a refusal did not arrive: %s", problem)

    def _check(self, hello: Hello) -> None:
        """Raises StaleEpoch for one who means another incarnation, or another rank."""
        mine = (self._config.engine, self._config.epoch, self._config.rank)
        meant = (hello.to_engine, hello.to_epoch, hello.to_rank)
        if meant != mine:
            raise StaleEpoch(f"engine, epoch and rank here are {mine}, not {meant}")

    def _find_room(self, link: Link, hello: Hello, timeout_s: float) -> None:
        """Make the link a peer's. An idle one gives way where there are too many; else wait for one.

        Raises:
            TransferTimeout: all are busy for so long.
        """

        def has_room() -> bool:
            return self._stopping or self._num_known() < self._limits.max_links or self._close_idle()

        with self._changed:
            if not self._changed.wait_for(has_room, timeout_s):
                raise TransferTimeout(f"all {self._limits.max_links} groups are busy")
            link.hello = hello

    # --- under the lock -------------------------------------------------------------------------------------------

    def _num_known(self) -> int:
        return sum(link.hello is not None for link in self._links)

    def _close_idle(self) -> bool:
        """Ask an idle link to end. Always False: there is room when it has."""
        idle = next((link for link in self._links if link.hello is not None and link.is_idle), None)
        if idle is not None:
            idle.is_idle, idle.gives_way = False, True
            idle.control.interrupt()
        return False


def _is_of(link: Link, engine: str, epoch: str) -> bool:
    return link.hello is not None and (link.hello.engine, link.hello.epoch) == (engine, epoch)
