"""The router's end of the wire to one engine: asyncio over ZeroMQ, one callback per frame."""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol, cast

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from pdkv.base.log_limit import LogLimit
from pdkv.errors import IncompatiblePeers, MalformedMessage
from pdkv.router.engines.beats import BeatReader, beats_endpoint
from pdkv.wire.cluster_key import ClusterKey
from pdkv.wire.engine_server import configure_socket, is_readable
from pdkv.wire.frames import (
    PIECE_BYTES,
    BadMessage,
    ReceivedFrame,
    decode_frame,
    encode_message,
    encode_raw_frame,
    frame_pieces,
    key_of,
    split,
)
from pdkv.wire.kv import EngineCard
from pdkv.wire.messages import (
    MAX_ERROR_CHARS,
    PROTOCOL,
    Abort,
    Beat,
    Disconnect,
    EngineToRouter,
    Failed,
    Hello,
    Ready,
    RouterToEngine,
)
from pdkv.wire.types import RequestKey

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
"""Between hosts: seconds without an answer after which the connection attempt starts over. The kernel retries ever more
rarely, and would take half a minute to find a host that is reachable again.
"""

ASK_AGAIN_S = 10.0
"""Pause before an engine that was not admitted is asked again."""

RECONNECT_S = 0.05
"""Pause before a lost engine is connected again; while nothing listens there, ZeroMQ retries by itself."""

HEARTBEAT_S, HEARTBEAT_TIMEOUT_S = 5.0, 20.0
"""Between hosts: how often a connection is checked, and how long an engine may be silent then."""

_REFUSALS = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_WATCHED_EVENTS = zmq.EVENT_DISCONNECTED | _REFUSALS[0] | _REFUSALS[1] | _REFUSALS[2]

LAST_WORDS_MS = 100
"""How long ZeroMQ may take to deliver queued messages before a connection is closed on purpose."""

FRAMES_PER_TURN = 64
"""The most frames that a client hands over before other callbacks of the event loop run."""

BYTES_PER_TURN = PIECE_BYTES
"""The most bytes after which it takes no further frame, nor a further piece of a long one, in that turn."""


def make_context() -> "zmq.Context[zmq.Socket[bytes]]":
    """A context for the sockets of any number of engines: each has four, and ZeroMQ's default is 1,023 in all."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


class EngineListener(Protocol):
    """Receives events of engines. Calls are made on the event loop's thread, never from inside `send`."""

    def engine_up(self, name: str, card: EngineCard) -> None:
        """The engine is connected; a new incarnation has a new card.epoch."""

    def engine_down(self, name: str, reason: str, suspects: Collection[RequestKey] = ()) -> None:
        """The engine that was up is gone: nothing sent to it will be answered.

        `suspects`: requests with a message that it had just begun to handle. One of them may have killed it.
        """

    def engine_refused(self, name: str, error: IncompatiblePeers) -> None:
        """The engine answers, but cannot be one of this fleet."""

    def engine_messages(self, name: str, messages: Sequence[RouterToEngine | EngineToRouter]) -> None:
        """One frame, or a beat."""


class _SentFrame(NamedTuple):
    """A frame that the engine has not acknowledged as handled."""

    number: int
    keys: list[RequestKey]


class EngineClient:
    """A router's connection to one engine: connects, says Hello, and reconnects whenever the connection is lost.

    An engine's death shows as the end of the connection, a gap in the frame numbers or a Disconnect. Every connection
    has a new epoch and a new socket, so nothing meant for one incarnation can reach the next.
    """

    def __init__(
        self,
        name: str,
        endpoint: str,
        *,
        router_id: str,
        context: "zmq.Context[zmq.Socket[bytes]]",
        key: ClusterKey | None = None,
        door: Callable[[EngineCard], str] | None = None,
    ) -> None:
        """`key`: the cluster key, which the engine must have, too; None: the engine asks for none.

        `door`: why an engine with this card is not admitted, before anything else is heard of it; empty: it is, and the
        client takes its name. None: `name` is expected.
        """
        self.name = name
        self._door = door
        self.problem = ""  # why the engine that answered last is not admitted
        self.endpoint = endpoint
        self._key = key
        self.card: EngineCard | None = None
        self.num_dropped = 0  # malformed frames and messages, and frames before Ready
        self._log_limit = LogLimit()
        self._router_id = router_id
        self._context = context
        self._listener: EngineListener | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._outbox: list[tuple[msgspec.Raw, RequestKey | None]] = []
        self._beats: BeatReader | None = None
        self._next_sent = 0
        self._next_received = 0
        self._pieces: Iterator[ReceivedFrame] | None = None  # the rest of the frame that was received last
        self._has_ended = False  # the connection has failed; frames that arrived before still count
        self._num_begun = 0  # frames that the engine has begun to handle
        self._unhandled: deque[_SentFrame] = deque()
        self._reconnect: asyncio.TimerHandle | None = None
        self._resubscribe: asyncio.TimerHandle | None = None

    def connect(self, listener: EngineListener) -> None:
        """Begin, in the running event loop; the engine may come up later. Returns at once."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._open()

    def send(self, message: RouterToEngine) -> None:
        """Queue a message for an engine that is up; messages queued in one turn of the event loop leave together.

        Raises:
            UnsendableMessage: no frame can carry it; nothing is queued.
        """
        assert self.card is not None, f"{self.name} is not connected"
        encoded = encode_message(message)
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append((encoded, key_of(message)))

    def close(self) -> None:
        """Disconnect for good without telling the listener; queued messages still leave. Idempotent."""
        self._listener = None
        if self._reconnect is not None:
            self._reconnect.cancel()
        self._flush()
        self._shut(linger_ms=LAST_WORDS_MS if self.card is not None else 0)

    def _open(self) -> None:
        """Begin to connect; if that fails, as it does without free descriptors, try again later."""
        self._reconnect = None
        try:
            self._connect()
        except (zmq.ZMQError, OSError) as error:
            self._note_failure("connect to it", self.endpoint, error)
            self._shut()
            self._reconnect = self._loop.call_later(RECONNECT_S, self._open)

    def _note_failure(self, what: str, endpoint: str, error: Exception) -> None:
        if self._log_limit.passes():
            logger.error("%s: cannot %s at %s, trying again: %s", self.name, what, endpoint, error)

    def _connect(self) -> None:
        self._next_sent = self._next_received = self._num_begun = 0
        self._pieces, self._has_ended = None, False
        self._unhandled.clear()
        self._socket = socket = self._context.socket(zmq.DEALER)
        configure_socket(socket)
        remote = self.endpoint.startswith("tcp://")
        socket.setsockopt(zmq.RECONNECT_IVL, 10)  # ms, doubled up to:
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000 if remote else 40)  # a local attempt costs one system call
        if remote:
            socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))  # a host that vanishes says no goodbye
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_TIMEOUT_S * 1000))
            socket.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_TIMEOUT_S * 1000))
        if self._key is not None:
            self._key.present(socket)
        self._monitor = socket.get_monitor_socket(_WATCHED_EVENTS)
        socket.connect(self.endpoint)
        hello = Hello(router_id=self._router_id, epoch=secrets.token_hex(8), protocol=PROTOCOL)
        self._send_frame([encode_message(hello)], [])
        self._watch(self._monitor, self._read_monitor)
        self._watch(socket, self._drain)

    def _watch(self, socket: "zmq.Socket[bytes]", callback: Callable[[], None]) -> None:
        """Watch ZeroMQ's descriptor. It signals only changes of state, so also look once now and after every send."""
        self._loop.add_reader(socket.fileno(), callback)
        self._loop.call_soon(callback)

    def _shut(self, *, linger_ms: int = 0) -> None:
        self._outbox.clear()
        self.card = self._pieces = None
        if self._beats is not None:
            self._beats.close()
            self._beats = None
        if self._resubscribe is not None:
            self._resubscribe.cancel()
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor.fileno())
            self._monitor.close(linger=0)
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.disable_monitor()
            self._socket.close(linger=linger_ms)
        self._socket = self._monitor = None

    def _lost(self, reason: str) -> None:
        """Give the connection up and make a new one."""
        if self._socket is None:
            return
        was_up = self.card is not None
        suspects = {key for frame in self._unhandled if frame.number < self._num_begun for key in frame.keys}
        self._shut()
        self._reconnect = self._loop.call_later(RECONNECT_S, self._open)
        if was_up and self._listener is not None:
            self._listener.engine_down(self.name, reason, suspects)

    def _flush(self) -> None:
        if self._socket is not None and self._outbox:
            messages, self._outbox = self._outbox, []
            keys = iter([key for _, key in messages])
            for group in split(encoded for encoded, _ in messages):
                self._send_frame(group, [key for key in islice(keys, len(group)) if key is not None])
            if is_readable(self._socket):  # the send may have swallowed the signal
                self._loop.call_soon(self._drain)

    def _send_frame(self, messages: list[msgspec.Raw], keys: list[RequestKey]) -> None:
        assert self._socket is not None
        self._unhandled.append(_SentFrame(self._next_sent, keys))
        self._socket.send(encode_raw_frame(self._next_sent, messages), zmq.NOBLOCK)
        self._next_sent += 1

    def _read_monitor(self) -> None:
        while self._monitor is not None and is_readable(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if event["event"] in _REFUSALS and self._key is not None:
                self._note_refusal()
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._has_ended = True
                self._drain()

    def _note_refusal(self) -> None:
        if self._log_limit.passes():
            logger.error(
                "%s at %s does not let this router in, or is no engine: do both have the same --cluster-key-file?",
                self.name, self.endpoint,
            )  # fmt: skip

    def _drain(self) -> None:
        """Deliver what one turn of the event loop allows, and schedule another turn for the rest."""
        socket, is_empty, size = self._socket, False, 0
        try:
            for _ in range(FRAMES_PER_TURN):
                received = self._receive() if self._socket is socket else 0
                size += received
                if not received or size >= BYTES_PER_TURN:
                    is_empty = not received and self._socket is socket
                    return
        finally:  # the next frame must be read even after an exception in the listener
            if self._socket is not None:
                if not is_empty and (self._pieces is not None or is_readable(self._socket)):
                    self._loop.call_soon(self._drain)
                elif self._has_ended:
                    self._lost("the connection ended")

    def _receive(self) -> int:
        """Read and deliver a frame, or a piece of a long one. Returns roughly its bytes, at least 1; 0: there
        is none.
        """
        if self._socket is None:
            return 0
        if self._pieces is not None:
            return self._deliver_piece()
        if not is_readable(self._socket):
            return 0
        data = self._socket.recv(zmq.NOBLOCK)
        try:
            pieces = frame_pieces(data) if len(data) > PIECE_BYTES else None
            frame = decode_frame(data) if pieces is None else next(pieces)
        except MalformedMessage as error:
            self.num_dropped += 1
            self._lost(f"it sent a frame that cannot be read: {error}")
            return 1
        if frame.number != self._next_received:
            self._lost(f"frame {frame.number} came instead of {self._next_received}")
            return 1
        self._next_received += 1
        self._note_progress(frame)
        self._pieces = pieces
        self._deliver_frame(frame)
        return max(min(len(data), PIECE_BYTES), 1)

    def _deliver_piece(self) -> int:
        assert self._pieces is not None
        frame = next(self._pieces, None)
        if frame is None:
            self._pieces = None
            return 1
        self._deliver_frame(frame)
        return PIECE_BYTES

    def _deliver_frame(self, frame: ReceivedFrame) -> None:
        messages = cast("list[RouterToEngine | EngineToRouter]", frame.messages)
        if frame.has_bad:
            messages = [m for message in frame.messages if (m := self._checked(message)) is not None]
        if messages:
            self._deliver(messages)

    def _note_progress(self, frame: ReceivedFrame) -> None:
        """Drop suspicion of messages that the engine has handled: they cannot have killed it."""
        self._num_begun = max(self._num_begun, frame.begun)
        while self._unhandled and self._unhandled[0].number < frame.handled:
            self._unhandled.popleft()

    def _checked(self, message: RouterToEngine | EngineToRouter | BadMessage) -> RouterToEngine | EngineToRouter | None:
        """The message, or in place of an invalid one the failure of the request that it was about."""
        if not isinstance(message, BadMessage):
            return message
        if self.card is None and message.protocol is not None and self._is_other(message.protocol):
            return None
        self.num_dropped += 1
        if self._log_limit.passes():
            logger.error("dropped a message from %s: %s (%d so far)", self.name, message.reason, self.num_dropped)
        if message.key is None or self.card is None:
            return None
        self.send(Abort(*message.key))
        text = f"{self.name} sent a message that cannot be read: {message.reason}"[:MAX_ERROR_CHARS]
        return Failed(*message.key, MalformedMessage.code, text, retryable=True)

    def _deliver(self, messages: Sequence[RouterToEngine | EngineToRouter]) -> None:
        assert self._listener is not None
        if isinstance(messages[-1], Disconnect):
            self._lost(f"it ended the connection: {messages[-1].reason}")
            return
        if self.card is None:
            first = messages[0]
            if not isinstance(first, Ready) or (self._door is None and first.card.engine != self.name):
                self.num_dropped += 1
                if self._log_limit.passes():
                    what = f"engine {first.card.engine!r}" if isinstance(first, Ready) else f"{first!r:.300}"
                    logger.error("%s: expected Ready of %s, got %s", self.endpoint, self.name, what)
                return
            if self._is_other(first.protocol):
                return
            if self._door is not None and (problem := self._door(first.card)):
                self._turn_away(problem)
                return
            self.name, self.card, self.problem = first.card.engine, first.card, ""
            self._listener.engine_up(self.name, first.card)
            self._listen(first.card)
            messages = messages[1:]
        if messages and self._listener is not None:
            self._listener.engine_messages(self.name, messages)

    def _is_other(self, protocol: int) -> bool:
        """Refuse an engine of another protocol version."""
        if protocol == PROTOCOL:
            return False
        self.num_dropped += 1
        problem = f"it speaks protocol {protocol}, and this router {PROTOCOL}"
        if self._log_limit.passes():
            logger.error("%s is refused: %s", self.name, problem)
        if self._door is not None:
            self._turn_away(problem)
        return True

    def _turn_away(self, problem: str) -> None:
        """Disconnect from an engine that is not admitted, and ask again later."""
        self.problem = problem
        self._shut()
        if self._listener is not None:
            self._reconnect = self._loop.call_later(ASK_AGAIN_S, self._open)

    def retry(self) -> None:
        """Ask an engine that was not admitted again, now."""
        if self.problem and self._reconnect is not None:
            self._reconnect.cancel()
            self._open()

    def _listen(self, card: EngineCard) -> None:
        """Subscribe to the engine's beats, if it sends any."""
        if not card.beats or self._socket is None:
            return
        endpoint = beats_endpoint(self.endpoint, card.beats)
        try:
            self._beats = BeatReader(self._context, endpoint, card.epoch, self._beat, self._key)
        except (zmq.ZMQError, OSError) as error:
            self._note_failure("subscribe to its heartbeat", endpoint, error)
            self._resubscribe = self._loop.call_later(RECONNECT_S, self._listen, card)

    def _beat(self, beat: Beat) -> None:
        if self._listener is not None:
            self._listener.engine_messages(self.name, [beat])
