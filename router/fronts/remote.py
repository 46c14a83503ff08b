"""The dispatcher as a front sees it: a `Desk` over the unix socket, and what other paths are passed on to."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from pdkv.base.clock import MONOTONIC
from pdkv.config import AdmissionConfig, HttpLimits
from pdkv.errors import Draining, EngineUnavailable, InvalidRequest, PdkvError, RequestAborted
from pdkv.router.admission.desk import Asked, Deliver, Replay, Terms
from pdkv.router.admission.tenants import TENANT
from pdkv.router.fronts import wire
from pdkv.router.fronts.wire import Link, Message
from pdkv.router.http.answer.event_ids import read_event_id
from pdkv.router.http.answer.fanout import STALL_S
from pdkv.router.http.server.budget import ByteBudget, Held
from pdkv.router.http.server.errors import describe_error, json_response
from pdkv.router.http.server.request_body import Disconnected, wait_until_gone
from pdkv.router.request import Delta, GenerateRequest
from pdkv.wire.reports import SourceCounts

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Generation

AGAIN_S = 0.2
"""Pause before the dispatcher is called again, if even its socket is missing."""

_NOTHING = wire.Facts("", "", SourceCounts(), 0, None, 1)

logger = logging.getLogger(__name__)


class RemoteTenant:
    """What a front is told of a key: its name, and what is left of its limits."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rates: wire.RawHeaders = []

    def rate_headers(self) -> Iterator[tuple[bytes, bytes]]:
        """OpenAI's headers, as of the dispatcher's last answer."""
        return iter(self.rates)


class RemoteGeneration:
    """A `Generation` of the dispatcher, delta by delta as it was sent."""

    def __init__(self, stay: "RemoteStay", choice: int) -> None:
        self.ended = False
        self._facts = _NOTHING
        self._stay, self._choice = stay, choice
        self._news: deque[Delta | PdkvError] = deque()
        self._came_at = 0.0  # the oldest of them; 0: no longer of interest
        self._is_new = True
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Delta | PdkvError, facts: wire.Facts | None, now: float) -> None:
        """The next delta, or the failure that ends it."""
        if facts is not None:
            self._facts = facts
        if not self._news:
            self._came_at = now
        self._news.append(item)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def take(self) -> Delta | None:
        """The next delta. Raises the failure that ended it."""
        if self.ended or not self._news:
            return None
        item = self._news.popleft()
        if isinstance(item, PdkvError):
            self.ended = True
            raise item
        self.ended = item.finish_reason is not None
        return item

    def news(self) -> "asyncio.Future[None]":
        """Return when there may be something to take."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while not self.ended:
            if (delta := self.take()) is not None:
                yield delta
            else:
                await self.news()

    def take_arrivals(self) -> Sequence[float]:
        """When the first tokens came to this front; the dispatcher counts the others."""
        came_at, is_new, self._is_new = self._came_at, self._is_new, False
        if (now := MONOTONIC.now()) - came_at > STALL_S:
            self._stay.stalls.append(now - came_at)
            self._came_at = now
        return (came_at,) if is_new else ()

    def abort(self) -> None:
        """Take nothing more; the end of the stay ends it. Idempotent."""
        if not self.ended:
            self._news.clear()
            self.put(RequestAborted("the client went away", request_id=self._stay.label), None, 0.0)

    def finish(self, num_tokens: int) -> None:
        """Note that the text ended after so many tokens. Idempotent."""
        self.ended = True
        self._stay.tell_stop(self._choice, num_tokens)

    prefill_engine = property(lambda self: self._facts.prefill)
    decode_engine = property(lambda self: self._facts.decode)
    sources = property(lambda self: self._facts.sources)
    num_cached_tokens = property(lambda self: self._facts.num_cached)
    num_lossy_tokens = property(lambda self: self._facts.num_lossy)
    num_attempts = property(lambda self: self._facts.num_attempts)
    stays = property(lambda self: self._facts.stays)


class RemoteStay:
    """A `Visit` of the dispatcher."""

    def __init__(self, desk: "RemoteDesk", number: int, seen: tuple[int, ...]) -> None:
        self.resume_id, self.label = "", ""
        self.replay: Replay | None = None
        self.tenant: RemoteTenant | None = None
        self.stalls: list[float] = []  # seconds that tokens waited for the client
        self._desk, self._number, self._seen = desk, number, seen
        self._answers: dict[int, asyncio.Future[str]] = {}  # by choice; -1: of all of it
        self._runs: dict[int, RemoteGeneration] = {}
        self._failure: wire.Problem | None = None  # that ended all of it
        self._n = 1

    def ask(self, choice: int = -1) -> "asyncio.Future[str]":
        """The answer to a message about to be sent: the engine that runs a choice. Raises what was refused, and, after
        `fail`, its error.
        """
        if self._failure is not None:
            raise self._failure.error()
        answer = self._answers[choice] = asyncio.get_running_loop().create_future()
        return answer

    def news(self, news: wire.News, now: float) -> None:
        """Take a delta, or the failure of a choice."""
        delta = cast(Delta, news)  # it has the same fields
        self._run(news.choice).put(delta if news.problem is None else news.problem.error(), news.facts, now)

    def hear(self, message: wire.Answer | wire.Arrived | wire.Taken) -> None:
        """Take a message about it."""
        match message:
            case wire.Arrived():
                self.resume_id = message.resume_id
                self._know(message.tenant, message.rates)
                if (kept := message.kept) is not None:
                    self.replay = Replay(kept.body, kept.reply_id, kept.created, kept.label, self._seen)
                self._settle(-1, "")
            case wire.Answer(problem=problem):
                self._know(message.tenant, message.rates)
                self._settle(message.choice, message.engine if problem is None else problem.error())
            case wire.Taken():
                self.fail(RequestAborted("its client goes on elsewhere", request_id=self.label))

    def _know(self, tenant: str | None, rates: wire.RawHeaders) -> None:
        if tenant is not None:
            self.tenant = self.tenant or RemoteTenant(tenant)
            self.tenant.rates = rates

    def _run(self, choice: int) -> RemoteGeneration:
        if (run := self._runs.get(choice)) is None:
            run = self._runs[choice] = RemoteGeneration(self, choice)
        return run

    def _settle(self, choice: int, result: str | PdkvError) -> None:
        answer = self._answers.pop(choice, None)
        if answer is None or answer.done():
            return
        if isinstance(result, PdkvError):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def fail(self, error: PdkvError) -> None:
        """End all of it, whatever it awaits now or would await later. Idempotent."""
        self._failure = wire.Problem.of(error)
        for choice in list(self._answers):
            self._settle(choice, error)
        for run in self._runs.values():
            if not run.ended:
                run.put(self._failure.error(), None, 0.0)  # each is raised elsewhere

    def tell_stop(self, choice: int, num_tokens: int) -> None:
        """Tell the dispatcher that a choice's text is over."""
        self._desk.send(wire.Stop(self._number, choice, num_tokens))

    # --- Stay -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Nothing: the dispatcher checks when the request arrives, and when it is admitted."""

    async def admit(self, asked: Asked, body: bytes, reply_id: str, created: int, label: str) -> Terms:
        """Have the dispatcher reserve what it asks for; the terms stay there."""
        self._n, self.label = asked.n, label
        if self.replay is None:
            answer = self.ask()
            self._desk.send(wire.Admit(self._number, asked, body, reply_id, created, label))
            await answer
        return Terms(asked.priority, asked.cache_salt, None, "")

    async def start(self, request: GenerateRequest, deliver: Deliver, index: int) -> "Generation":
        """Have the dispatcher begin a choice when its turn comes."""
        answer = self.ask(index)
        if index % self._n:
            request = msgspec.structs.replace(request, prompt_token_ids=[])
        self._desk.send(wire.Start(self._number, index, request))
        engine = await answer
        run = self._run(index)
        if run._facts is _NOTHING:
            run._facts = wire.Facts(engine, "", SourceCounts(), 0, None, 1)
        generation = cast("Generation", run)
        deliver(generation)
        return generation

    def came(self, num_tokens: int) -> None:
        """Nothing: the dispatcher counts what it sends."""

    def used(self, num_tokens: int, num_cached: int = 0) -> None:
        """Nothing, as above."""

    def abort(self) -> None:
        """Await nothing more. Idempotent."""
        for choice in list(self._answers):
            self._settle(choice, RequestAborted("the client went away", request_id=self.label))

    def __enter__(self) -> "RemoteStay":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        outcome = "ok" if error is None else error.code if isinstance(error, PdkvError) else "internal_error"
        self._desk.leave(self._number, "disconnected" if isinstance(error, Disconnected) else outcome, self.stalls)


class RemoteDesk:
    """The dispatcher, or its successor."""

    def __init__(self, config: AdmissionConfig, limits: HttpLimits, bodies: ByteBudget) -> None:
        """`bodies`: the budget of bodies that are passed on."""
        self.draining = ""
        self.objectives = config.priorities
        self.max_model_len: int | None = None
        self.welcomed = asyncio.Event()  # set while a dispatcher answers
        self.num_text_bytes: Callable[[], int] = lambda: 0
        self._limits, self._bodies = limits, bodies
        self._link: Link[wire.FromDispatcher] | None = None
        self._stays: dict[int, RemoteStay] = {}
        self._pages: dict[int, asyncio.Queue[wire.PageHead | wire.PageBody | PdkvError]] = {}
        self._numbers = count()
        self._num_begun = 0

    async def stay_connected(self, path: Path) -> None:
        """Connect to the dispatcher's socket, and again whenever the connection ends; until cancelled. While none
        runs, the launcher holds the socket, and the connection waits there for the next one.
        """
        loop = asyncio.get_running_loop()
        while True:
            lost = asyncio.Event()
            link = self._link = Link(wire.from_dispatcher, self._take, lost.set)
            try:
                await loop.create_unix_connection(partial(_same, link), str(path))
                await lost.wait()
            except OSError as error:
                logger.error("cannot connect to the dispatcher at %s: %s", path, error)
            finally:
                link.close()
                self._lost("the dispatcher is gone")
            await MONOTONIC.pause(AGAIN_S)

    def _lost(self, text: str) -> None:
        if self._stays:
            logger.warning("%s; %d requests end", text, len(self._stays))
        self.welcomed.clear()
        for stay in list(self._stays.values()):
            stay.fail(EngineUnavailable(text))
        for pieces in self._pages.values():
            pieces.put_nowait(EngineUnavailable(text))

    def close(self) -> None:
        """End all requests."""
        self._lost("the router is shutting down")

    def drain(self, why: str) -> None:
        """Take no new requests from now on. Idempotent."""
        self.draining = why

    def send(self, message: Message) -> None:
        """Tell the dispatcher."""
        if self._link is not None:
            self._link.send(message)

    def _take(self, messages: Sequence[wire.FromDispatcher]) -> None:
        now = MONOTONIC.now()
        for message in messages:
            match message:
                case wire.News():
                    if (stay := self._stays.get(message.stay)) is not None:
                        stay.news(message, now)
                case wire.Welcome():
                    self.max_model_len = message.max_model_len
                    self.welcomed.set()
                case wire.Beat():
                    pass
                case wire.PageHead() | wire.PageBody():
                    if (pieces := self._pages.get(message.page)) is not None:
                        pieces.put_nowait(message)
                case _:
                    if isinstance(message, wire.Arrived):
                        self.max_model_len = message.max_model_len
                    if (stay := self._stays.get(message.stay)) is not None:
                        stay.hear(message)

    def count(self) -> tuple[int, int]:
        """Requests in progress, and those that have begun since the start."""
        return len(self._stays), self._num_begun

    async def receive(self, scope: Scope) -> RemoteStay:
        """As `Desk` says; a request with the header x-pd-resume-id or Last-Event-ID takes an answer up."""
        headers = Headers(scope=scope)
        header = "x-pd-resume-id" if "x-pd-resume-id" in headers else "last-event-id"
        resume_id, seen = read_event_id(header, headers.get(header, ""))
        if self.draining and not resume_id:
            raise Draining(f"{self.draining}: try again", retry_after_s=1.0)
        if not self.welcomed.is_set():
            raise EngineUnavailable("the dispatcher is not ready")
        number = next(self._numbers)
        self._num_begun += 1
        stay = self._stays[number] = RemoteStay(self, number, seen)
        answer = stay.ask()
        self.send(wire.Arrive(number, scope["path"], headers.get("authorization"), resume_id))
        try:
            await answer
        except BaseException as error:
            del self._stays[number]
            if not isinstance(error, PdkvError):
                self.leave(number, "disconnected", [])
            raise
        finally:
            if stay.tenant is not None:
                scope[TENANT] = stay.tenant
        return stay

    def leave(self, number: int, outcome: str, stalls: list[float]) -> None:
        """Tell the dispatcher how a request ended."""
        self._stays.pop(number, None)
        self.send(
            wire.End(number, outcome, stalls, (self._bodies.held, self._bodies.num_waiting, self.num_text_bytes()))
        )

    # --- pages ----------------------------------------------------------------------------------------------------

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the dispatcher serve a request."""
        number, held = next(self._numbers), Held((scope.get("client") or ("local",))[0])
        pieces = self._pages[number] = asyncio.Queue()
        gone: asyncio.Task[None] | None = None
        begun = ended = False
        try:
            body = await self._read(receive, held)
            if not self.welcomed.is_set():
                raise EngineUnavailable("the dispatcher is not ready")
            self.send(_page(number, scope, body))
            gone = asyncio.create_task(wait_until_gone(receive))
            while not ended:
                piece = await _first(pieces, gone)
                if isinstance(piece, PdkvError):
                    raise piece
                if isinstance(piece, wire.PageHead):
                    begun = True
                    await send({"type": "http.response.start", "status": piece.status, "headers": piece.headers})
                    continue
                ended = not piece.more
                await send({"type": "http.response.body", "body": piece.body, "more_body": piece.more})
                self.send(wire.PageRead(number))
        except PdkvError as error:
            if begun:
                raise
            status, said = describe_error(error)
            await json_response(said, status, {"connection": "close"})(scope, receive, send)
        except Disconnected:
            return
        finally:
            del self._pages[number]
            self._bodies.give(held)
            if gone is not None:
                gone.cancel()
            if not ended:
                self.send(wire.PageLeft(number))

    async def _read(self, receive: Receive, held: Held) -> bytes:
        """The body as it is. Raises InvalidRequest (408, 413), ServerBusy and Disconnected."""
        body, most = bytearray(), self._limits.max_body_bytes
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Disconnected
                    piece, more = message.get("body", b""), message.get("more_body", False)
                    if len(body) + len(piece) > most:
                        raise InvalidRequest(f"the body must have at most {most} bytes (--max-body-bytes)", status=413)
                    self._bodies.take(held, len(piece))
                    body += piece
        except TimeoutError:
            text = f"the body did not arrive within {self._limits.body_timeout_s:g} s"
            raise InvalidRequest(text, status=408) from None
        return bytes(body)


def _page(number: int, scope: Scope, body: bytes) -> wire.AskPage:
    return wire.AskPage(
        number,
        scope["method"],
        scope["path"],
        scope.get("raw_path") or scope["path"].encode(),
        scope["query_string"],
        [(bytes(name), bytes(value)) for name, value in scope["headers"]],
        tuple(scope["client"]) if scope.get("client") else None,
        tuple(scope["server"]) if scope.get("server") else None,
        scope["scheme"],
        body,
    )


def _same(link: Link[wire.FromDispatcher]) -> Link[wire.FromDispatcher]:
    return link


async def _first(
    pieces: "asyncio.Queue[wire.PageHead | wire.PageBody | PdkvError]", gone: "asyncio.Task[None]"
) -> wire.PageHead | wire.PageBody | PdkvError:
    """The next piece of an answer. Raises Disconnected if its client goes first."""
    if pieces.empty():
        piece = asyncio.ensure_future(pieces.get())
        await asyncio.wait({piece, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not piece.done():
            piece.cancel()
            raise Disconnected
        return piece.result()
    return pieces.get_nowait()
