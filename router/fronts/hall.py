"""The dispatcher's side of the fronts: takes their calls, and keeps answers that may be taken up again."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client.core import Metric
from starlette.types import ASGIApp

from pdkv.errors import InvalidRequest, MalformedMessage, PdkvError
from pdkv.router.admission.admission_queue import Admission
from pdkv.router.admission.api_keys import KeyRing
from pdkv.router.admission.tenants import Tenant
from pdkv.router.fronts.session import Session, answer
from pdkv.router.fronts.wire import Link, PageScope, Problem
from pdkv.router.http.answer.request_report import record
from pdkv.router.http.server.budget import ByteBudget
from pdkv.router.http.server.drain import Drain
from pdkv.router.metrics.exposition import gauge
from pdkv.router.metrics.recorder import Recorder
from pdkv.router.metrics.requests import ENDPOINTS, Metrics, RequestMetrics, Totals, spans

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Dispatcher

HOLD_S = 30.0
"""Seconds for which an answer can be taken up: after its front has gone, or after its end."""

PIECES_AHEAD = 8
"""Pieces of a page's answer that may wait in a front."""

_LEFT = {"type": "http.disconnect"}

logger = logging.getLogger(__name__)


class Hall:
    """All fronts of one dispatcher, and its sessions."""

    def __init__(
        self, dispatcher: "Dispatcher", admission: Admission, metrics: Metrics, drain: Drain, keys: KeyRing | None,
        pages: ASGIApp, max_kept_bytes: int, recorder: Recorder | None = None, makes_spans: bool = False,
    ) -> None:  # fmt: skip
        """`pages` serves what fronts do not; `max_kept_bytes`: of answers without a front, oldest dropped first, and as
        many for bodies of requests whose answers may be taken up; `makes_spans`: whether the fronts do.
        """
        self.makes_spans = makes_spans
        self._spans = dict.fromkeys(("sent", "lost"), 0)  # by the fronts
        self.dispatcher, self.drain, self.pages = dispatcher, drain, pages
        self._admission, self._metrics, self._keys, self._recorder = admission, metrics, keys, recorder
        self._no_totals = Totals()  # of what is not counted
        self._max_kept_bytes = max_kept_bytes
        self._bodies = ByteBudget(max_kept_bytes, "the bodies of answers that may be taken up")
        self._fronts: dict[Door, asyncio.Task[None]] = {}
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
            for front in self._fronts:
                front.link.close()

    def stop(self) -> None:
        """End that. Idempotent."""
        self._over.set()

    def _door(self) -> Link:
        front = Door(self)
        self._fronts[front] = asyncio.get_running_loop().create_task(self._serve(front))
        return front.link

    async def _serve(self, front: "Door") -> None:
        try:
            await front.link.run()
        finally:
            del self._fronts[front]
            front.lost()
            if not self._fronts and self.drain.draining:
                for session in list(self._alone):
                    self.drop(session)

    def tenant(self, authorization: str | None) -> Tenant:
        """The tenant of a request. Raises Unauthorized."""
        return self._admission.anonymous if self._keys is None else self._keys.authenticate(authorization)

    def begin(self, path: str, tenant: Tenant) -> Session:
        """A new session. Raises what `Admission.arrive` and, for one that is to generate, `Visit.check` do."""
        endpoint = ENDPOINTS.get(path)
        metrics = RequestMetrics(self._metrics if endpoint else self._no_totals, endpoint or "completions")
        recorder, session = self._recorder if endpoint else None, None
        try:
            session = Session(self, path, self._admission.arrive(tenant), metrics, recorder)
            session.stack.enter_context(self.drain.counted())
            if endpoint:
                session.visit.check()
            return session
        except PdkvError as error:
            if session is not None:
                session.close(error.code)
            else:
                metrics.ended(error.code)
                if recorder is not None:
                    record(recorder, None, {}, metrics, error.code, tenant.digest)
            raise

    def keep(self, session: Session) -> None:
        """Keep a session that has no front, or is over, for HOLD_S and within the budget; drop one that cannot be."""
        if session.kept is None:
            self.drop(session)
            return
        self._alone[session] = session.num_bytes
        self._num_bytes += self._alone[session]
        self._bodies.give(session.held_body)  # which is counted there from now on
        session.timer = asyncio.get_running_loop().call_later(HOLD_S, self.drop, session)
        while self._num_bytes > self._max_kept_bytes:
            self.drop(next(iter(self._alone)))

    def drop(self, session: Session) -> None:
        """End a session for good. Idempotent."""
        self._rejoin(session)
        self._kept.pop(session.id, None)
        self._bodies.give(session.held_body)
        session.close("disconnected")

    def _rejoin(self, session: Session) -> None:
        """Count a session no longer among those without a front. Idempotent."""
        self._num_bytes -= self._alone.pop(session, 0)
        if session.timer is not None:
            session.timer.cancel()

    def try_admit(self, session: Session, num_bytes: int) -> bool:
        """Let it be taken up from now on, if there is memory for the body of its request."""
        if has_room := self._bodies.try_take(session.held_body, num_bytes):
            self._kept[session.id] = session
        return has_room

    def take_up(self, resume_id: str, path: str, tenant: Tenant) -> Session:
        """The session of this id. Raises InvalidRequest (404)."""
        session = self._kept.get(resume_id)
        if session is None or (session.path, session.owner) != (path, tenant.keeper):
            text = "there is no such answer (any more) to take up with this key at this path"
            raise InvalidRequest(text, param="x-pd-resume-id", status=404)
        if session in self._alone and session.kept is not None:  # its body was counted there
            self._bodies.try_take(session.held_body, len(session.kept.body))
        self._rejoin(session)
        return session

    def _held(self) -> Iterator[Metric]:
        yield gauge("pdkv_fronts", "Fronts that are connected.", len(self._fronts))
        yield gauge("pdkv_kept_answers", "Answers that may be taken up again.", len(self._kept))
        texts = "Bodies that fronts read or work on.", "Bodies that wait for room in fronts.", "Texts in fronts."
        names = "pdkv_front_body_bytes", "pdkv_front_waiting_bodies", "pdkv_front_text_bytes"
        for index, (name, text) in enumerate(zip(names, texts, strict=True)):
            yield gauge(name, text, sum(front.held[index] for front in self._fronts))
        if self.makes_spans:
            yield spans(self._spans)

    def count_spans(self, sent: int, lost: int) -> None:
        """Count spans that a front has sent, or lost."""
        self._spans["sent"] += sent
        self._spans["lost"] += lost


class Door:
    """The connection of one front."""

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self.held = (0, 0, 0)
        self._spans: tuple[int, int] | None = None  # sent and lost, as counted
        self.link = Link(Door, Session, Page)
        self.link.objects[0] = self
        self.link.send(0, "welcome", hall.dispatcher.pools.news())

    def _is_new(self, number: int) -> None:
        if number in self.link.objects:
            raise MalformedMessage(f"request {number} arrives twice")

    def on_arrive(self, number: int, path: str, authorization: str | None, resume_id: str) -> None:
        """A request of which only the head is known. `resume_id`: of an answer that is to be taken up."""
        self._is_new(number)
        hall, tenant = self._hall, None
        self.link.send(0, "welcome", hall.dispatcher.pools.news())
        try:
            tenant = hall.tenant(authorization)
            session = hall.take_up(resume_id, path, tenant) if resume_id else hall.begin(path, tenant)
        except PdkvError as error:
            answer(self.link, number, tenant, Problem.of(error))
        else:
            session.join(self.link, number)

    def on_page(self, number: int, scope: PageScope) -> None:
        """An exchange that the dispatcher serves: an application runs here, and receives and sends there."""
        self._is_new(number)
        self.link.objects[number] = Page(self.link, number, self._hall.pages, scope)

    def on_held(self, body_bytes: int, num_waiting: int, text_bytes: int, sent: int, lost: int) -> None:
        """Bytes of bodies, bodies that wait, bytes of texts, and spans sent and lost so far, in the front."""
        self.held = body_bytes, num_waiting, text_bytes
        counted = self._spans or (sent, lost)  # those before the first report were the dispatcher's before this one
        self._spans = sent, lost
        self._hall.count_spans(max(sent - counted[0], 0), max(lost - counted[1], 0))

    def lost(self) -> None:
        """Keep what may be taken up, end the rest."""
        del self.link.objects[0]
        sessions = [each for each in self.link.objects.values() if isinstance(each, Session)]
        for each in list(self.link.objects.values()):
            each.left()
        num_kept = sum(session.kept is not None for session in sessions)
        level = logging.INFO if self._hall.drain.draining and not sessions else logging.WARNING
        logger.log(level, "a front is gone; %d of its %d requests may be taken up", num_kept, len(sessions))


class Page:
    """An exchange of HTTP between an application here and a client of a front."""

    def __init__(self, link: Link, number: int, app: ASGIApp, scope: PageScope) -> None:
        self._link, self._number = link, number
        self._room = asyncio.Semaphore(PIECES_AHEAD)
        self._wanted: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._has_left = False
        self._task = asyncio.get_running_loop().create_task(self._serve(app, scope))

    async def _serve(self, app: ASGIApp, scope: PageScope) -> None:
        whole = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "root_path": "", **scope}
        try:
            await app(whole, self._receive, self._send)
        except Exception:
            logger.exception("an error in the answer to %s", scope["path"])
            self._link.send(self._number, "message", None)
        finally:
            self._link.objects.pop(self._number, None)

    async def _receive(self) -> dict[str, Any]:
        if self._has_left:
            return _LEFT
        self._wanted.append(asyncio.get_running_loop().create_future())
        self._link.send(self._number, "want")
        return await self._wanted[-1]

    async def _send(self, message: Any) -> None:
        if not self._has_left:
            await self._room.acquire()
        if not self._has_left:
            self._link.send(self._number, "message", message)

    def on_sent(self) -> None:
        """A message has been sent."""
        self._room.release()

    def on_received(self, message: dict[str, Any]) -> None:
        """What was received, once for each `want`; "http.disconnect" at any time."""
        self._has_left |= message.get("type") == _LEFT["type"]
        if self._has_left:
            self._room.release()
        while self._wanted:
            if not (wanted := self._wanted.popleft()).done():
                wanted.set_result(message)
                if not self._has_left:
                    return

    def left(self) -> None:
        """Note that its front is gone."""
        self.on_received(_LEFT)
