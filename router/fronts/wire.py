"""What fronts and the dispatcher say to each other: frames of messages over a unix socket, one each way per turn of
the event loop.

`stay` numbers a request of one connection, `page` another exchange of HTTP; the front draws both.
"""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

import msgspec

from pdkv.errors import MalformedMessage, PdkvError, RequestFailed
from pdkv.router.admission.desk import Asked
from pdkv.router.request import GenerateRequest, PromptKeys
from pdkv.wire.decoding import decode_total
from pdkv.wire.messages import FinishReason, PromptLogprobs, TokenLogprob
from pdkv.wire.reports import SourceCounts

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 20
"""A peer that announces a larger frame is disconnected."""

BEAT_S, SILENT_BEATS = 5.0, 6
"""Seconds between beats, and beats of one's own after which a peer that has sent nothing is disconnected: a process
that was stopped itself does not count that time.
"""

T = TypeVar("T")
RawHeaders = list[tuple[bytes, bytes]]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Something that one end tells the other."""


class Problem(Message, frozen=True, kw_only=True):
    """A PdkvError."""

    code: str
    text: str
    status: int
    param: str | None = None
    retry_after_s: float = 1.0

    @classmethod
    def of(cls, error: PdkvError) -> "Problem":
        """As it travels."""
        param, wait_s = getattr(error, "param", None), getattr(error, "retry_after_s", 1.0)
        return cls(code=error.code, text=str(error), status=error.status, param=param, retry_after_s=wait_s)

    def error(self) -> PdkvError:
        """As it was raised, or a RequestFailed of an unknown kind."""
        kind = _KINDS.get(self.code, RequestFailed)
        error = kind.__new__(kind, self.text)
        for name in ("code", "status", "param", "retry_after_s"):
            setattr(error, name, getattr(self, name))
        return error


def _kinds(base: type[PdkvError]) -> dict[str, type[PdkvError]]:
    found = {base.code: base}
    for kind in base.__subclasses__():
        found = _kinds(kind) | found
    return found


_KINDS = _kinds(PdkvError)


class Beat(Message, frozen=True):
    """The sender runs."""


# --- front -> dispatcher ------------------------------------------------------------------------------------------


class Arrive(Message, frozen=True):
    """A request of which only the head is known. `resume_id`: of an answer that is to be taken up."""

    stay: int
    path: str
    authorization: str | None
    resume_id: str


class Admit(Message, frozen=True):
    """What a request asks for; `body`, and the names of its answer, are kept if it can be taken up again."""

    stay: int
    asked: Asked
    body: bytes
    reply_id: str
    created: int
    label: str


class Start(Message, frozen=True):
    """Begin a choice. Its prompt is sent with the first choice of the prompt; the terms are the dispatcher's."""

    stay: int
    choice: int
    request: GenerateRequest


class Stop(Message, frozen=True):
    """The text of a choice has ended after so many tokens."""

    stay: int
    choice: int
    num_tokens: int


class End(Message, frozen=True):
    """A request is over: "ok", "disconnected" or an error's code. `held`: what the front holds now (`Held`)."""

    stay: int
    outcome: str
    stalls: list[float]  # seconds that tokens waited for the client
    held: tuple[int, int, int]


class AskPage(Message, frozen=True):
    """An exchange of HTTP that the dispatcher serves: the head, as in an ASGI scope, and the whole body."""

    page: int
    method: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: RawHeaders
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None
    scheme: str
    body: bytes


class PageRead(Message, frozen=True):
    """A piece of its answer has been sent."""

    page: int


class PageLeft(Message, frozen=True):
    """The client of a page is gone."""

    page: int


# --- dispatcher -> front ------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The first message of a connection."""

    max_model_len: int | None


class Kept(Message, frozen=True):
    """What is kept of an answer that is taken up (`Replay`)."""

    body: bytes
    reply_id: str
    created: int
    label: str


class Arrived(Message, frozen=True):
    """The request may go on."""

    stay: int
    tenant: str | None  # its key's name; None: clients need none
    rates: RawHeaders
    max_model_len: int | None
    resume_id: str
    kept: Kept | None


class Answer(Message, frozen=True):
    """What became of Arrive or Admit (choice -1), or a Start: a problem, or the engine that runs the prompt; and what
    is then left to the tenant.
    """

    stay: int
    choice: int
    problem: Problem | None = None
    engine: str = ""
    tenant: str | None = None
    rates: RawHeaders = []


class Facts(Message, frozen=True):
    """What is known of a generation."""

    prefill: str
    decode: str
    sources: SourceCounts
    num_cached: int
    num_lossy: int | None
    num_attempts: int
    stays: str = ""


class News(Message, frozen=True):
    """A delta of a choice, or its failure; facts with the first and the last."""

    stay: int
    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    facts: Facts | None = None
    problem: Problem | None = None


class Taken(Message, frozen=True):
    """Another front has taken the answer up."""

    stay: int


class PageHead(Message, frozen=True):
    """An answer's head."""

    page: int
    status: int
    headers: RawHeaders


class PageBody(Message, frozen=True):
    """A piece of it."""

    page: int
    body: bytes
    more: bool


FromFront = Beat | Arrive | Admit | Start | Stop | End | AskPage | PageRead | PageLeft
FromDispatcher = Beat | Welcome | Arrived | Answer | News | Taken | PageHead | PageBody
from_fronts = msgspec.msgpack.Decoder(list[FromFront], dec_hook=lambda kind, value: PromptKeys())
from_dispatcher = msgspec.msgpack.Decoder(list[FromDispatcher])
_encode = msgspec.msgpack.Encoder(enc_hook=lambda keys: None).encode


class Link(asyncio.Protocol, Generic[T]):
    """One end of a connection. Whatever is sent in one turn of the event loop leaves in one frame, once the peer has
    read what was sent before.
    """

    def __init__(
        self, decoder: "msgspec.msgpack.Decoder[list[T]]", take: Callable[[Sequence[T]], None], lost: Callable[[], None]
    ) -> None:
        """`take` gets the messages of each frame; what it raises ends the connection. `lost` is called at its end."""
        self._decoder, self._take, self._lost = decoder, take, lost
        self.fill: Callable[[list[Message]], None] = lambda out: None
        """Adds what is new to a frame that is about to leave."""
        self._transport: asyncio.Transport | None = None
        self._in = bytearray()
        self._out: list[Message] = []
        self._is_due = self._is_full = False
        self._num_silent = 0  # beats since something came
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether messages reach the other end."""
        return self._transport is not None

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
                size = int.from_bytes(self._in[begin : begin + 4])
                if size > MAX_FRAME_BYTES:
                    raise MalformedMessage(f"a frame of {size} bytes; at most {MAX_FRAME_BYTES} were expected")
                if len(self._in) - begin - 4 < size:
                    break
                with memoryview(self._in) as view, view[begin + 4 : begin + 4 + size] as frame:
                    messages = decode_total(self._decoder, frame)
                begin += 4 + size
                self._take(messages)
        except Exception as error:  # one connection ends, and nothing else
            logger.error("a connection between front and dispatcher ends: %s", error, exc_info=not _is_theirs(error))
            self.close()
        del self._in[:begin]

    def send(self, message: Message) -> None:
        """Send a message with this turn's frame."""
        self._out.append(message)
        self.wake()

    def wake(self) -> None:
        """Have a frame leave soon."""
        if not self._is_due and not self._is_full and self._transport is not None:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        if self._transport is None or self._is_full:
            return
        out, self._out = self._out, []
        self.fill(out)
        if out:
            self._write(out)

    def _write(self, out: list[Message]) -> None:
        data = _encode(out)
        if len(data) <= MAX_FRAME_BYTES:
            if self._transport is not None:
                self._transport.write(len(data).to_bytes(4) + data)
        elif len(out) > 1:
            self._write(out[: len(out) // 2])
            self._write(out[len(out) // 2 :])
        else:
            logger.error("a %s of %d bytes is too long for a frame", type(out[0]).__name__, len(data))
            self.close()

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
        self.send(Beat())
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._beat)


def _is_theirs(error: Exception) -> bool:
    return isinstance(error, MalformedMessage)
