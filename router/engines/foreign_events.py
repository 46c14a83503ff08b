"""Follows the KV events of a server of another engine: a ZeroMQ publisher, and one that repeats what was missed."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import zmq
import zmq.asyncio

from pdkv.base.clock import MONOTONIC
from pdkv.base.log_limit import LogLimit
from pdkv.errors import MalformedMessage
from pdkv.router.engines.foreign_cache import ForeignCache
from pdkv.router.engines.foreign_kinds import Source
from pdkv.wire.messages import KVEvent

logger = logging.getLogger(__name__)

MAX_BATCH_BYTES = 1 << 20
"""Largest batch; a connection on which a larger one comes is made anew, so that it is missed."""

MAX_UNREAD = 128
"""Batches that may wait here; what comes meanwhile waits at the server, or is missed."""

INLINE_BYTES = 1 << 14
"""Largest batch that is read on the event loop, in a millisecond; others are read on a thread."""

REPLAY_S = 5.0
"""Seconds for each missed batch that is repeated."""

RECONNECT_S = 0.2
"""Seconds between two connections."""

HEARTBEAT_MS, SILENT_MS = 2000, 6000
"""A publisher that does not answer heartbeats is connected to anew."""


class EventFollower:
    """Keeps a ForeignCache, and tells of its changes. A gap that cannot be filled empties it."""

    def __init__(
        self, name: str, source: Source, cache: ForeignCache, tell: Callable[[Sequence[KVEvent]], None]
    ) -> None:
        self.num_gaps = self.num_dropped = 0  # gaps that were not filled, and frames that cannot be read
        self._name, self._source, self._cache, self._tell = name, source, cache, tell
        self._next = 0  # number of the next batch that is wanted
        self._last = -1  # number of the last batch that was published, and not repeated
        self._log_limit = LogLimit(60.0)
        self._lock = asyncio.Lock()  # around what changes or reads the cache, which a thread may do

    async def run(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Follow until cancelled. Raises zmq.ZMQError, as without a free descriptor."""
        async with self._lock:
            self._tell(self._cache.clear())
        while True:
            with _socket(context, zmq.SUB) as socket, _watch(socket) as monitor:
                socket.subscribe(b"")
                socket.connect(self._source.events)
                reading = asyncio.ensure_future(self._read(context, socket))
                cut = asyncio.ensure_future(monitor.recv_multipart())
                try:  # ZeroMQ does not come back after what it takes for an attack
                    await asyncio.wait({reading, cut}, return_when=asyncio.FIRST_COMPLETED)
                    if reading.done():
                        reading.result()
                finally:
                    cut.cancel()
                    try:
                        async with self._lock:  # what a thread has begun to read is told: it is not asked for again
                            pass
                    finally:
                        reading.cancel()
            await MONOTONIC.pause(RECONNECT_S)

    async def _read(self, context: "zmq.Context[zmq.Socket[bytes]]", socket: zmq.asyncio.Socket) -> None:
        await self._catch_up(context)
        while True:
            number, payload = _parse(await socket.recv_multipart())
            if number < 0:
                self.num_dropped += 1
            else:
                if number <= self._last:
                    await self._forget(f"batch {number} came after {self._last}")
                    self._next = 0
                self._last = number
                await self._arrived(context, number, payload)
            await asyncio.sleep(0)  # others have their turn, however many come

    async def resync(self) -> None:
        """Tell all that the cache holds."""
        async with self._lock:
            self._tell(await asyncio.to_thread(self._cache.snapshot))

    async def _arrived(self, context: "zmq.Context[zmq.Socket[bytes]]", number: int, payload: bytes) -> None:
        if number > self._next:
            await self._catch_up(context)
        if number > self._next:
            await self._forget(f"batches {self._next} to {number - 1} are missing")
        if number >= self._next:
            await self._take(number, payload)

    async def _catch_up(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Take what is repeated from the next batch on."""
        if not self._source.replay:
            return
        try:
            with _socket(context, zmq.DEALER) as socket:
                socket.connect(self._source.replay)
                await socket.send_multipart([b"", self._next.to_bytes(8, "big")])
                while True:
                    async with asyncio.timeout(REPLAY_S):
                        number, payload = _parse(await socket.recv_multipart())
                    if number < self._next:  # -1 is the end
                        return
                    if number > self._next:
                        await self._forget(f"batches {self._next} to {number - 1} are not repeated")
                    await self._take(number, payload)
                    await asyncio.sleep(0)  # as in `_read`
        except TimeoutError:
            if self._log_limit.passes():
                logger.warning("%s: %s does not repeat its KV events", self._name, self._source.replay)

    async def _take(self, number: int, payload: bytes) -> None:
        async with self._lock:
            self._next = number + 1  # from here on it is told, whatever happens to this task
            try:
                if len(payload) <= INLINE_BYTES:
                    changes = self._cache.take(payload)
                else:
                    changes = await asyncio.to_thread(self._cache.take, payload)
            except MalformedMessage as error:
                self.num_dropped += 1
                self._empty(f"batch {number} cannot be read: {error}")
                return
        if changes:
            self._tell(changes)

    async def _forget(self, why: str) -> None:
        async with self._lock:
            self._empty(why)

    def _empty(self, why: str) -> None:
        if self._cache.is_empty:
            return
        self.num_gaps += 1
        if self._log_limit.passes():
            logger.warning("%s: what it said of its cache does not count any more: %s", self._name, why)
        self._tell(self._cache.clear())


@contextlib.contextmanager
def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> Iterator[zmq.asyncio.Socket]:
    socket = zmq.asyncio.Socket(zmq.asyncio.Context.shadow(context), kind)
    try:
        socket.linger = 0
        socket.set_hwm(MAX_UNREAD)
        for option, value in (
            (zmq.MAXMSGSIZE, MAX_BATCH_BYTES), (zmq.IPV6, 1), (zmq.RECONNECT_IVL, 100), (zmq.RECONNECT_IVL_MAX, 5000),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS), (zmq.HEARTBEAT_TIMEOUT, SILENT_MS), (zmq.CONNECT_TIMEOUT, SILENT_MS),
        ):  # fmt: skip
            socket.setsockopt(option, value)
        yield socket
    finally:
        socket.close(linger=0)


@contextlib.contextmanager
def _watch(socket: zmq.asyncio.Socket) -> Iterator[zmq.asyncio.Socket]:
    """A socket that tells when the connection ends."""
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        yield monitor
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)


def _parse(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """The number and the payload of a batch; -1: it is none."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        return -1, b""
    return int.from_bytes(frames[-2], "big", signed=True), frames[-1]
