"""The dispatcher's side of the fronts: takes their messages, and keeps answers that may be taken up again."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from prometheus_client.core import Metric
from starlette.types import ASGIApp

from pdkv.errors import InvalidRequest, MalformedMessage, PdkvError
from pdkv.router.admission.admission_queue import Admission
from pdkv.router.admission.api_keys import KeyRing
from pdkv.router.admission.tenants import Tenant
from pdkv.router.fronts import wire
from pdkv.router.fronts.session import Run, Session
from pdkv.router.fronts.wire import Link, Message
from pdkv.router.http.app import HasLength
from pdkv.router.http.server.drain import Drain
from pdkv.router.metrics.exposition import gauge
from pdkv.router.metrics.requests import ENDPOINTS, Metrics, RequestMetrics, Totals

HOLD_S = 30.0
"""Seconds for which an answer can be taken up: after its front has gone, or after its end."""

PIECES_AHEAD = 8
"""Pieces of a page's answer that may wait in a front."""

logger = logging.getLogger(__name__)


class Hall:
    """All fronts of one dispatcher, and its sessions."""

    def __init__(
        self, dispatcher: HasLength, admission: Admission, metrics: Metrics, drain: Drain, keys: KeyRing | None,
        pages: ASGIApp, max_kept_bytes: int,
    ) -> None:  # fmt: skip
        """`pages` serves what fronts do not; `max_kept_bytes`: of answers without a front, oldest dropped first."""
        self.dispatcher, self.admission, self.metrics, self.drain = dispatcher, admission, metrics, drain
        self.keys, self.pages = keys, pages
        self.no_totals = Totals()  # of what is not counted
        self._max_kept_bytes = max_kept_bytes
        self._fronts: set[_Door] = set()
        self._kept: dict[str, Session] = {}  # that may be taken up, by id
        self._alone: dict[Session, int] = {}  # those without a front or over, and their bytes; oldest first
        self._num_bytes = 0  # of those
        self._over = asyncio.Event()
        metrics.register(self._held)

    async def serve_on(self, listener: socket.socket) -> None:
        """Serve fronts until `stop`."""
        server = await asyncio.get_running_loop().create_unix_server(self._door, sock=listener)
        try:
            await self._over.wait()
        finally:
            server.close()
            for front in list(self._fronts):
                front.link.close()

    def stop(self) -> None:
        """End that. Idempotent."""
        self._over.set()

    def _door(self) -> asyncio.Protocol:
        front = _Door(self)
        self._fronts.add(front)
        return front.link

    def left(self, front: "_Door") -> None:
        """Note that a front is gone."""
        self._fronts.discard(front)
        if not self._fronts and self.drain.draining:
            for session in list(self._alone):
                self.drop(session)

    def keep(self, session: Session) -> None:
        """Keep a session that has no front, or is over, for HOLD_S and within the budget."""
        self._kept[session.id] = session
        self._alone[session] = session.num_bytes
        self._num_bytes += self._alone[session]
        session.timer = asyncio.get_running_loop().call_later(HOLD_S, self.drop, session)
        while self._num_bytes > self._max_kept_bytes:
            self.drop(next(iter(self._alone)))

    def drop(self, session: Session) -> None:
        """End a session for good. Idempotent."""
        self._rejoin(session)
        self._kept.pop(session.id, None)
        session.close("disconnected")

    def _rejoin(self, session: Session) -> None:
        """Count a session no longer among those without a front. Idempotent."""
        self._num_bytes -= self._alone.pop(session, 0)
        if session.timer is not None:
            session.timer.cancel()

    def admitted(self, session: Session) -> None:
        """Let it be taken up from now on."""
        if session.kept is not None:
            self._kept[session.id] = session

    def take_up(self, resume_id: str, path: str, keeper: str) -> Session:
        """The session of this id, which leaves the front that it has. Raises InvalidRequest (404)."""
        session = self._kept.get(resume_id)
        if session is None or (session.path, session.keeper) != (path, keeper):
            text = "there is no such answer (any more) to take up with this key at this path"
            raise InvalidRequest(text, param="x-pd-resume-id", status=404)
        self._rejoin(session)
        return session

    def _held(self) -> Iterator[Metric]:
        yield gauge("pdkv_fronts", "Fronts that are connected.", len(self._fronts))
        yield gauge("pdkv_kept_answers", "Answers that may be taken up again.", len(self._kept))
        texts = "Bodies that fronts read or work on.", "Bodies that wait for room in fronts.", "Texts in fronts."
        names = "pdkv_front_body_bytes", "pdkv_front_waiting_bodies", "pdkv_front_text_bytes"
        for index, (name, text) in enumerate(zip(names, texts, strict=True)):
            yield gauge(name, text, sum(front.held[index] for front in self._fronts))


class _Door:
    """The connection of one front."""

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self.held = (0, 0, 0)
        self._sessions: dict[int, Session] = {}
        self._pages: dict[int, _PageExchange] = {}
        self._news: dict[Run, None] = {}
        self.link: Link[wire.FromFront] = Link(wire.from_fronts, self._take, self._lost)
        self.link.fill = self._fill
        self.send = self.link.send
        self.send(wire.Welcome(hall.dispatcher.max_model_len))

    def has_news(self, run: Run) -> None:
        """Take the run's news into the next frame: until the front reads, they stay where they are."""
        if not self._news:
            self.link.wake()
        self._news[run] = None

    def _fill(self, out: list[Message]) -> None:
        runs, self._news = self._news, {}
        for run in runs:
            if run.session.front is self and (news := run.news()) is not None:
                out.append(news)

    def _take(self, messages: Sequence[wire.FromFront]) -> None:
        for message in messages:
            match message:
                case wire.Arrive():
                    self._arrive(message)
                case wire.AskPage():
                    page = self._pages[message.page] = _PageExchange(message, self.send)
                    page.begin(self._hall.pages, partial(self._forget, message.page))
                case wire.Beat():
                    pass
                case wire.PageRead() | wire.PageLeft():
                    if (page_or_none := self._pages.get(message.page)) is not None:
                        page_or_none.hear(message)
                case _ if (session := self._sessions.get(message.stay)) is not None:
                    self._advance(session, message)
                case _:  # of one that another front has taken up
                    pass

    def _forget(self, page: int, _: object) -> None:
        self._pages.pop(page, None)

    def _arrive(self, message: wire.Arrive) -> None:
        hall, stay = self._hall, message.stay
        if stay in self._sessions:
            raise MalformedMessage(f"request {stay} arrives twice")
        metrics, tenant = None, None
        try:
            tenant = hall.admission.anonymous if hall.keys is None else hall.keys.authenticate(message.authorization)
            if message.resume_id:
                session = hall.take_up(message.resume_id, message.path, tenant.keeper)
                if isinstance(old := session.front, _Door):
                    old.release(session)
            else:
                endpoint = ENDPOINTS.get(message.path)
                metrics = RequestMetrics(hall.metrics if endpoint else hall.no_totals, endpoint or "completions")
                with contextlib.ExitStack() as stack:
                    visit = stack.enter_context(hall.admission.arrive(tenant))
                    if endpoint:
                        visit.check()
                    stack.pop_all()
                session = Session(self, stay, message.path, visit, metrics)
                session.stack.enter_context(hall.drain.counted())
        except PdkvError as error:
            if metrics is not None:
                metrics.ended(error.code)
            self.send(_answer(stay, tenant, error))
            return
        session.number = stay
        self._sessions[stay] = session
        name, rates = _known(tenant)
        kept = session.kept if message.resume_id else None
        self.send(wire.Arrived(stay, name, rates, hall.dispatcher.max_model_len, session.id, kept))
        if message.resume_id:
            session.attach(self)
            session.again()

    def _advance(self, session: Session, message: wire.Admit | wire.Start | wire.Stop | wire.End) -> None:
        match message:
            case wire.Admit():
                try:
                    session.admit(message)
                    self._hall.admitted(session)
                    self.send(_answer(session.number, session.visit.tenant))
                except MalformedMessage:
                    raise
                except PdkvError as error:
                    self.send(_answer(session.number, session.visit.tenant, error))
            case wire.Start():
                session.start(message)
            case wire.Stop():
                session.stop(message)
            case wire.End():
                self._end(session, message)

    def _end(self, session: Session, message: wire.End) -> None:
        self.held = message.held
        for seconds in message.stalls:
            session.metrics.client_stall(seconds)
        del self._sessions[session.number]
        session.attach(None)
        session.close(message.outcome[:64])
        if session.kept is not None and message.outcome == "ok":
            self._hall.keep(session)
        else:
            self._hall.drop(session)

    def release(self, session: Session) -> None:
        """Leave a session to another front."""
        self._sessions.pop(session.number, None)
        self.send(wire.Taken(session.number))

    def _lost(self) -> None:
        """Keep what may be taken up, end the rest."""
        for page in list(self._pages.values()):
            page.hear(wire.PageLeft(0))
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            session.attach(None)
            if session.kept is not None:
                self._hall.keep(session)
            else:
                self._hall.drop(session)
        num_kept = sum(session.kept is not None for session in sessions.values())
        level = logging.INFO if self._hall.drain.draining and not sessions else logging.WARNING
        logger.log(level, "a front is gone; %d of its %d requests may be taken up", num_kept, len(sessions))
        self._hall.left(self)


def _answer(stay: int, tenant: Tenant | None, error: PdkvError | None = None) -> wire.Answer:
    """What became of a request, and what is now left of its key's limits."""
    name, rates = _known(tenant) if tenant is not None else (None, [])
    return wire.Answer(stay, -1, wire.Problem.of(error) if error is not None else None, "", name, rates)


def _known(tenant: Tenant) -> tuple[str | None, wire.RawHeaders]:
    """What a front is told of a tenant; no name: clients need no key."""
    return tenant.name if tenant.digest else None, list(tenant.rate_headers())


class _PageExchange:
    """One exchange of HTTP with the application of the dispatcher."""

    def __init__(self, message: wire.AskPage, tell: Callable[[Message], None]) -> None:
        self._number, self._tell = message.page, tell
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "root_path": "",
        }
        for name in ("method", "path", "raw_path", "query_string", "headers", "client", "server", "scheme"):
            self._scope[name] = getattr(message, name)
        self._body: bytes | None = message.body
        self._room = asyncio.Semaphore(PIECES_AHEAD)
        self._gone = asyncio.Event()

    def begin(self, app: ASGIApp, done: Callable[[object], object]) -> None:
        """Serve it; `done` is called at its end."""
        self._task = asyncio.get_running_loop().create_task(self._serve(app))
        self._task.add_done_callback(done)

    async def _serve(self, app: ASGIApp) -> None:
        try:
            await app(self._scope, self._receive, self._send)
        except Exception:
            logger.exception("an error in the answer to %s", self._scope.get("path"))
            self._tell(wire.PageBody(self._number, b"", more=False))

    async def _receive(self) -> dict[str, Any]:
        if self._body is None:
            await self._gone.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._tell(wire.PageHead(self._number, message["status"], [(n, v) for n, v in message.get("headers", ())]))
            return
        if not self._gone.is_set():
            await self._room.acquire()
        if not self._gone.is_set():
            self._tell(wire.PageBody(self._number, message.get("body", b""), message.get("more_body", False)))

    def hear(self, message: wire.PageRead | wire.PageLeft) -> None:
        """Send more, or nothing any more."""
        if isinstance(message, wire.PageLeft):
            self._gone.set()
            for _ in range(PIECES_AHEAD):
                self._room.release()
        else:
            self._room.release()
