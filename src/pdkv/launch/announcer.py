"""Announces an engine to a router on another host, for as long as it runs (`pd engine --join`, docs/membership.md)."""

import asyncio
import contextlib
import logging
import secrets
from typing import cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from pdkv.base.clock import MONOTONIC
from pdkv.base.log_limit import LogLimit
from pdkv.errors import ConfigError, MalformedMessage
from pdkv.wire.cluster_key import ClusterKey
from pdkv.wire.decoding import decode_total
from pdkv.wire.joining import ALIVE_IVL_S, ALIVE_TIMEOUT_S, MAX_JOIN_BYTES, Join, encode, verdict_decoder
from pdkv.wire.messages import PROTOCOL

ACK_S = 2.0
"""Seconds for a router to answer that the engine is being drained; one that is gone is not waited for."""

MOVE_S = 10.0
"""Seconds that a router may take, besides the engine's --drain-s, to move what the engine still has."""

_SAYS_NO = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_ENDS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _SAYS_NO | _ENDS

AGAIN_S = 2.0
"""Seconds until a router is looked for again where another program has answered."""

_SAY_AGAIN_S = 30.0

logger = logging.getLogger(__name__)


class Announcer:
    """The engine's word to one router. Every new connection is asked for it, also by a router's successor."""

    def __init__(self, router: str, name: str, endpoint: str, key: ClusterKey, pool: str = "") -> None:
        self._router = router
        self._join = Join(name, endpoint, PROTOCOL, secrets.token_hex(8), pool=pool)
        self._key = key
        self._is_going = asyncio.Event()  # the router knows that it leaves
        self._was_admitted = False

    async def run(self, stopped: asyncio.Event, hurried: asyncio.Event, drain_s: float) -> None:
        """Announce the engine until `stopped`, then have it drained; returns when no request needs it any more, or
        `hurried`, or its time is over.

        Raises:
            ConfigError: the router refuses the engine, or has another key.
        """
        context = zmq.asyncio.Context()
        socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        monitor = socket.get_monitor_socket(_EVENTS)
        works = (
            self._hear(socket),
            self._watch(monitor, socket),
            self._leave(socket, stopped, drain_s),
            _end(stopped, hurried),
        )
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            self._connect(socket)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)
            context.term()

    def _connect(self, socket: zmq.asyncio.Socket) -> None:
        socket.setsockopt(zmq.PROBE_ROUTER, 1)  # the router sees each new connection, and asks
        socket.setsockopt(zmq.IMMEDIATE, 1)  # else a connection that is made again is none
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_JOIN_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(ALIVE_IVL_S * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(ALIVE_TIMEOUT_S * 1000))
        self._key.swapped().present(cast("zmq.Socket[bytes]", socket))
        socket.connect(self._router)

    async def _hear(self, socket: zmq.asyncio.Socket) -> None:
        """Answer the router; returns when it lets the engine go."""
        while True:
            try:
                verdict = decode_total(verdict_decoder, await socket.recv())
            except MalformedMessage as error:
                logger.error("the router at %s sent what cannot be read: %s", self._router, error)
                continue
            if verdict.kind in ("asked", "waiting") and verdict.text:
                logger.warning("the router at %s does not take this engine in yet: %s", self._router, verdict.text)
            match verdict.kind:
                case "asked":
                    await socket.send(encode(self._join))
                case "admitted":
                    self._was_admitted = True
                    logger.info("the router at %s has taken %s in", self._router, self._join.name)
                case "refused":
                    raise ConfigError(f"the router at {self._router} refuses {self._join.name}: {verdict.text}")
                case "leaving":
                    self._is_going.set()
                case "left":
                    return

    async def _watch(self, monitor: zmq.asyncio.Socket, socket: zmq.asyncio.Socket) -> None:
        """Raise ConfigError if what listens there refuses the key, or is no router, before a router has admitted the
        engine; later that is tried again. Where a handshake just ends, ZeroMQ connects again, later and later: the
        router may not be up behind its address, or have another key.
        """
        text = f"{self._router} does not admit this engine: is it a router's address, with the same --cluster-key-file?"
        limit, before = LogLimit(_SAY_AGAIN_S), 0
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            says_no = event & _SAYS_NO or (before, event) == (zmq.EVENT_CONNECTED, zmq.EVENT_DISCONNECTED)
            if says_no and not self._was_admitted:
                raise ConfigError(text)
            if (says_no or event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL) and limit.passes():
                logger.warning("%s It tries again.", text)
            if says_no:  # ZeroMQ does not come back after what it takes for an attack
                with contextlib.suppress(zmq.ZMQError):
                    socket.disconnect(self._router)
                await MONOTONIC.pause(AGAIN_S)
                socket.connect(self._router)
            before = event

    async def _leave(self, socket: zmq.asyncio.Socket, stopped: asyncio.Event, drain_s: float) -> None:
        """When it is time, say so; returns if the router does not answer, or after the time for it."""
        await stopped.wait()
        self._join = msgspec.structs.replace(self._join, leaving=True)
        try:
            async with asyncio.timeout(ACK_S):
                await socket.send(encode(self._join))
                await self._is_going.wait()
            async with asyncio.timeout(drain_s + MOVE_S):
                await asyncio.Event().wait()
        except TimeoutError:
            logger.warning("the router at %s has not let %s go in time", self._router, self._join.name)


async def _end(stopped: asyncio.Event, hurried: asyncio.Event) -> None:
    await stopped.wait()
    await hurried.wait()
