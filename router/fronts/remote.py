"""The dispatcher as a front sees it: a `Desk` over the unix socket, and what other paths are passed on to."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from pdkv.base.clock import MONOTONIC
from pdkv.errors import Draining, EngineUnavailable, PdkvError, RequestAborted
from pdkv.router.admission.desk import Asked, Deliver, Replay, Stay, Terms
from pdkv.router.admission.tenants import TENANT
from pdkv.router.fronts.wire import Facts, Link, News, PageScope, Problem, RawHeaders
from pdkv.router.http.answer.event_ids import read_event_id
from pdkv.router.http.answer.fanout import STALL_S
from pdkv.router.http.server.errors import describe_error, json_response
from pdkv.router.http.server.paused_body import PAUSE_BODY, PausedBody
from pdkv.router.http.server.request_body import Disconnected
from pdkv.router.request import Delta, GenerateRequest, PoolNews

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Generation

T = TypeVar("T", "RemoteStay", "RemotePage")

AGAIN_S = 0.2
"""Pause before the dispatcher is called again, if even its socket is missing."""

WATCH_S = 1.0
"""Seconds for a dispatcher to answer before the clients that wait for it are watched, whether they leave."""

logger = logging.getLogger(__name__)


class RemoteTenant:
    """What a front is told of a key: its name, the models that it may use, and what is left of its limits."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.models: tuple[str, ...] = ()
        self.rates: RawHeaders = []

    def rate_headers(self) -> Iterator[tuple[bytes, bytes]]:
        """OpenAI's headers, as of the dispatcher's last answer."""
        return iter(self.rates)


class RemoteGeneration:
    """A `Generation` of the dispatcher, delta by delta as it was sent."""

    def __init__(self, stay: "RemoteStay", choice: int) -> None:
        self.ended = False
        self.facts: Facts | None = None  # None: it has not begun
        self._stay, self._choice = stay, choice
        self._news: deque[Delta | PdkvError] = deque()
        self._came_at = 0.0  # the oldest of them
        self._is_new = True
        self._waiter: asyncio.Future[None] | None = None

    def __getattr__(self, name: str) -> Any:
        """A property of the generation, as far as it is known."""
        return getattr(self.facts or Facts(), name)

    @property
    def has_begun(self) -> bool:
        """Whether it was given to an engine, or has failed."""
        return self.facts is not None or bool(self._news)

    def put(self, item: Delta | PdkvError) -> None:
        """The next delta, or the failure that ends it."""
        if not self._news:
            self._came_at = MONOTONIC.now()
        self._news.append(item)
        self.wake()

    def wake(self) -> None:
        """Wake its reader."""
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
            self.put(RequestAborted("the client went away", request_id=self._stay.label))

    def finish(self, num_tokens: int) -> None:
        """Note that the text ended after so many tokens. Idempotent."""
        self.ended = True
        self._stay.tell("stop", self._choice, num_tokens)


class RemoteStay(Stay):
    """A `Visit` of the dispatcher, which checks and counts by itself."""

    resume_id = ""
    replay: Replay | None = None

    def __init__(self, desk: "RemoteDesk", number: int, seen: tuple[int, ...]) -> None:
        self.label = ""
        self.tenant: RemoteTenant | None = None
        self.stalls: list[float] = []  # seconds that tokens waited for the client
        self._desk, self._number, self._seen = desk, number, seen
        self.paused: PausedBody | None = None
        self._answer: asyncio.Future[None] | None = None
        self._runs: dict[int, RemoteGeneration] = {}
        self._failure: PdkvError | None = None  # that ended all of it
        self._n = 1

    def tell(self, name: str, *arguments: object) -> None:
        """Tell the dispatcher something of it."""
        self._desk.send(self._number, name, *arguments)

    async def ask(self, to: int, name: str, *arguments: object) -> None:
        """Ask the dispatcher. Raises what it refuses, what ends the request (even before), and Disconnected."""
        if self._failure is not None:
            raise self._failure.anew()
        self._desk.send(to, name, *arguments)
        self._answer = asyncio.get_running_loop().create_future()
        await self._answer

    def watch(self, scope: Scope) -> None:
        """Notice from now on that its client leaves, or has left, before its body is read."""
        if (pause := scope.get(PAUSE_BODY)) is not None:
            self.paused = pause(self.abort)
        else:  # its connection has taken it back
            self.abort()

    def run(self, choice: int) -> RemoteGeneration:
        """The generation of a choice."""
        if (run := self._runs.get(choice)) is None:
            run = self._runs[choice] = RemoteGeneration(self, choice)
            if self._failure is not None:
                run.put(self._failure.anew())
        return run

    def _settle(self, error: Exception | None) -> None:
        if self._answer is None or self._answer.done():
            return
        if error is None:
            self._answer.set_result(None)
        else:
            self._answer.set_exception(error)

    def lost(self, error: PdkvError) -> None:
        """End all of it, whatever it awaits now or would await later. Idempotent."""
        self._failure = error
        self._settle(error.anew())
        for run in self._runs.values():
            if not run.ended:
                run.put(error.anew())  # each is raised elsewhere

    # --- from the dispatcher --------------------------------------------------------------------------------------

    def on_answer(
        self, problem: Problem | None, tenant: str | None, models: tuple[str, ...], rates: RawHeaders, resume_id: str,
        replay: Replay | None,
    ) -> None:  # fmt: skip
        """What became of `arrive` or `admit`, and what is left to its key (None: clients need none); with a new one,
        its resume id, and what is kept of an answer that it takes up.
        """
        if tenant is not None:
            self.tenant = self.tenant or RemoteTenant(tenant)
            self.tenant.models, self.tenant.rates = models, rates
        self.resume_id = resume_id or self.resume_id
        if replay is not None:
            self.replay = replay._replace(seen=self._seen)
        self._settle(None if problem is None else problem.error())

    def on_facts(self, choice: int, facts: Facts) -> None:
        """What is known of a generation: at its begin, with its first and with its last tokens."""
        run = self.run(choice)
        run.facts = facts
        run.wake()

    def on_delta(self, choice: int, delta: News) -> None:
        """New tokens of a generation."""
        (self._runs.get(choice) or self.run(choice)).put(delta)

    def on_failed(self, choice: int, problem: Problem) -> None:
        """A generation could not begin, or failed."""
        self.run(choice).put(problem.error())

    def on_taken(self) -> None:
        """Another front has taken it up."""
        self.lost(RequestAborted("its client goes on elsewhere", request_id=self.label))

    # --- Stay -----------------------------------------------------------------------------------------------------

    async def admit(self, asked: Asked, body: bytes, reply_id: str, created: int, label: str) -> Terms:
        """Have the dispatcher reserve what it asks for; the terms stay there."""
        self._n, self.label = asked.n, label
        if self.replay is None:
            await self.ask(self._number, "admit", asked, Replay(body, reply_id, created, label, pool=asked.pool))
        return Terms(asked.priority, asked.cache_salt, None, "")

    async def start(self, request: GenerateRequest, deliver: Deliver, index: int) -> "Generation":
        """Have the dispatcher begin a choice when its turn comes; what it raises, the generation does."""
        run = self.run(index)
        generation = cast("Generation", run)
        self.tell("start", index, msgspec.structs.replace(request, prompt_token_ids=[]) if index % self._n else request)
        deliver(generation)
        while not run.has_begun:
            await run.news()
        return generation

    def abort(self) -> None:
        """Await nothing more: the client has gone. Idempotent."""
        self._settle(Disconnected())

    def __enter__(self) -> "RemoteStay":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        outcome = "ok" if error is None else error.code if isinstance(error, PdkvError) else "internal_error"
        self.leave("disconnected" if isinstance(error, Disconnected) else outcome)

    def leave(self, outcome: str) -> None:
        """Tell the dispatcher how it ended."""
        self.tell("end", outcome, self.stalls)
        self._desk.forget(self._number)


class RemotePage:
    """An exchange of HTTP that the dispatcher serves, by an application that receives and sends here."""

    def __init__(self, desk: "RemoteDesk", number: int, receive: Receive) -> None:
        self._desk, self._number, self._receive = desk, number, receive
        self._messages: asyncio.Queue[dict[str, Any] | PdkvError] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, scope: Scope, send: Send) -> None:
        """Serve it."""
        begun = more = False
        try:
            self._desk.send(0, "page", self._number, {name: scope[name] for name in PageScope.__annotations__})
            more = True
            while more:
                if isinstance(message := await self._messages.get(), PdkvError):
                    raise message
                begun = True
                await send(message)
                more = message["type"] != "http.response.body" or message.get("more_body", False)
                self._desk.send(self._number, "sent")
        except PdkvError as error:
            if begun:
                raise
            await send_error(error, scope, self._receive, send)
        finally:
            for task in self._tasks:
                task.cancel()
            if more:
                self._desk.send(self._number, "received", {"type": "http.disconnect"})
            self._desk.forget(self._number)

    def on_want(self) -> None:
        """The application wants to receive."""
        task = asyncio.get_running_loop().create_task(self._pass_on())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self) -> None:
        self._desk.send(self._number, "received", await self._receive())

    def on_message(self, message: dict[str, Any] | None) -> None:
        """The application sends; None: it has failed."""
        failure = EngineUnavailable("the dispatcher could not end its answer")
        self._messages.put_nowait(failure if message is None else message)

    def lost(self, error: PdkvError) -> None:
        """End it."""
        self._messages.put_nowait(error.anew())


async def send_error(error: PdkvError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error, and end the connection, whose body may not have been read."""
    status, said = describe_error(error)
    await json_response(said, status, {"connection": "close"})(scope, receive, send)


class RemoteDesk:
    """The dispatcher, or its successor."""

    def __init__(self, objectives: Mapping[str, int]) -> None:
        self.draining = ""
        self.objectives = objectives
        self.news = PoolNews()
        self.welcomed = asyncio.Event()  # set while a dispatcher answers
        self.held: Callable[[], tuple[int, ...]] = lambda: (0, 0, 0, 0, 0)
        """Bytes of bodies, bodies that wait for room, bytes of texts, spans sent and spans lost, in this front."""
        self._link = self._new_link()
        self._last = 0  # number of an object of the connection

    async def stay_connected(self, path: Path) -> None:
        """Connect to the dispatcher's socket, and again whenever the connection ends; until cancelled. While none
        runs, the launcher holds the socket, and the connection waits there for the next one.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                link = self._link = self._new_link()
                await loop.create_unix_connection(lambda link=link: link, str(path))  # type: ignore[misc]
                await link.run()
            except OSError as error:
                logger.error("cannot connect to the dispatcher at %s: %s", path, error)
            finally:
                self._lost("the dispatcher is gone")
            await MONOTONIC.pause(AGAIN_S)

    def _new_link(self) -> Link:
        link = Link(RemoteDesk, RemoteStay, RemotePage)
        link.objects[0] = self
        return link

    def _lost(self, text: str) -> None:
        self.welcomed.clear()
        self._link.objects.pop(0, None)
        if requests := list(self._link.objects.values()):
            logger.warning("%s; %d requests end", text, len(requests))
        for request in requests:
            request.lost(EngineUnavailable(text))

    def close(self) -> None:
        """End all requests."""
        self._lost("the router is shutting down")

    def drain(self, why: str) -> None:
        """Take no new requests from now on. Idempotent."""
        self.draining = why

    def send(self, to: int, name: str, *arguments: object) -> None:
        """Call on_`name` of the dispatcher's object `to`. Raises UnsendableMessage."""
        self._link.send(to, name, *arguments)

    def on_welcome(self, news: PoolNews) -> None:
        """The dispatcher serves; with these models, as far as it knows."""
        self.news = news
        if not self.welcomed.is_set():
            self.send(0, "held", *self.held())
        self.welcomed.set()

    def count(self) -> tuple[int, int]:
        """Requests in progress, and a number that grows with each."""
        return len(self._link.objects), self._last

    def _enter(self, make: Callable[[int], T]) -> T:
        """A new object of the connection. Raises EngineUnavailable."""
        if not self.welcomed.is_set():
            raise EngineUnavailable("the dispatcher is not ready")
        self._last += 1
        made = self._link.objects[self._last] = make(self._last)
        return made

    def forget(self, number: int) -> None:
        """Note that an object of the connection has ended."""
        self._link.objects.pop(number, None)
        self.send(0, "held", *self.held())

    async def receive(self, scope: Scope) -> RemoteStay:
        """As `Desk` says; a request with the header x-pd-resume-id or Last-Event-ID takes an answer up."""
        headers = Headers(scope=scope)
        header = "x-pd-resume-id" if "x-pd-resume-id" in headers else "last-event-id"
        resume_id, seen = read_event_id(header, headers.get(header, ""))
        if self.draining and not resume_id:
            raise Draining(f"{self.draining}: try again", retry_after_s=1.0)
        stay = self._enter(lambda number: RemoteStay(self, number, seen))
        watching = asyncio.get_running_loop().call_later(WATCH_S, stay.watch, scope) if PAUSE_BODY in scope else None
        try:
            await stay.ask(0, "arrive", self._last, scope["path"], headers.get("authorization"), resume_id)
        except BaseException as error:
            stay.__exit__(type(error), error, None)
            raise
        finally:
            if watching is not None:
                watching.cancel()
            if stay.paused is not None:
                stay.paused.end()
            if stay.tenant is not None:
                scope[TENANT] = stay.tenant
        return stay

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the dispatcher serve a request."""
        try:
            page = self._enter(lambda number: RemotePage(self, number, receive))
        except EngineUnavailable as error:
            await send_error(error, scope, receive, send)
        else:
            await page.serve(scope, send)
