"""The engine's end of the wire: frames of messages over ZeroMQ. The other end is router/engines/engine_client.py.

A frame (frames.py) is numbered from 0 per connection and direction. Nothing that a peer sends ends a loop: unreadable
data is counted and dropped, and the peer is told.
"""

import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, cast

import msgspec
import zmq

from pdkv.base.log_limit import LogLimit
from pdkv.errors import InvalidRequest, MalformedMessage, ServerBusy, StartupError, UnsendableMessage
from pdkv.wire.cluster_key import ClusterKey
from pdkv.wire.doorkeeper import Doorkeeper
from pdkv.wire.frames import (
    MAX_FRAME_BYTES,
    BadMessage,
    ReceivedFrame,
    decode_frame,
    encode_message,
    encode_raw_frame,
    key_of,
    split,
)
from pdkv.wire.heartbeat import Heartbeat
from pdkv.wire.kv import EngineCard
from pdkv.wire.messages import (
    MAX_ERROR_CHARS,
    PROTOCOL,
    Abort,
    Disconnect,
    EngineToRouter,
    Failed,
    Hello,
    Ready,
    RouterToEngine,
)
from pdkv.wire.step_watch import StepWatch

MAX_ROUTERS = 64
"""The most routers that one engine serves at a time; the Hello of a further one is dropped."""

MAX_UNREAD_FRAMES = 10_000
"""The most frames waiting for one router; one that does not read is disconnected before its frames take all memory."""

_MAX_POLL_S = 86_400.0
"""ZeroMQ counts milliseconds in 32 bits; a wait that ends early checks again."""

_POLLIN, _MORE = int(zmq.POLLIN), zmq.NOBLOCK | zmq.SNDMORE  # an enum's operators cost more than the question

logger = logging.getLogger(__name__)


class RouterJoined(NamedTuple):
    """A router said Hello; everything left by an earlier epoch of the same router ends."""

    epoch: str


class RouterLeft(NamedTuple):
    """The connection of that epoch of the router is gone."""

    epoch: str


RouterEvent = RouterJoined | RouterLeft
Received = RouterToEngine | EngineToRouter | RouterEvent


def is_readable(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message is there; costs less than an exception."""
    return bool(cast(int, socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def configure_socket(socket: "zmq.Socket[bytes]") -> None:
    """Set the options common to both ends. Call it before bind or connect."""
    socket.set_hwm(0)  # a high-water mark would drop or block; admission limits the queues
    socket.linger = 0
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)


def _second(endpoint: str) -> str:
    """The endpoint of the beats."""
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.beats"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + 1 if int(port) else 0}"


class _RouterPeer:
    """One connection of one router, as its engine sees it."""

    __slots__ = ("epoch", "fault", "identity", "next_received", "next_sent", "num_handled", "router_id")

    def __init__(self, identity: bytes, router_id: str, epoch: str, next_received: int) -> None:
        self.identity = identity
        self.router_id = router_id
        self.epoch = epoch
        self.next_received = next_received
        self.num_handled = next_received
        self.next_sent = 0
        self.fault = ""  # why nothing more is accepted from it


class EngineServer:
    """The engine's socket. Used by one thread; only `poll` blocks. Answers a Hello with Ready(card) by itself."""

    def __init__(
        self, endpoint: str, card: EngineCard, watch: StepWatch | None = None, key: ClusterKey | None = None
    ) -> None:
        """Listen on `endpoint` (ipc:// or tcp://), and on a second one for the engine's beats: another thread sends
        them, and a ZeroMQ socket is one thread's. For tcp:// it is the port above, or a free one for port 0.

        `watch`: the steps of the engine, for its beats. `key`: required of routers.

        Raises:
            StartupError: no socket can be created, or the endpoint cannot be bound.
        """
        try:
            self._context = zmq.Context()
            self._socket = self._context.socket(zmq.ROUTER)
        except zmq.ZMQError as error:
            raise StartupError(f"{card.engine} cannot create a socket for {endpoint}: {error}") from error
        self.card = card
        self.num_dropped = 0  # malformed frames and messages, and frames of peers that never said Hello
        self.num_gaps = 0  # frames with an unexpected number
        configure_socket(self._socket)
        self._socket.setsockopt(
            zmq.ROUTER_MANDATORY, 1
        )  # a send that is not possible is an error: nothing is dropped silently
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNREAD_FRAMES)
        self._watch = watch or StepWatch()
        self._heartbeat: Heartbeat | None = None
        self._doorkeeper: Doorkeeper | None = None
        self._peers: dict[bytes, _RouterPeer] = {}
        self._routers: dict[str, _RouterPeer] = {}
        self._unread: dict[bytes, _RouterPeer] = {}  # disconnected, and to be told when they read again; by identity
        self._events: deque[tuple[str, Received]] = deque()
        self._log_limit = LogLimit()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._extra_fd: int | None = None
        try:
            if key is not None:
                self._doorkeeper = Doorkeeper(self._context, key)
                self._doorkeeper.guard(self._socket)
            self._socket.bind(endpoint)
            self._heartbeat = Heartbeat(self._context, _second(endpoint), card.epoch, self._watch, self._doorkeeper)
            if self._doorkeeper is not None:
                self._doorkeeper.start([self.endpoint, self._heartbeat.endpoint])
            beats = self._heartbeat.endpoint
            self.card = msgspec.structs.replace(card, beats=beats, peer_changes=True, reads_parts=True)
        except (zmq.ZMQError, ServerBusy) as error:
            self.close()
            raise StartupError(f"{card.engine} cannot listen on {endpoint}: {error}") from error

    @property
    def endpoint(self) -> str:
        """The bound endpoint (with the port that tcp://host:0 was given)."""
        return self._socket.get_string(zmq.LAST_ENDPOINT)

    def poll(self, timeout_s: float | None, extra_fd: int | None = None) -> bool:
        """Wait until a message is there, `extra_fd` is readable or `timeout_s` has passed (None: no limit).

        Between two calls the caller counts as busy.

        Returns:
            Whether a message or other input is ready.
        """
        self._watch.rest()
        try:
            return self._poll(timeout_s, extra_fd)
        finally:
            self._watch.wake()

    def _poll(self, timeout_s: float | None, extra_fd: int | None) -> bool:
        if self._events:
            return True
        if extra_fd != self._extra_fd:
            if self._extra_fd is not None:
                self._poller.unregister(self._extra_fd)
            if extra_fd is not None:
                self._poller.register(extra_fd, zmq.POLLIN)
            self._extra_fd = extra_fd
        return bool(self._poller.poll(None if timeout_s is None else math.ceil(min(timeout_s, _MAX_POLL_S) * 1000)))

    def receive(self) -> list[tuple[str, Received]]:
        """Everything that has arrived, as (router_id, message or event), in order. Never blocks or raises.

        An unreadable message is refused here, and replaced by an Abort of its request.
        """
        received: list[tuple[str, Received]] = []
        if self._unread:
            self._tell_unread()
        while is_readable(self._socket):
            parts = self._socket.recv_multipart(zmq.NOBLOCK)
            peer = self._peers.get(parts[0])
            try:
                frame = decode_frame(parts[1]) if len(parts) == 2 else None
            except MalformedMessage as error:
                frame = None
                self._fault(peer, f"a frame cannot be read: {error}")
            peer = None if frame is None else self._greet(parts[0], frame)
            if frame is None or peer is None or peer.fault:
                self.num_dropped += 1
                continue
            if frame.number != peer.next_received:
                self.num_gaps += 1
                self._fault(peer, f"frame {frame.number} came instead of {peer.next_received}")
                continue
            peer.next_received += 1
            received.extend(self._take_events())
            for message in frame.messages:
                if isinstance(message, BadMessage):
                    received.extend(self._refuse(peer, message))
                elif not isinstance(message, Hello):
                    received.append((peer.router_id, message))
        received.extend(self._take_events())
        for peer in list(self._routers.values()):
            if peer.next_received != peer.num_handled:
                self._send(peer, [])  # what is begun: if it ends this process, the router knows
        return received

    def acknowledge(self) -> None:
        """Note that everything returned by the last `receive` has been handled. Faulty routers are disconnected."""
        for peer in list(self._routers.values()):
            handled, peer.num_handled = peer.num_handled, peer.next_received
            if peer.fault:
                peer.next_received += 1  # the frame at fault
                self._send(peer, [encode_message(Disconnect(peer.fault[:1024]))])
                self._lose(peer)
            elif handled != peer.num_handled:
                self._send(peer, [])

    def send(self, router_id: str, messages: Sequence[EngineToRouter]) -> None:
        """Send messages, in as many frames as they need. Messages to a router that is not connected are dropped: its
        requests end with it. A message that no frame can carry becomes a Failed, and the next `receive` returns an
        Abort.
        """
        peer = self._routers.get(router_id)
        if peer is None:
            return
        encoded = []
        for message in messages:
            try:
                encoded.append(encode_message(message))
            except UnsendableMessage as error:
                encoded.extend(self._replace(router_id, message, error))
        for group in split(encoded):
            self._send(peer, group)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._socket.close(linger=0)
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self._context.term()

    def _send(self, peer: _RouterPeer, messages: list[msgspec.Raw]) -> None:
        if self._routers.get(peer.router_id) is not peer:
            return
        data = encode_raw_frame(peer.next_sent, messages, begun=peer.next_received, handled=peer.num_handled)
        peer.next_sent += 1
        try:
            self._socket.send(peer.identity, _MORE)  # which fails if anything does
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if error.errno == zmq.EAGAIN:
                self._log(f"router {peer.router_id} is disconnected: it has not read {MAX_UNREAD_FRAMES} frames")
                peer.next_sent -= 1
                self._unread[peer.identity] = peer
            self._lose(peer)

    def _tell_unread(self) -> None:
        """Tell routers that were disconnected for not reading, as soon as something can be sent to them."""
        for identity, peer in list(self._unread.items()):
            known = identity in self._peers  # it has said Hello anew
            if known or self._say_goodbye(peer, f"{MAX_UNREAD_FRAMES} frames were not read"):
                del self._unread[identity]

    def _say_goodbye(self, peer: _RouterPeer, reason: str) -> bool:
        """Send a goodbye to a disconnected router. False: nothing can be sent to it now."""
        farewell = [encode_message(Disconnect(reason))]
        data = encode_raw_frame(peer.next_sent, farewell, begun=peer.next_received, handled=peer.num_handled)
        try:
            self._socket.send_multipart((peer.identity, data), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return error.errno == zmq.EHOSTUNREACH
        return True

    def _replace(self, router_id: str, message: EngineToRouter, error: UnsendableMessage) -> list[msgspec.Raw]:
        """The replacement for a message that cannot be sent."""
        logger.error("dropped a message to router %s: %s", router_id, error)
        key = key_of(message)
        if key is None:
            return []
        self._events.append((router_id, Abort(*key)))
        return [encode_message(Failed(*key, error.code, str(error)[:MAX_ERROR_CHARS], False))]

    def _refuse(self, peer: _RouterPeer, bad: BadMessage) -> list[tuple[str, Received]]:
        """Count a bad message and tell its router; its request ends."""
        self.num_dropped += 1
        self._log(f"dropped a message from router {peer.router_id}: {bad.reason}")
        if bad.key is None:
            return []
        text = f"the engine refused a message of this request: {bad.reason}"
        self.send(peer.router_id, [Failed(*bad.key, InvalidRequest.code, text, False, bad.param[:64])])
        return [(peer.router_id, Abort(*bad.key))]

    def _fault(self, peer: _RouterPeer | None, fault: str) -> None:
        self._log(f"router {peer.router_id}: {fault}" if peer is not None else f"an unknown peer: {fault}")
        if peer is not None:
            peer.fault = peer.fault or fault

    def _log(self, text: str) -> None:
        if self._log_limit.passes():
            logger.warning("%s (%d dropped so far)", text, self.num_dropped)

    def _greet(self, identity: bytes, frame: ReceivedFrame) -> _RouterPeer | None:
        """The frame's peer; a Hello creates one and answers it. None: an unknown one."""
        peer = self._peers.get(identity)
        hello = next((m for m in frame.messages if isinstance(m, Hello)), None)
        if hello is None or (peer is not None and (peer.router_id, peer.epoch) == (hello.router_id, hello.epoch)):
            return peer
        predecessor = self._routers.get(hello.router_id)
        if predecessor is None and len(self._routers) >= MAX_ROUTERS:
            for other in list(self._routers.values()):
                self._send(other, [])  # a peer that is gone makes room
        if predecessor is None and len(self._routers) >= MAX_ROUTERS:
            self._log(f"router {hello.router_id} is refused: {MAX_ROUTERS} others are connected")
            return None
        if hello.protocol != PROTOCOL:
            self._log(
                f"router {hello.router_id} is refused: it speaks protocol {hello.protocol}, but this engine {PROTOCOL}"
            )
            return None
        if predecessor is not None:
            if predecessor is not peer:  # of no router any more, unless two routers have one id: then it must not wait
                self._say_goodbye(predecessor, f"another router now has the id {hello.router_id}")
            self._forget(predecessor)
        if peer is not None and peer is not predecessor:  # one connection is one router
            self._lose(peer)
        peer = _RouterPeer(identity, hello.router_id, hello.epoch, frame.number)
        self._peers[identity] = self._routers[hello.router_id] = peer
        self._events.append((hello.router_id, RouterJoined(hello.epoch)))
        self.send(hello.router_id, [Ready(card=self.card, protocol=PROTOCOL)])
        return peer

    def _lose(self, peer: _RouterPeer) -> None:
        self._forget(peer)
        self._events.append((peer.router_id, RouterLeft(peer.epoch)))

    def _forget(self, peer: _RouterPeer) -> None:
        self._peers.pop(peer.identity, None)
        if self._routers.get(peer.router_id) is peer:
            del self._routers[peer.router_id]

    def _take_events(self) -> list[tuple[str, Received]]:
        events = list(self._events)
        self._events.clear()
        return events
