"""The port of a router at which starters of engines announce them (`pd engine --join`)."""

import asyncio
import logging
from typing import NamedTuple

import zmq

from pdkv.base.log_limit import LogLimit
from pdkv.errors import ConfigError, MalformedMessage, ServerBusy, StartupError
from pdkv.router.engines.address import check_engine_name, check_numeric
from pdkv.router.generations.membership import Membership
from pdkv.wire.cluster_key import ClusterKey
from pdkv.wire.decoding import decode_total
from pdkv.wire.doorkeeper import Doorkeeper
from pdkv.wire.engine_server import is_readable
from pdkv.wire.joining import ALIVE_IVL_S, ALIVE_TIMEOUT_S, MAX_JOIN_BYTES, Join, Verdict, encode, join_decoder
from pdkv.wire.messages import PROTOCOL

MESSAGES_PER_TURN = 64

SWEEP_S = 10.0
"""Seconds between looks at engines that are down: one whose starter is gone, too, is forgotten."""

SOURCE = "join"

logger = logging.getLogger(__name__)


class _Guest(NamedTuple):
    """A starter that is connected, and what it last said."""

    identity: bytes
    join: Join

    @property
    def wanted(self) -> str:
        """The engine's name, and its pool."""
        return f"{self.join.name}@{self.join.pool}" if self.join.pool else self.join.name


class JoinDoor:
    """A ROUTER socket that admits engines' keys only. Lives in the dispatcher's event loop."""

    def __init__(
        self, endpoint: str, key: ClusterKey, membership: Membership, context: "zmq.Context[zmq.Socket[bytes]]"
    ) -> None:
        """Listen. Raises StartupError."""
        self._membership = membership
        self._guests: dict[str, _Guest] = {}  # by the engine's endpoint
        self._log_limit = LogLimit()
        self._sweep: asyncio.TimerHandle | None = None
        self._doorkeeper = Doorkeeper(context, key.swapped())
        self._socket = socket = context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send tells whether the starter is still connected
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_JOIN_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(ALIVE_IVL_S * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(ALIVE_TIMEOUT_S * 1000))
        self._doorkeeper.guard(socket)
        try:
            socket.bind(endpoint)
            self._doorkeeper.start([self.endpoint])
        except (zmq.ZMQError, ServerBusy) as error:
            self.close()
            raise StartupError(f"the router cannot listen at --join-listen {endpoint}: {error}") from error
        membership.on_news = self._hear

    @property
    def endpoint(self) -> str:
        """The bound endpoint."""
        return self._socket.get_string(zmq.LAST_ENDPOINT)

    def start(self) -> None:
        """Begin to answer, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._loop.call_soon(self._read)
        self._look_after_guests()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._loop.remove_reader(self._socket.fileno())
            self._sweep = None
        self._socket.close(linger=0)
        self._doorkeeper.close()

    def _read(self) -> None:
        """Take some messages; ZeroMQ's descriptor signals only changes, so the others have their turn soon."""
        for _ in range(MESSAGES_PER_TURN):
            if self._socket.closed or not is_readable(self._socket):
                return
            identity, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            if parts == [b""]:  # it has just connected
                self._say(identity, Verdict("asked"))
                continue
            try:
                self._take(identity, decode_total(join_decoder, b"".join(parts)))
            except MalformedMessage as error:
                self._say(identity, Verdict("refused", f"the router cannot read this: {error}"))
        self._loop.call_soon(self._read)

    def _take(self, identity: bytes, join: Join) -> None:
        try:
            if join.protocol != PROTOCOL:
                raise ConfigError(f"it speaks protocol {join.protocol}, and this router {PROTOCOL}")
            check_engine_name(join.name)
            check_numeric(join.endpoint)
            known = self._guests.get(join.endpoint)
            if known is not None and known.join.name != join.name:
                raise ConfigError(f"engine {known.join.name} has announced {join.endpoint}, and {join.name} does, too")
            if known is not None and known.join.starter != join.starter and self._say(known.identity, Verdict("asked")):
                raise ConfigError(f"another starter, which is still connected, has announced {join.endpoint}")
            if (present := self._membership.name_at(join.endpoint)) not in ("", join.name):
                raise ConfigError(f"engine {present} is at {join.endpoint}, and not {join.name}")
            (self._let_go if join.leaving else self._let_in)(identity, join)
        except ConfigError as error:
            if self._log_limit.passes():
                logger.error("%s at %s may not join: %s", join.name, join.endpoint, error)
            self._say(identity, Verdict("refused", str(error)[:1024]))

    def _let_in(self, identity: bytes, join: Join) -> None:
        self._guests[join.endpoint] = _Guest(identity, join)
        try:
            self._propose()
        except ConfigError:
            del self._guests[join.endpoint]
            raise
        if self._membership.is_up(join.endpoint):
            self._say(identity, Verdict("admitted"))

    def _let_go(self, identity: bytes, join: Join) -> None:
        if join.endpoint in self._guests:
            self._guests[join.endpoint] = _Guest(identity, join)
            self._say(identity, Verdict("leaving"))
            self._propose()
        if not self._membership.name_at(join.endpoint):
            self._guests.pop(join.endpoint, None)
            self._say(identity, Verdict("left"))

    def _propose(self) -> None:
        self._membership.propose(SOURCE, {e: g.wanted for e, g in self._guests.items() if not g.join.leaving})

    def _hear(self, endpoint: str, kind: str, why: str) -> None:
        """Pass on what became of an engine."""
        guest = self._guests.get(endpoint)
        if guest is None or (kind == "left" and not guest.join.leaving):
            return
        self._say(guest.identity, Verdict(kind, why[:1024]))  # type: ignore[arg-type]
        if kind in ("refused", "left"):
            del self._guests[endpoint]
            self._propose()

    def _look_after_guests(self) -> None:
        """Forget engines that are down and whose starter is gone; the others are announced anew."""
        for endpoint, guest in list(self._guests.items()):
            why = "" if self._membership.name_at(endpoint) else f"nothing answers at {endpoint} yet"
            if not self._membership.is_up(endpoint) and not self._say(guest.identity, Verdict("asked", why)):
                logger.warning("%s at %s is forgotten: its starter is gone, too", guest.join.name, endpoint)
                del self._guests[endpoint]
                self._propose()
        self._sweep = self._loop.call_later(SWEEP_S, self._look_after_guests)

    def _say(self, identity: bytes, verdict: Verdict) -> bool:
        """Send a verdict; False: the starter is not connected."""
        try:
            self._socket.send_multipart((identity, encode(verdict)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno == zmq.EAGAIN
        return True
