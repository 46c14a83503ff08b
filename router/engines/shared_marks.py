"""Marks that several routers share by way of Redis: what one finds out of an engine, the others know at once.

Publish and subscribe only: nothing is stored. A mark is told when it is made, again every second while it holds, and
when it ends, and is forgotten after 3 s without. Redis may come and go: marks are then a router's own.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from pdkv.errors import ConfigError, MalformedMessage
from pdkv.router.engines.fleet import Fleet
from pdkv.router.engines.foreign_marks import Subject
from pdkv.secret_options import without_secrets
from pdkv.wire.decoding import decode_total

logger = logging.getLogger(__name__)

CHANNEL = "pdkv:marks"

REPEAT_S = 1.0
"""How often a mark is told while it holds; it is forgotten after MARK_TICKS (fleet.py) without."""

MAX_MARKS = 1024
"""Of one message."""

_RETRY_S = 1.0
_TIMEOUT_S = 2.0
_CANCEL_AGAIN_S = 0.1
"""The client sends by `asyncio.wait_for`, which before Python 3.12 swallows a cancellation while a send completes."""

_MAX_BYTES = 1 << 20


class _Told(msgspec.Struct, frozen=True):
    """One message: marks of a router that hold, or have ended."""

    router: str
    marks: list[tuple[Subject, str]]  # the reason; "": the mark ends


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Told)


def own_marks(fleet: Fleet, now: float) -> dict[Subject, str]:
    """What this router has found out by itself: suspects, and breakers that are not closed."""
    epochs = {card.engine: card.epoch for card in fleet.cards()}
    marks: dict[Subject, str] = {}
    for name, epoch in epochs.items():
        engine = fleet.engines[name]
        reason = engine.suspicion or ("fails too often" if engine.breaker.state(now) != "closed" else "")
        if reason:
            marks[((name, epoch),)] = reason
    for pair in fleet.pairs.states(now):
        if epochs.keys() >= set(pair):
            marks[tuple((name, epochs[name]) for name in pair)] = "KV loads fail"
    return marks


class SharedMarks:
    """One router's marks, to and from Redis. Lives in one event loop; nothing here holds it up or raises."""

    def __init__(self, url: str, router_id: str, hear: Callable[[Subject, str], None]) -> None:
        """`hear(subject, reason)` is called for each mark of another router, "" where it ends.

        Raises:
            ConfigError: the package redis is missing, or `url` is no URL of a Redis server.
        """
        try:
            import redis.asyncio as redis
        except ImportError as error:
            raise ConfigError("--redis needs the package redis: pip install 'pdkv[redis]'") from error
        self._url = without_secrets(url)
        try:
            self._redis = redis.Redis.from_url(
                url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, health_check_interval=0
            )
        except ValueError as error:
            raise ConfigError(f"--redis {self._url} is no URL of a Redis server: {error}") from error
        self.num_failures = 0  # connections that were lost or could not be made
        self.num_dropped = 0  # messages that cannot be read
        self._router_id = router_id
        self._hear = hear
        self._marks: dict[Subject, str] = {}
        self._ended: set[Subject] = set()
        self._news = asyncio.Event()
        self._failing: set[str] = set()  # "listen", "tell"
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin, in the running event loop."""
        loop = asyncio.get_running_loop()
        works = {"listen": self._listen, "tell": self._tell}
        self._tasks = [loop.create_task(self._keep_at(name, work)) for name, work in works.items()]

    async def close(self) -> None:
        """End, and leave no task or connection. Idempotent."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            _, left = await asyncio.wait(self._tasks, timeout=_CANCEL_AGAIN_S)
            self._tasks = [*left]
        with contextlib.suppress(Exception):
            await self._redis.aclose()

    def update(self, marks: Mapping[Subject, str]) -> None:
        """All marks that this router makes now, with their reasons; a new one is told at once, and so is an end."""
        if marks.keys() != self._marks.keys():
            self._ended = (self._ended | self._marks.keys()) - marks.keys()
            self._news.set()
        self._marks = dict(marks)

    async def _keep_at(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do it again and again: Redis may die and come back. That it does is logged once for both, and counted."""
        while True:
            try:
                await work()
            except Exception as error:
                self.num_failures += 1
                if not self._failing:
                    logger.warning("engines' marks are not shared now: %s: %s", self._url, without_secrets(str(error)))
                self._failing.add(name)
            await asyncio.sleep(_RETRY_S)

    def _succeeded(self, name: str) -> None:
        if self._failing == {name}:
            logger.info("engines' marks are shared again: %s", self._url)
        self._failing.discard(name)

    async def _tell(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPEAT_S):
                    await self._news.wait()
            self._news.clear()
            ended = [(subject, "") for subject in self._ended]
            told = [*self._marks.items(), *ended][:MAX_MARKS]
            if told:
                await self._redis.publish(CHANNEL, _encoder.encode(_Told(self._router_id, told)))
                self._ended.difference_update(subject for subject, _ in ended)
            self._succeeded("tell")

    async def _listen(self) -> None:
        async with self._redis.pubsub(ignore_subscribe_messages=True) as channel:
            await channel.subscribe(CHANNEL)
            self._succeeded("listen")
            while True:
                message = await channel.get_message(timeout=None)
                if message is not None:
                    self._take(message["data"])

    def _take(self, data: object) -> None:
        try:
            if not isinstance(data, bytes) or len(data) > _MAX_BYTES:
                raise MalformedMessage("no bytes, or too many")
            told = decode_total(_decoder, data)
        except MalformedMessage:
            self.num_dropped += 1
            return
        if told.router != self._router_id:
            for subject, reason in told.marks[:MAX_MARKS]:
                self._hear(subject, reason)
