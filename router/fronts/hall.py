"""The dispatcher's side of the fronts: takes their calls, and keeps answers that may be taken up again."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import Metric
from starlette.types import ASGIApp

from pdkv.errors import InvalidRequest, MalformedMessage, PdkvError
from pdkv.router.admission.admission_queue import Admission
from pdkv.router.admission.api_keys import KeyRing
from pdkv.router.admission.desk import Asked, Replay
from pdkv.router.admission.tenants import Tenant
from pdkv.router.fronts.session import Run, Session
from pdkv.router.fronts.wire import Link, PageScope, Problem
from pdkv.router.http.app import HasLength
from pdkv.router.http.server.drain import Drain
from pdkv.router.metrics.exposition import gauge
from pdkv.router.metrics.requests import ENDPOINTS, Metrics, RequestMetrics, Totals
from pdkv.router.request import GenerateRequest

HOLD_S = 30.0
"""Seconds for which an answer can be taken up: after its front has gone, or after its end."""

PIECES_AHEAD = 8
"""Pieces of a page's answer that may wait in a front."""

_LEFT = {"type": "http.disconnect"}

logger = logging.getLogger(__name__)


class Hall:
    """All fronts of one dispatcher, and its sessions."""

    def __init__(
        self, dispatcher: HasLength, admission: Admission, metrics: Metrics, drain: Drain, keys: KeyRing | None,
        pages: ASGIApp, max_kept_bytes: int,
    ) -> None:  # fmt: skip
        """`pages` serves what fronts do not; `max_kept_bytes`: of answers without a front, oldest dropped first."""
        self.dispatcher, self.drain, self.pages = dispatcher, drain, pages
        self._admission, self._metrics, self._keys = admission, metrics, keys
        self._no_totals = Totals()  # of what is not counted
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

    def tenant(self, authorization: str | None) -> Tenant:
        """Whose a request is. Raises Unauthorized."""
        return self._admission.anonymous if self._keys is None else self._keys.authenticate(authorization)

    def begin(self, door: "_Door", number: int, path: str, tenant: Tenant) -> Session:
        """A new session. Raises what `Admission.arrive` and, for one that is to generate, `Visit.check` do."""
        endpoint = ENDPOINTS.get(path)
        metrics = RequestMetrics(self._metrics if endpoint else self._no_totals, endpoint or "completions")
        session = None
        try:
            session = Session(door, number, path, self._admission.arrive(tenant), metrics)
            session.stack.enter_context(self.drain.counted())
            if endpoint:
                session.visit.check()
            return session
        except PdkvError as error:
            end = metrics.ended if session is None else session.close
            end(error.code)
            raise

    def keep(self, session: Session) -> None:
        """Keep a session that has no front, or is over, for HOLD_S and within the budget; drop one that cannot be."""
        if session.kept is None:
            self.drop(session)
            return
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
        """Let it be taken up from now on, if it can be."""
        if session.kept is not None:
            self._kept[session.id] = session

    def take_up(self, resume_id: str, path: str, tenant: Tenant) -> Session:
        """The session of this id, which leaves the front that it has. Raises InvalidRequest (404)."""
        session = self._kept.get(resume_id)
        if session is None or (session.path, session.keeper) != (path, tenant.keeper):
            text = "there is no such answer (any more) to take up with this key at this path"
            raise InvalidRequest(text, param="x-pd-resume-id", status=404)
        self._rejoin(session)
        if isinstance(session.front, _Door):
            session.front.release(session)
        return session

    def _held(self) -> Iterator[Metric]:
        yield gauge("pdkv_fronts", "Fronts that are connected.", len(self._fronts))
        yield gauge("pdkv_kept_answers", "Answers that may be taken up again.", len(self._kept))
        texts = "Bodies that fronts read or work on.", "Bodies that wait for room in fronts.", "Texts in fronts."
        names = "pdkv_front_body_bytes", "pdkv_front_waiting_bodies", "pdkv_front_text_bytes"
        for index, (name, text) in enumerate(zip(names, texts, strict=True)):
            yield gauge(name, text, sum(front.held[index] for front in self._fronts))


class _Door:
    """The connection of one front, which numbers its requests (`stay`) and its other exchanges of HTTP (`page`)."""

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self.held = (0, 0, 0)
        self._sessions: dict[int, Session] = {}
        self._pages: dict[int, _Page] = {}
        self._news: dict[Run, None] = {}
        self.link = Link(self, self._lost, self._fill)
        self.put = self.link.put
        self.link.send("welcome", hall.dispatcher.max_model_len)

    def has_news(self, run: Run) -> None:
        """Take the run's news into the next frame: until the front reads, they stay where they are."""
        if not self._news:
            self.link.wake()
        self._news[run] = None

    def _fill(self) -> None:
        runs, self._news = self._news, {}
        for run in runs:
            if run.session.front is self:
                run.tell_news()

    def on_arrive(self, stay: int, path: str, authorization: str | None, resume_id: str) -> None:
        """A request of which only the head is known. `resume_id`: of an answer that is to be taken up."""
        hall, session, tenant, problem = self._hall, None, None, None
        if stay in self._sessions:
            raise MalformedMessage(f"request {stay} arrives twice")
        self.link.send("welcome", hall.dispatcher.max_model_len)
        try:
            tenant = hall.tenant(authorization)
            if resume_id:
                session = hall.take_up(resume_id, path, tenant)
            else:
                session = hall.begin(self, stay, path, tenant)
            self._sessions[stay] = session
        except PdkvError as error:
            problem = Problem.of(error)
        self._answer(stay, tenant, problem, session)
        if session is not None and resume_id:
            session.move(self, stay)

    def on_admit(self, stay: int, asked: Asked, replay: Replay) -> None:
        """What a request asks for, and what is kept of it if it can be taken up again."""
        if (session := self._sessions.get(stay)) is None:
            return
        problem = None
        try:
            session.admit(asked, replay)
            self._hall.admitted(session)
        except MalformedMessage:
            raise
        except PdkvError as error:
            problem = Problem.of(error)
        self._answer(stay, session.visit.tenant, problem)

    def _answer(
        self, stay: int, tenant: Tenant | None, problem: Problem | None, session: Session | None = None
    ) -> None:
        """Say what became of a request, and what is now left of its key's limits."""
        name = tenant.name if tenant is not None and tenant.digest else None
        rates = list(tenant.rate_headers()) if tenant is not None else []
        resume_id, replay = (session.id, session.kept) if session is not None else ("", None)
        self.link.send("answer", stay, problem, name, rates, resume_id, replay)

    def on_start(self, stay: int, choice: int, request: GenerateRequest) -> None:
        """Begin a choice. Its prompt comes with the first choice of the prompt; the terms are the dispatcher's."""
        if (session := self._sessions.get(stay)) is not None:
            session.start(choice, request)

    def on_stop(self, stay: int, choice: int, num_tokens: int) -> None:
        """The text of a choice has ended after so many tokens."""
        if (session := self._sessions.get(stay)) is not None:
            session.stop(choice, num_tokens)

    def on_end(self, stay: int, outcome: str, stalls: list[float], held: tuple[int, int, int]) -> None:
        """A request is over: "ok", "disconnected" or an error's code. `stalls`: seconds that tokens waited for its
        client; `held`: bytes of bodies, bodies that wait, and bytes of texts in the front.
        """
        self.held = held
        if (session := self._sessions.pop(stay, None)) is None:
            return
        for seconds in stalls:
            session.metrics.client_stall(seconds)
        session.close(outcome[:64])
        if outcome == "ok":
            self._hall.keep(session)
        else:
            self._hall.drop(session)

    def release(self, session: Session) -> None:
        """Leave a session to another front."""
        self._sessions.pop(session.number, None)
        self.link.send("taken", session.number)

    def on_page(self, page: int, scope: PageScope) -> None:
        """An exchange that the dispatcher serves: an application runs here, and receives and sends there."""
        self._pages[page] = _Page(self.link, page)
        task = asyncio.get_running_loop().create_task(self._pages[page].serve(self._hall.pages, scope))
        task.add_done_callback(lambda _: self._pages.pop(page, None))

    def on_received(self, page: int, message: dict[str, Any]) -> None:
        """What was received, once for each `want`; "http.disconnect" at any time."""
        if (served := self._pages.get(page)) is not None:
            served.received(message)

    def on_sent(self, page: int) -> None:
        """A message has been sent."""
        if (served := self._pages.get(page)) is not None:
            served.room.release()

    def _lost(self) -> None:
        """Keep what may be taken up, end the rest."""
        for page in self._pages.values():
            page.received(_LEFT)
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            session.attach(None)
            self._hall.keep(session)
        num_kept = sum(session.kept is not None for session in sessions.values())
        level = logging.INFO if self._hall.drain.draining and not sessions else logging.WARNING
        logger.log(level, "a front is gone; %d of its %d requests may be taken up", num_kept, len(sessions))
        self._hall.left(self)


class _Page:
    """An exchange of HTTP between an application here and a client of a front."""

    def __init__(self, link: Link, number: int) -> None:
        self.room = asyncio.Semaphore(PIECES_AHEAD)
        self._link, self._number = link, number
        self._wanted: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._has_left = False

    async def serve(self, app: ASGIApp, scope: PageScope) -> None:
        """Serve it."""
        whole = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "root_path": "", **scope}
        try:
            await app(whole, self._receive, self._send)
        except Exception:
            logger.exception("an error in the answer to %s", scope["path"])
            self._link.send("message", self._number, None)

    async def _receive(self) -> dict[str, Any]:
        if self._has_left:
            return _LEFT
        self._wanted.append(asyncio.get_running_loop().create_future())
        self._link.send("want", self._number)
        return await self._wanted[-1]

    async def _send(self, message: Any) -> None:
        if not self._has_left:
            await self.room.acquire()
        if not self._has_left:
            self._link.send("message", self._number, message)

    def received(self, message: dict[str, Any]) -> None:
        """Hand over what a front has received."""
        self._has_left |= message.get("type") == _LEFT["type"]
        if self._has_left:
            self.room.release()
        while self._wanted:
            if not (wanted := self._wanted.popleft()).done():
                wanted.set_result(message)
            if not self._has_left:
                return
