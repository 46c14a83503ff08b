"""The engine's end of the wire: frames of messages over ZeroMQ. The other end is router/engine_client.py.

A frame is one msgpack `Frame`, numbered from 0 per connection and direction. Nothing that a peer sends ends a loop.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, cast

import zmq

from pdkv.errors import MalformedMessage, StartupError
from pdkv.messages import (
    EngineCard,
    EngineToRouter,
    Frame,
    Hello,
    Ready,
    RouterToEngine,
    decode_frame,
    encode_frame,
)

MAX_FRAME_BYTES = 256 << 20
"""A peer that sends a larger frame is disconnected."""


class RouterJoined(NamedTuple):
    """A router said Hello; what an earlier epoch of the same router left behind ends."""

    epoch: str


class RouterLeft(NamedTuple):
    """The connection of that epoch of the router is gone."""

    epoch: str


RouterEvent = RouterJoined | RouterLeft


def configure_socket(socket: "zmq.Socket[bytes]") -> None:
    """What both ends have in common. Call it before bind or connect."""
    socket.set_hwm(0)  # a high-water mark would drop or block; what bounds the queues is admission
    socket.linger = 0
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)


class _RouterPeer:
    """One connection of one router, as its engine sees it."""

    __slots__ = ("epoch", "identity", "next_received", "next_sent", "router_id")

    def __init__(self, identity: bytes, router_id: str, epoch: str, next_received: int) -> None:
        self.identity = identity
        self.router_id = router_id
        self.epoch = epoch
        self.next_received = next_received
        self.next_sent = 0


class EngineServer:
    """The engine's socket. Used by one thread; only `poll` blocks. Answers a Hello with Ready(card) by itself."""

    def __init__(self, endpoint: str, card: EngineCard) -> None:
        """Listen on `endpoint` (ipc:// or tcp://).

        Raises:
            StartupError: the endpoint cannot be bound.
        """
        self.card = card
        self.num_dropped = 0  # malformed frames, and frames of peers that never said Hello
        self.num_gaps = 0  # frames that came with another number than the next
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        configure_socket(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a router that is gone must not pass unseen
        self._peers: dict[bytes, _RouterPeer] = {}
        self._routers: dict[str, _RouterPeer] = {}
        self._events: deque[tuple[str, RouterEvent]] = deque()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._extra_fd: int | None = None
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise StartupError(f"{card.engine} cannot listen on {endpoint}: {error}") from error

    @property
    def endpoint(self) -> str:
        """The bound endpoint (with the port that tcp://host:0 was given)."""
        return cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def poll(self, timeout_s: float | None, extra_fd: int | None = None) -> bool:
        """Wait until a message is there, `extra_fd` is readable or the time is over. None waits for ever.

        Returns:
            Whether something is there.
        """
        if self._events:
            return True
        if extra_fd != self._extra_fd:
            if self._extra_fd is not None:
                self._poller.unregister(self._extra_fd)
            if extra_fd is not None:
                self._poller.register(extra_fd, zmq.POLLIN)
            self._extra_fd = extra_fd
        return bool(self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))

    def receive(self) -> list[tuple[str, RouterToEngine | EngineToRouter | RouterEvent]]:
        """All that has arrived, as (router_id, message or event), in order. Never blocks or raises."""
        received: list[tuple[str, RouterToEngine | EngineToRouter | RouterEvent]] = []
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                frame = decode_frame(parts[1]) if len(parts) == 2 else None
            except MalformedMessage:
                frame = None
            peer = None if frame is None else self._greet(parts[0], frame)
            if frame is None or peer is None:
                self.num_dropped += 1
                continue
            self.num_gaps += frame.number != peer.next_received
            peer.next_received = frame.number + 1
            received.extend(self._take_events())
            received.extend((peer.router_id, m) for m in frame.messages if not isinstance(m, Hello))
        received.extend(self._take_events())
        return received

    def send(self, router_id: str, messages: Sequence[EngineToRouter]) -> None:
        """Send one frame. Messages to a router that is not connected are dropped: its requests end with it."""
        peer = self._routers.get(router_id)
        if peer is None:
            return
        frame = Frame(number=peer.next_sent, messages=list(messages))
        peer.next_sent += 1
        try:
            self._socket.send_multipart((peer.identity, encode_frame(frame)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._forget(peer)
            self._events.append((router_id, RouterLeft(peer.epoch)))

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close(linger=0)
        self._context.term()

    def _greet(self, identity: bytes, frame: Frame) -> _RouterPeer | None:
        """The frame's peer; a Hello makes one and answers it. None: nobody that we know."""
        peer = self._peers.get(identity)
        hello = next((m for m in frame.messages if isinstance(m, Hello)), None)
        if hello is None or (peer is not None and peer.epoch == hello.epoch):
            return peer
        predecessor = self._routers.get(hello.router_id)
        if predecessor is not None:
            self._forget(predecessor)
        peer = _RouterPeer(identity, hello.router_id, hello.epoch, frame.number)
        self._peers[identity] = self._routers[hello.router_id] = peer
        self._events.append((hello.router_id, RouterJoined(hello.epoch)))
        self.send(hello.router_id, [Ready(card=self.card)])
        return peer

    def _forget(self, peer: _RouterPeer) -> None:
        self._peers.pop(peer.identity, None)
        if self._routers.get(peer.router_id) is peer:
            del self._routers[peer.router_id]

    def _take_events(self) -> list[tuple[str, RouterEvent]]:
        events = list(self._events)
        self._events.clear()
        return events
