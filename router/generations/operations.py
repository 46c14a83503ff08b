"""What an operator does to the engines of a running router: drain, resume, change a role, add, remove."""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from pdkv.base.options import did_you_mean
from pdkv.errors import ConfigError, InvalidRequest
from pdkv.router.engines.address import Role
from pdkv.router.engines.backend import Backend
from pdkv.router.engines.fleet import FALLBACK
from pdkv.router.engines.foreign_kinds import is_foreign, split_endpoint
from pdkv.router.engines.state import EngineState
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.wire.profiles import Profile

ROLES: tuple[Role, ...] = get_args(Role)

Until = Literal["ready", "drained"]

_NOT_FOUND, _CONFLICT = 404, 409

_SPLIT = "@split"
"""The split's key among the settings of engines."""

logger = logging.getLogger(__name__)


class _Mark(msgspec.Struct, omit_defaults=True):
    """An operator's settings for one engine."""

    draining: bool = False
    role: Role | None = None
    share: float = 0.0  # of requests, by hand: of the other deployment
    shares: dict[str, float] = {}  # percent by pool, under `_SPLIT` alone


class Operations:
    """Operators' actions on engines. Lives in the dispatcher's event loop. All errors are InvalidRequest, with status
    404 or 409 where that says more.

    Settings of engines are kept in a file, so that a restarted router knows them.
    """

    def __init__(
        self, dispatcher: Dispatcher, connect: Callable[[str, str], Backend], marks_file: Path | None = None
    ) -> None:
        """`connect(name, endpoint)` makes the backend of a new engine. Restores the settings in `marks_file`."""
        self._dispatcher = dispatcher
        self._connect = connect
        self._marks_file = marks_file
        self._marks = self._read_marks()  # of engines that have yet to come
        for engine in dispatcher.engines():
            self._restore(engine)
        if (mark := self._marks.pop(_SPLIT, None)) is not None:
            known = dispatcher.pools.others
            dispatcher.pools.shares = {name: share for name, share in mark.shares.items() if name in known}

    def describe(self, name: str) -> dict[str, Any]:
        """The engine as `/topology` shows it."""
        return self._of(name).describe_engine(self._engine(name).name)

    def drain(self, name: str, *, force: bool = False) -> None:
        """Stop giving the engine new requests; those it has continue. Idempotent.

        `force`: even if no engine is left that can take requests.
        """
        engine = self._engine(name)
        if not force and not engine.draining:
            self._check_rest("draining", engine, None)
        engine.draining = True
        num_requests = self._of(name).driver.num_requests_on(name)
        self._changed(f"{name} is drained: {num_requests} requests continue", self._of(name))

    def move_away(self, name: str) -> None:
        """Move the requests of a drained engine elsewhere at once, as far as possible (`Driver.move`)."""
        driver = self._of(name).driver
        generations = driver.generations_on(self._engine(name).name)
        moved = sum(driver.move(g, "it is about to stop", away_from=name, spared=True) for g in generations)
        logger.info("%s: %d of %d requests that it still had go on elsewhere", name, moved, len(generations))

    def resume(self, name: str) -> None:
        """Give the engine new requests again. Idempotent."""
        self._engine(name).draining = False
        self._changed(f"{name} takes requests again", self._of(name))

    def set_role(self, name: str, role: str, *, force: bool = False) -> None:
        """Give the engine this role for new requests; those it has finish in the old one. Idempotent."""
        if role not in ROLES:
            raise InvalidRequest(f"role must be one of {', '.join(ROLES)}, got {role!r}", param="role")
        engine = self._engine(name)
        if is_foreign(engine.endpoint) and role != engine.role:  # though it was never there
            kind, _ = split_endpoint(engine.endpoint)
            raise InvalidRequest(f"{name} is a {kind} server: its role is given by that", param="role")
        if not force and engine.role != role:
            self._check_rest(f"the role {role} for", engine, role)
        engine.role = engine.assigned = role
        num_requests = self._of(name).driver.num_requests_on(name)
        self._changed(f"{name} has the role {role}: {num_requests} requests finish in the old one", self._of(name))

    def add(self, name: str, role: str, endpoint: str, refusal: Path | None = None) -> None:
        """Add an engine. Idempotent."""
        if role not in ROLES:
            raise InvalidRequest(f"role must be one of {', '.join(ROLES)}, got {role!r}", param="role")
        present = self._of(name).fleet.engines.get(name)
        if present is not None:
            if present.endpoint not in ("", endpoint):
                raise InvalidRequest(f"engine {name} already exists, at {present.endpoint}", status=_CONFLICT)
            return
        self._dispatcher.add_backend(self._connect(name, endpoint), role, refusal, endpoint=endpoint)
        self._changed(f"{name} ({role}) was added", self._dispatcher)

    def admit(self, backend: Backend, role: str, *, endpoint: str, source: str, pool: str = "") -> None:
        """Add an engine whose backend is connected and whose card admits it."""
        dispatcher = self._dispatcher.pools.at(pool)
        dispatcher.add_backend(backend, role, endpoint=endpoint, source=source, is_connected=True)
        self._restore(dispatcher.fleet.engines[backend.name])
        where = f" to pool {pool}" if pool else ""
        self._changed(f"{backend.name} ({role}) at {endpoint} has joined{where} ({source})", dispatcher)

    def split(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Change the percentage of requests for the launch's own model that each of these pools runs. Returns all."""
        try:
            self._dispatcher.pools.split(shares)
        except ConfigError as error:
            raise InvalidRequest(str(error), param="shares") from None
        self._changed(f"split: {self._dispatcher.pools.shares or 'none'}", self._dispatcher)
        return self._dispatcher.pools.shares

    def set_fallback(self, mode: str | None, share: float | None) -> dict[str, Any]:
        """Let requests leave for another deployment by rule ("auto"), or not at all ("off"), and at least a share of
        those that may (0 to 1); None: as it is. Returns its description.
        """
        dispatcher = self._dispatcher
        if (engine := dispatcher.fallback.engine) is None:
            raise InvalidRequest("this launch has no other deployment (--fallback)", status=_NOT_FOUND)
        engine.draining = engine.draining if mode is None else mode == "off"
        dispatcher.fallback.wanted = dispatcher.fallback.wanted if share is None else share
        self._changed(
            f"fallback: {'off' if engine.draining else 'auto'}, a share of {dispatcher.fallback.wanted:g}", dispatcher
        )
        return dispatcher.describe_fallback()

    async def profile(self, name: str, steps: int, seconds: float) -> dict[str, Any]:
        """A trace of the engine's next steps, at most so many or for so long: its file in the engine's directory."""
        engine = self._engine(name)
        if engine.card is None or not engine.card.profiles:
            raise InvalidRequest(f"{name} takes no orders for profiles: its steps are not traced", status=_CONFLICT)
        order = Profile(order_id="", steps=steps, seconds=seconds)
        told = (await self._of(name).listener.profiles.ask([name], order))[name]
        if told.code:
            raise InvalidRequest(f"{name} has no profile: {told.problem}", status=_CONFLICT)
        return {"engine": name, "file": told.file, "bytes": told.num_bytes, "steps": told.steps}

    def _restore(self, engine: EngineState) -> None:
        """Apply what an operator said about an engine to an earlier router."""
        if (mark := self._marks.pop(engine.name, None)) is not None:
            engine.draining, engine.assigned, engine.role = mark.draining, mark.role, mark.role or engine.role
            if engine.name == FALLBACK:
                self._dispatcher.fallback.wanted = mark.share

    def remove(self, name: str, *, force: bool = False) -> None:
        """Remove an engine. `force`: even one that still has requests, which end or continue elsewhere.

        An unknown engine is not an error: it may have been removed before.
        """
        dispatcher = self._of(name)
        if name not in dispatcher.fleet.engines:
            return
        num_requests = dispatcher.driver.num_requests_on(name)
        if num_requests and not force:
            raise InvalidRequest(f"{name} still has {num_requests} requests: drain it first", status=_CONFLICT)
        dispatcher.remove_backend(name)
        self._changed(f"{name} was removed", dispatcher)

    async def wait(self, name: str, until: Until, timeout_s: float, pid: int | None = None) -> bool:
        """Return True as soon as the engine is in that state; False if it is not within `timeout_s`."""
        dispatcher = self._of(name)

        def is_so() -> bool:
            engine = self._engine(name)
            if until == "drained":
                return engine.draining and not engine.books.requests and not dispatcher.driver.num_requests_on(name)
            return engine.life == "ready" and pid in (None, engine.pid)

        return await dispatcher.changes.wait_for(lambda: dispatcher.driver.closed or is_so(), timeout_s) and is_so()

    def _of(self, name: str) -> Dispatcher:
        """The dispatcher that has an engine."""
        return self._dispatcher.pools.holder(name)

    def _engine(self, name: str) -> EngineState:
        engines = {each.name: each for pool in self._dispatcher.pools for each in pool.engines()}
        if name not in engines:
            known = did_you_mean(name, engines) or f"; known: {', '.join(engines)}"
            raise InvalidRequest(f"there is no engine {name!r}{known}", status=_NOT_FOUND)
        return engines[name]

    def _check_rest(self, what: str, engine: EngineState, role: str | None) -> None:
        """Refuse an action that would leave no engine to run prompts or to decode, if there is one now."""
        others = [e for e in self._of(engine.name).fleet.engines.values() if e is not engine]
        before = {e.role for e in [*others, engine] if e.serves}
        after = {e.role for e in others if e.serves} | ({role} if role is not None and engine.serves else set())
        for needed in ("prefill", "decode"):
            if before & {needed, "any"} and not after & {needed, "any"}:
                raise InvalidRequest(
                    f"{what} {engine.name} would leave no engine that can {needed}: first add one or give one the role",
                    status=_CONFLICT,
                )

    def _changed(self, what: str, where: Dispatcher) -> None:
        logger.info("%s", what)
        self._write_marks()
        where.driver.engines_changed(what)

    def _read_marks(self) -> dict[str, _Mark]:
        if self._marks_file is None:
            return {}
        try:
            return msgspec.json.decode(self._marks_file.read_bytes(), type=dict[str, _Mark])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            logger.error("what was said about engines is lost: %s: %s", self._marks_file, error)
            return {}

    def _write_marks(self) -> None:
        """Write all settings at once. If they cannot be written, they are lost with this process."""
        if self._marks_file is None:
            return
        engines = [engine for dispatcher in self._dispatcher.pools for engine in dispatcher.fleet.engines.values()]
        marks = {e.name: _Mark(e.draining and not e.leaving, e.assigned) for e in engines}  # type: ignore[arg-type]
        if FALLBACK in marks:
            marks[FALLBACK].share = self._dispatcher.fallback.wanted
        marks = self._marks | {name: mark for name, mark in marks.items() if mark != _Mark()}
        if (pools := self._dispatcher.pools).others:
            marks[_SPLIT] = _Mark(shares=pools.shares)
        new = self._marks_file.with_suffix(".new")
        try:
            new.write_bytes(msgspec.json.encode(marks))
            os.replace(new, self._marks_file)
        except OSError as error:
            logger.error("a restarted router will not know what was said about engines: %s", error)
