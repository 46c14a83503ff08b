"""The launcher's socket in its run directory: operators request one change at a time and follow its progress.

One JSON line is the request; answer lines report progress, and the last one the result.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pdkv.base.limits import MAX_WAIT_S
from pdkv.errors import ConfigError, MalformedMessage, PdkvError, StartupError
from pdkv.launch.autoscale import LaunchScaler
from pdkv.launch.fleet_control import FleetControl
from pdkv.launch.plan import Kind
from pdkv.launch.run_dir import CONTROL_SOCKET
from pdkv.launch.specs import Progress, StartFailed, encode
from pdkv.wire.decoding import decode_total

_MAX_LINE_BYTES = 64 * 1024
_ASK_S = 5.0  # seconds for a connected client to send its request

_Seconds = Annotated[float, Meta(ge=0.0, le=MAX_WAIT_S)]

logger = logging.getLogger(__name__)


class Scale(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Set the number of engines; None: leave it."""

    prefill: int | None = None
    decode: int | None = None
    drain_s: _Seconds | None = None  # None: the launch's setting

    def __str__(self) -> str:
        return ", ".join(f"{count} {role}" for role, count in self.counts.items()) or "as many as there are"

    @property
    def counts(self) -> "dict[Kind, int]":
        """The given numbers, by role."""
        given: dict[Kind, int | None] = {"prefill": self.prefill, "decode": self.decode}
        return {role: count for role, count in given.items() if count is not None}


class Restart(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Restart all engines, one after the other."""

    drain_s: _Seconds | None = None

    def __str__(self) -> str:
        return "a restart of every engine"


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The order is done."""

    text: str


Order = Scale | Restart
Answer = Progress | Ended | StartFailed
_order_decoder: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_answer_decoder: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


class ControlServer:
    """Carries out one order at a time. An order continues when its client disconnects."""

    def __init__(self, fleet: FleetControl, drain_s: float, scaler: LaunchScaler | None = None) -> None:
        self._fleet = fleet
        self._scaler = scaler
        self._drain_s = drain_s
        self._running: asyncio.Task[str] | None = None
        self._what = ""
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether an order is being carried out."""
        return self._running is not None and not self._running.done()

    @contextlib.asynccontextmanager
    async def serving(self, run_dir: Path) -> AsyncIterator[None]:
        """Serve until the end of the block, which ends the current order."""
        server = await asyncio.start_unix_server(self._serve, str(run_dir / CONTROL_SOCKET), limit=_MAX_LINE_BYTES)
        try:
            yield
        finally:
            server.close()
            tasks = [*self._connections, *([self._running] if self._running is not None else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            answer = await self._answer(reader, lambda text: _write(writer, Progress(text)))
            _write(writer, answer)
            await writer.drain()
        except (OSError, EOFError, TimeoutError):  # the client is gone, or sends nothing
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, say: Callable[[str], None]) -> Answer:
        """Carry out one order; returns the last answer."""
        try:
            async with asyncio.timeout(_ASK_S):
                order = decode_total(_order_decoder, await reader.readuntil(b"\n"))
        except (MalformedMessage, asyncio.LimitOverrunError) as error:
            return StartFailed(f"this is no order: {error}", config=True)
        if self._scaler is not None and isinstance(order, Scale):
            return StartFailed("this launch chooses the number of its engines by itself (--autoscale)", config=True)
        if self._scaler is not None and self._scaler.is_busy:
            return StartFailed("the autoscaler is starting or ending engines: try again later", config=False)
        if self.is_busy:
            return StartFailed(f"another order is being carried out ({self._what}): try again later", config=False)
        self._what = str(order)
        self._running = asyncio.create_task(self._carry_out(order, say))
        try:
            return Ended(await asyncio.shield(self._running))
        except PdkvError as error:
            return StartFailed(str(error), config=isinstance(error, ConfigError))

    async def _carry_out(self, order: Order, say: Callable[[str], None]) -> str:
        def tell(text: str) -> None:
            logger.info("%s: %s", order, text)
            say(text)

        drain_s = self._drain_s if order.drain_s is None else order.drain_s
        try:
            match order:
                case Scale():
                    text = await self._fleet.scale(order.counts, drain_s, tell)
                case Restart():
                    text = await self._fleet.restart(drain_s, tell)
        except PdkvError as error:
            logger.error("%s: %s", order, error)
            raise
        except Exception as error:
            logger.exception("%s failed", order)
            raise StartupError(f"{order} failed in the launcher; its log has the details: {error!r}") from error
        logger.info("%s: %s", order, text)
        return text


async def give_order(run_dir: Path, order: Order, on_progress: Callable[[str], None]) -> str:
    """Request a change from the launcher of a run directory; returns the result.

    Raises:
        ConfigError: it is not possible.
        StartupError: it failed, or the launcher ended, or sent an invalid answer.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(str(run_dir / CONTROL_SOCKET), limit=_MAX_LINE_BYTES)
        try:
            writer.write(encode(order) + b"\n")
            while True:
                match decode_total(_answer_decoder, await reader.readuntil(b"\n")):
                    case Progress(text=text):
                        on_progress(text)
                    case Ended(text=text):
                        return text
                    case StartFailed(message=message, config=True):
                        raise ConfigError(message)
                    case StartFailed(message=message):
                        raise StartupError(message)
        finally:
            writer.close()
    except (OSError, EOFError):
        raise StartupError(f"the launcher of {run_dir} has ended, or does not answer") from None
    except (MalformedMessage, asyncio.LimitOverrunError) as error:
        raise StartupError(f"the launcher of {run_dir} sent an invalid answer: {error}") from None


def _write(writer: asyncio.StreamWriter, answer: Answer) -> None:
    if not writer.is_closing():
        writer.write(encode(answer) + b"\n")
