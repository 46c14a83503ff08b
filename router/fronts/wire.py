"""What fronts and the dispatcher say to each other: calls of methods `on_NAME` of the other end's objects, without
results, in frames over a unix socket, one frame each way per turn of the event loop.

The front numbers the objects, one on each end for a request (`RemoteStay`, `Session`) or another exchange of HTTP
(`RemotePage`, `Page`); number 0 are the ends themselves (`RemoteDesk`, `Door`).
"""

import asyncio
import contextlib
import functools
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypedDict, Union, cast, get_type_hints

import msgspec
from msgspec.structs import astuple

from pdkv import errors
from pdkv.errors import MalformedMessage, PdkvError, UnsendableMessage
from pdkv.router.generations.timeline import Timeline
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
    fields: dict[str, str | bool | int | float | None]

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
    guesses: tuple[int, int] = (0, 0)
    request_id: str = ""
    choice: int = 0
    timeline: Timeline = Timeline(0.0)  # with --otlp-endpoint


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
    """`num` encoded calls as one encoded list."""
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


class Link(asyncio.Protocol):
    """One end of a connection. Whatever is sent in one turn of the event loop leaves in one frame, once the peer has
    read what was sent before.
    """

    def __init__(self, *kinds: type) -> None:
        """`kinds`: classes of objects whose methods the other end may call; what they raise ends the connection."""
        self.objects: dict[int, Any] = {}
        """Objects that the other end may call, by number; a call of one that has ended is ignored."""
        self._calls, self._decoder = _calls_of(kinds)
        self._in = bytearray()
        self._out: list[bytes] = []
        self._size = 0  # of those
        self._sources: dict[Callable[[], None], None] = {}
        self._is_due = self._is_full = False
        self._transport: asyncio.Transport | None = None
        self._num_silent = 0  # beats since something came
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Say that this end runs until the connection ends, and end it if the other one does not."""
        try:
            while not self._over.is_set() and self._num_silent < SILENT_BEATS:
                self._num_silent += 1
                self._send_frame()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await self._over.wait()
            if not self._over.is_set():
                logger.error("a connection between front and dispatcher ends: the other one is silent")
        finally:
            self.close()

    def close(self) -> None:
        """Disconnect at once. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse processes of other users."""
        self._transport = cast(asyncio.Transport, transport)
        sock: socket.socket = transport.get_extra_info("socket")
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            logger.error("a process of user %d is refused: another one than this process's (%d)", uid, os.geteuid())
            self.close()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Have `run` end."""
        self._transport = None
        self._over.set()

    def data_received(self, data: bytes) -> None:
        """Take whole frames."""
        self._in += data
        begin = self._num_silent = 0
        try:
            while len(self._in) - begin >= 4 and self._transport is not None:
                end = begin + 4 + int.from_bytes(self._in[begin : begin + 4])
                if end - begin > MAX_FRAME_BYTES + 9:
                    raise MalformedMessage(f"a frame of {end - begin} bytes; at most {MAX_FRAME_BYTES} were expected")
                if len(self._in) < end:
                    break
                with memoryview(self._in) as view, view[begin + 4 : end] as frame:
                    calls = decode_total(self._decoder, frame)
                begin = end
                self._take(calls)
        except Exception as error:  # one connection ends, and nothing else
            is_theirs = isinstance(error, MalformedMessage)
            logger.error("a connection between front and dispatcher ends: %s", error, exc_info=not is_theirs)
            self.close()
        del self._in[:begin]

    def _take(self, calls: Iterable[msgspec.Struct]) -> None:
        objects = self.objects
        for call in calls:
            to_and_arguments = astuple(call)
            kind, method = self._calls[type(call)]
            if (target := objects.get(to_and_arguments[0])) is not None:
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
            self._wake()
        self._out.append(call)
        self._size += len(call)

    def ask_for_news(self, tell: Callable[[], None]) -> None:
        """Have `tell` send news with the next frame: until the peer reads, they stay where they are."""
        if not self._sources:
            self._wake()
        self._sources[tell] = None

    def _wake(self) -> None:
        """Have a frame leave soon."""
        if not self._is_due and not self._is_full and self._transport is not None:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        if self._transport is None or self._is_full:
            return
        sources, self._sources = self._sources, {}
        for tell in sources:
            tell()
        if self._out:
            self._send_frame()

    def _send_frame(self) -> None:
        """Send a frame; an empty one is a beat."""
        if self._transport is not None:
            frame = as_list(len(self._out), b"".join(self._out))
            self._transport.write(len(frame).to_bytes(4) + frame)
            self._out, self._size = [], 0

    def pause_writing(self) -> None:
        """Keep what is new where it is."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Send it."""
        self._is_full = False
        self._wake()
