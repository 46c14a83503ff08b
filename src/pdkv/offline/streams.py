"""The requests of one event loop to an engine on another thread: messages in, outputs to the waiting tasks."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from pdkv.errors import EngineUnavailable, InvalidRequest
from pdkv.offline.engine_thread import EngineThread
from pdkv.offline.generation import Generation, InFlight
from pdkv.offline.outputs import RequestOutput
from pdkv.wire.messages import Abort, EngineToRouter, Submit


class Stream:
    """One generation, and whether it has news. It keeps no outputs: they are made when they are taken, so a slow reader
    never leaves more than the generation itself.
    """

    def __init__(self, generation: Generation, streams: "Streams") -> None:
        self.generation = generation
        self._streams = streams
        self._news = asyncio.Event()
        self.is_over = False
        """Whether the last output has been taken."""

    def notify(self) -> None:
        """Note that there is news of the generation."""
        if self.generation.error is not None or self.generation.has_news:
            self._news.set()

    async def take(self) -> RequestOutput:
        """Wait for news. Raises the generation's error."""
        await self._news.wait()
        self._news.clear()
        if self.generation.error is not None:
            raise self.generation.error
        self.is_over = self.generation.finished
        return self.generation.take()

    def close(self) -> None:
        """Give up the choices that still run, since there is no reader any more. Idempotent."""
        self._streams.close(self.generation)


class Streams:
    """All requests of one loop. All methods but `deliver` and `lost` belong to that loop's thread."""

    def __init__(self, engine: EngineThread, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._in_flight = InFlight(self._send)
        self._streams: dict[str, Stream] = {}

    def _send(self, message: Submit | Abort) -> None:
        self._engine.send(message, self)

    def start(self, generation: Generation) -> Stream:
        """Send a generation to the engine.

        Raises:
            InvalidRequest: another request has its name.
            EngineUnavailable: the engine has ended.
        """
        name = generation.request_id
        if name in self._streams:
            raise InvalidRequest(f"request_id must be unique: {name!r} is running", param="request_id")
        self._in_flight.start(generation)
        stream = self._streams[name] = Stream(generation, self)
        return stream

    def abort(self, name: str) -> None:
        """End a request in its current state; an unknown one is ignored."""
        stream = self._streams.get(name)
        if stream is not None:
            self._give_up(stream.generation)
            stream.generation.abort()
            stream.notify()

    def close(self, generation: Generation) -> None:
        """Forget a request, giving up the choices that still run. Idempotent."""
        if self._streams.pop(generation.request_id, None) is not None:
            self._give_up(generation)

    def _give_up(self, generation: Generation) -> None:
        with suppress(EngineUnavailable):  # then it is over
            self._in_flight.give_up(generation)

    # --- called by the engine's thread ----------------------------------------------------------------------------

    def deliver(self, messages: Sequence[EngineToRouter]) -> bool:
        """Pass results to the loop. Returns False if it is closed."""
        try:
            self._loop.call_soon_threadsafe(self._receive, messages)
        except RuntimeError:
            return False
        return True

    def lost(self) -> None:
        """Pass the loss to the loop, unless it is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._fail_all)

    # --- called by the loop ---------------------------------------------------------------------------------------

    def _receive(self, messages: Sequence[EngineToRouter]) -> None:
        try:
            for message in messages:
                generation = self._in_flight.receive(message)
                if generation is not None:
                    self._streams[generation.request_id].notify()
        except EngineUnavailable:  # it has ended since: what another choice waits for will not come
            self._fail_all()

    def _fail_all(self) -> None:
        assert self._engine.ended is not None
        kind, reason = self._engine.ended
        for name, stream in self._streams.items():
            if not stream.generation.finished:
                stream.generation.error = kind(reason, request_id=name)
            stream.notify()
