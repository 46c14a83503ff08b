"""What fronts and the dispatcher say to each other: calls of the other end's methods `on_NAME`, without results, in
frames over a unix socket, one frame each way per turn of the event loop.
"""

import asyncio
import functools
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, Union, cast, get_type_hints

import msgspec

from pdkv import errors
from pdkv.errors import MalformedMessage, PdkvError, UnsendableMessage
from pdkv.router.request import PromptKeys
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


_encode = msgspec.msgpack.Encoder(enc_hook=lambda keys: None).encode


def encode(name: str, *arguments: object) -> bytes:
    """A call of the other end's on_`name`. Raises UnsendableMessage."""
    call = _encode((name, *arguments))
    if len(call) > MAX_FRAME_BYTES:
        raise UnsendableMessage(f"{len(call)} bytes between front and dispatcher; at most {MAX_FRAME_BYTES} are sent")
    return call


def as_list(num: int, calls: bytes | bytearray) -> bytes:
    """So many encoded calls as one encoded list."""
    return b"\xdd" + num.to_bytes(4) + calls


@functools.cache
def _calls_of(kind: type) -> tuple[list[type[msgspec.Struct]], "msgspec.msgpack.Decoder[list[msgspec.Struct]]"]:
    """The calls that objects of a class take: a struct by each method's name and parameters, and what decodes them."""
    calls = []
    for name, method in vars(kind).items():
        if name.startswith("on_"):
            fields = [field for field in get_type_hints(method).items() if field[0] != "return"]
            calls.append(msgspec.defstruct(name, fields, tag=name[3:], array_like=True, gc=False))
    any_of: Any = list[Union[tuple(calls)]]  # type: ignore[misc]  # noqa: UP007
    return calls, msgspec.msgpack.Decoder(any_of, dec_hook=lambda kind, value: PromptKeys())


class Link(asyncio.Protocol):
    """One end of a connection. Whatever is sent in one turn of the event loop leaves in one frame, once the peer has
    read what was sent before.
    """

    def __init__(self, owner: Any, lost: Callable[[], None], fill: Callable[[], None] = lambda: None) -> None:
        """`owner`: has the methods that the other end calls; what they raise ends the connection. `lost` is called at
        its end. `fill` sends what is new when a frame is about to leave.
        """
        calls, self._decoder = _calls_of(type(owner))
        self._methods = {call: getattr(owner, call.__name__) for call in calls}
        self._lost, self._fill = lost, fill
        self._transport: asyncio.Transport | None = None
        self._in = bytearray()
        self._out: list[bytes] = []
        self._size = 0  # of those
        self._is_due = self._is_full = False
        self._num_silent = 0  # beats since something came
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse processes of other users."""
        sock: socket.socket = transport.get_extra_info("socket")
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            logger.error("a process of user %d is refused: another one than this process's (%d)", uid, os.geteuid())
            transport.close()
            return
        self._transport = cast(asyncio.Transport, transport)
        self._beat()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell the owner."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._lost()

    def close(self) -> None:
        """Disconnect at once; `lost` is called. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

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
                for call in calls:
                    self._methods[type(call)](*msgspec.structs.astuple(call))
        except Exception as error:  # one connection ends, and nothing else
            is_theirs = isinstance(error, MalformedMessage)
            logger.error("a connection between front and dispatcher ends: %s", error, exc_info=not is_theirs)
            self.close()
        del self._in[:begin]

    def send(self, name: str, *arguments: object) -> None:
        """Call the other end's on_`name` with this turn's frame. Raises UnsendableMessage."""
        self.put(encode(name, *arguments))

    def put(self, call: bytes) -> None:
        """Send an encoded call with this turn's frame."""
        if self._size + len(call) > MAX_FRAME_BYTES:
            self._write()
        self._out.append(call)
        self._size += len(call)
        self.wake()

    def wake(self) -> None:
        """Have a frame leave soon."""
        if not self._is_due and not self._is_full and self._transport is not None:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        if self._transport is not None and not self._is_full:
            self._fill()
            if self._out:
                self._write()

    def _write(self) -> None:
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
        self.wake()

    def _beat(self) -> None:
        """Say that this end runs, and give up one that does not."""
        self._num_silent += 1
        if self._num_silent > SILENT_BEATS:
            logger.error("a connection between front and dispatcher ends: the other one is silent")
            self.close()
            return
        self._write()
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._beat)
