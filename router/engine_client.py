"""The router's end of the wire to one engine: asyncio over ZeroMQ, one callback per frame."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from pdkv.errors import MalformedMessage
from pdkv.messages import EngineCard, EngineToRouter, Frame, Hello, Ready, RouterToEngine, decode_frame, encode_frame
from pdkv.transport import configure_socket

logger = logging.getLogger(__name__)

RECONNECT_S = 0.05
"""Pause before a lost engine is connected anew; while nobody listens there, ZeroMQ tries again by itself."""

HEARTBEAT_S, HEARTBEAT_TIMEOUT_S = 5.0, 20.0
"""Between hosts: how often a connection is tried out, and how long an engine may be silent then."""

FRAMES_PER_TURN = 64
"""Frames that a client hands over before other callbacks of the event loop have their turn."""


def _descriptor(socket: "zmq.Socket[bytes]") -> int:
    return cast(int, socket.getsockopt(zmq.FD))


def _is_readable(socket: "zmq.Socket[bytes]") -> bool:
    return bool(cast(int, socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class EngineListener(Protocol):
    """Who hears of engines. Calls come from the event loop's thread, never from inside `send`."""

    def engine_up(self, name: str, card: EngineCard) -> None:
        """The engine is connected; a new incarnation has a new card.epoch."""

    def engine_down(self, name: str, reason: str) -> None:
        """The engine that was up is gone: nothing that was asked of it will be answered."""

    def engine_messages(self, name: str, messages: Sequence[RouterToEngine | EngineToRouter]) -> None:
        """One frame."""


class EngineClient:
    """A router's connection to one engine: connects, says Hello, and connects anew whenever it is lost.

    Death is seen by the connection's end and by a gap in the frame numbers. Every connection has a fresh epoch and a
    fresh socket, so nothing that was meant for one incarnation can reach the next.
    """

    def __init__(self, name: str, endpoint: str, *, router_id: str, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.name = name
        self.endpoint = endpoint
        self.card: EngineCard | None = None
        self.num_dropped = 0  # malformed frames, and frames before Ready
        self._router_id = router_id
        self._context = context
        self._listener: EngineListener | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._outbox: list[RouterToEngine] = []
        self._next_sent = 0
        self._next_received = 0
        self._reconnect: asyncio.TimerHandle | None = None

    def connect(self, listener: EngineListener) -> None:
        """Begin, in the running event loop; the engine may come later. Returns at once."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._open()

    def send(self, message: RouterToEngine) -> None:
        """Queue a message for an engine that is up; what one turn of the event loop queues leaves as one frame."""
        assert self.card is not None, f"{self.name} is not connected"
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

    def close(self) -> None:
        """Disconnect for good, without a word to the listener. Idempotent."""
        self._listener = None
        if self._reconnect is not None:
            self._reconnect.cancel()
        self._shut()

    def _open(self) -> None:
        self._reconnect = None
        self._next_sent = self._next_received = 0
        self._socket = socket = self._context.socket(zmq.DEALER)
        configure_socket(socket)
        remote = self.endpoint.startswith("tcp://")
        socket.setsockopt(zmq.RECONNECT_IVL, 10)  # ms, doubled up to:
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000 if remote else 40)  # a local try costs one system call
        if remote:
            socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))  # a host that vanishes says no goodbye
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_TIMEOUT_S * 1000))
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(self.endpoint)
        self._send_frame([Hello(router_id=self._router_id, epoch=secrets.token_hex(8))])
        self._watch(self._monitor, self._read_monitor)
        self._watch(socket, self._drain)

    def _watch(self, socket: "zmq.Socket[bytes]", callback: Callable[[], None]) -> None:
        """ZeroMQ's descriptor signals changes of state only: also look once now, and after every send."""
        self._loop.add_reader(_descriptor(socket), callback)
        self._loop.call_soon(callback)

    def _shut(self) -> None:
        self._outbox.clear()
        self.card = None
        if self._socket is None or self._monitor is None:
            return
        self._loop.remove_reader(_descriptor(self._socket))
        self._loop.remove_reader(_descriptor(self._monitor))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._socket = self._monitor = None

    def _lost(self, reason: str) -> None:
        """Give the connection up and make another one."""
        if self._socket is None:
            return
        was_up = self.card is not None
        self._shut()
        self._reconnect = self._loop.call_later(RECONNECT_S, self._open)
        if was_up and self._listener is not None:
            self._listener.engine_down(self.name, reason)

    def _flush(self) -> None:
        if self._socket is not None and self._outbox:
            messages, self._outbox = self._outbox, []
            self._send_frame(messages)
            if _is_readable(self._socket):  # the send may have swallowed the signal
                self._loop.call_soon(self._drain)

    def _send_frame(self, messages: Sequence[RouterToEngine]) -> None:
        assert self._socket is not None
        frame = Frame(number=self._next_sent, messages=list(messages))
        self._next_sent += 1
        self._socket.send(encode_frame(frame), zmq.NOBLOCK)

    def _read_monitor(self) -> None:
        while self._monitor is not None and _is_readable(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                try:
                    self._drain_all()  # what it said before it went still counts
                finally:
                    self._lost("the connection ended")

    def _drain(self) -> None:
        socket = self._socket
        try:
            for _ in range(FRAMES_PER_TURN):
                if self._socket is not socket or not self._receive():
                    return
        finally:  # after an exception of the listener, too, the next frame must be read
            if self._socket is not None and _is_readable(self._socket):
                self._loop.call_soon(self._drain)

    def _drain_all(self) -> None:
        while self._receive():
            pass

    def _receive(self) -> bool:
        """Read and deliver one frame. False: there is none."""
        if self._socket is None:
            return False
        try:
            parts = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        try:
            frame = decode_frame(parts[0])
        except MalformedMessage:
            self.num_dropped += 1  # the gap that it leaves in the numbers is what counts
            return True
        if frame.number != self._next_received:
            self._lost(f"frame {frame.number} came instead of {self._next_received}")
            return True
        self._next_received += 1
        self._deliver(frame.messages)
        return True

    def _deliver(self, messages: Sequence[RouterToEngine | EngineToRouter]) -> None:
        assert self._listener is not None
        if self.card is None:
            first = messages[0] if messages else None
            if not isinstance(first, Ready) or first.card.engine != self.name:
                self.num_dropped += 1
                logger.error("%s: expected Ready of %s, got %r", self.endpoint, self.name, first)
                return
            self.card = first.card
            self._listener.engine_up(self.name, first.card)
            messages = messages[1:]
        if messages:
            self._listener.engine_messages(self.name, messages)
