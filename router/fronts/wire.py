"""What fronts and the dispatcher say to each other: calls of methods `on_NAME` of the other end's objects, without
results, in frames over a unix socket, one frame each way per turn of the event loop.

The front numbers the objects, one on each end for a request (`RemoteStay`, `Session`) or another exchange of HTTP
(`RemotePage`, `Page`); number 0 are the ends themselves (`RemoteDesk`, `Door`).
"""

import asyncio
import functools
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypedDict, Union, get_type_hints

import msgspec
from msgspec.structs import astuple

from pdkv import errors
from pdkv.base.clock import MONOTONIC
from pdkv.errors import MalformedMessage, PdkvError, UnsendableMessage
from pdkv.router.request import Delta, PromptKeys
from pdkv.wire.decoding import decode_total
from pdkv.wire.reports import SourceCounts

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 20
"""A peer that announces a larger frame is disconnected."""

MAX_BODY_BYTES = MAX_FRAME_BYTES - (1 << 20)
"""The largest body of a request that fits a frame with the rest of its call."""

BEAT_S, SILENT_BEATS = 5.0, 6
"""Seconds between beats, and beats of one's own after which a peer that has sent nothing is disconnected: a process
that was stopped itself does not count that time.
"""

RawHeaders = list[tuple[bytes, bytes]]


class Problem(NamedTuple):
    """A PdkvError as it travels."""

    kind: str
    text: str
    fields: dict[str, str | float | None]

    @classmethod
    def of(cls, error: PdkvError) -> "Problem":
        """That of an error."""
        fields = {"code": error.code, "status": error.status, **vars(error)}
        plain = {name: value for name, value in fields.items() if isinstance(value, str | int | float | None)}
        return cls(type(error).__name__, str(error), plain)

    def error(self) -> PdkvError:
        """The error, new each time."""
        kind = getattr(errors, self.kind, PdkvError)
        error: PdkvError = kind.__new__(kind, self.text)
        vars(error).update(self.fields)
        return error


News: Any = msgspec.defstruct("News", list(get_type_hints(Delta).items()), array_like=True, gc=False)
"""A Delta as a front has it: one that the garbage collector need not follow."""


class Facts(NamedTuple):
    """What is known of a generation, by the names of its properties."""

    prefill_engine: str = ""
    decode_engine: str = ""
    sources: SourceCounts = SourceCounts()
    num_cached_tokens: int = 0
    num_lossy_tokens: int | None = None
    num_attempts: int = 1
    stays: str = ""


class PageScope(TypedDict):
    """An ASGI scope, as far as it is passed on."""

    method: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: RawHeaders
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None
    scheme: str


encode = msgspec.msgpack.Encoder(enc_hook=lambda keys: None).encode
"""Encodes a call: the method's name without `on_`, the number of its object, and its arguments."""


def as_list(num: int, calls: bytes | bytearray) -> bytes:
    """So many encoded calls as one encoded list."""
    return b"\xdd" + num.to_bytes(4) + calls


@functools.cache
def _calls_of(kinds: tuple[type, ...]) -> tuple[dict[type, tuple[type, Callable[..., None]]], Any]:
    """The calls that objects of these classes take, as structs, each with its class and method; and their decoder."""
    calls: dict[type, tuple[type, Callable[..., None]]] = {}
    for kind in kinds:
        for name, method in vars(kind).items():
            if name.startswith("on_"):
                fields = [("to", int), *(field for field in get_type_hints(method).items() if field[0] != "return")]
                calls[msgspec.defstruct(name, fields, tag=name[3:], array_like=True, gc=False)] = kind, method
    any_of: Any = list[Union[tuple(calls)]]  # type: ignore[misc]  # noqa: UP007
    return calls, msgspec.msgpack.Decoder(any_of, dec_hook=lambda kind, value: PromptKeys())


class Source(Protocol):
    """What has news at times."""

    def tell_news(self) -> None:
        """Send them."""


class Link:
    """One end of a connection. Whatever is sent in one turn of the event loop leaves in one frame, once the peer has
    read what was sent before.
    """

    def __init__(self, *kinds: type) -> None:
        """`kinds`: classes of objects whose methods the other end may call; what they raise ends the connection."""
        self.objects: dict[int, Any] = {}
        """Those objects, by number; a call of another one is ignored: it has ended."""
        self._calls, self._decoder = _calls_of(kinds)
        self._out: list[bytes] = []
        self._size = 0  # of those
        self._sources: dict[Source, None] = {}
        self._is_due = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._num_silent = 0  # beats since something came

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Exchange calls until the connection ends, for whatever reason. Refuses processes of other users."""
        self._writer = writer
        try:
            async with asyncio.TaskGroup() as tasks:
                _check_user(writer.get_extra_info("socket"))
                for work in (self._read(reader), self._write(writer), self._beat()):
                    tasks.create_task(work)
        except* (OSError, EOFError):
            pass
        except* Exception as group:
            error = group.exceptions[0]
            is_theirs = isinstance(error, MalformedMessage)
            logger.error("a connection between front and dispatcher ends: %s", error, exc_info=not is_theirs)
        finally:
            self.close()

    def close(self) -> None:
        """Disconnect at once. Idempotent."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            size = int.from_bytes(await reader.readexactly(4))
            if size > MAX_FRAME_BYTES + 5:
                raise MalformedMessage(f"a frame of {size} bytes; at most {MAX_FRAME_BYTES} were expected")
            frame = await reader.readexactly(size)
            self._num_silent = 0
            for call in decode_total(self._decoder, frame):
                to_and_arguments = astuple(call)
                kind, method = self._calls[type(call)]
                if (target := self.objects.get(to_and_arguments[0])) is not None:
                    if type(target) is not kind:
                        raise MalformedMessage(f"{type(call).__name__} of a {type(target).__name__}")
                    method(target, *to_and_arguments[1:])

    def send(self, to: int, name: str, *arguments: object) -> None:
        """Call on_`name` of the other end's object `to` with this turn's frame. Raises UnsendableMessage."""
        self.put(encode((name, to, *arguments)))

    def put(self, call: bytes) -> None:
        """Send an encoded call with this turn's frame. Raises UnsendableMessage."""
        if self._size + len(call) > MAX_FRAME_BYTES:
            if len(call) > MAX_FRAME_BYTES:
                raise UnsendableMessage(f"{len(call)} bytes for a frame; at most {MAX_FRAME_BYTES} were expected")
            self._send_frame()
        if not self._out:
            self._is_due.set()
        self._out.append(call)
        self._size += len(call)

    def ask_for_news(self, source: Source) -> None:
        """Have its news sent with the next frame: until the peer reads, they stay where they are."""
        if not self._sources:
            self._is_due.set()
        self._sources[source] = None

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            sources, self._sources = self._sources, {}
            for source in sources:
                source.tell_news()
            if self._out:
                self._send_frame()
            await writer.drain()

    def _send_frame(self) -> None:
        """Send a frame; an empty one is a beat."""
        if self._writer is not None:
            frame = as_list(len(self._out), b"".join(self._out))
            self._writer.write(len(frame).to_bytes(4) + frame)
        self._out, self._size = [], 0

    async def _beat(self) -> None:
        """Say that this end runs, and give up one that does not."""
        while self._num_silent < SILENT_BEATS:
            self._num_silent += 1
            self._send_frame()
            await MONOTONIC.pause(BEAT_S)
        raise MalformedMessage("the other one is silent")


def _check_user(sock: socket.socket) -> None:
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise MalformedMessage(f"a process of user {uid}; one of {os.geteuid()} was expected")
