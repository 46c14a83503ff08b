"""A LocalEngine on a thread of its own, which any thread may give work to."""

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from pdkv.config import EngineConfig, HandoffConfig
from pdkv.connectors.plan import ConnectorPlan
from pdkv.engine.worker.step_queue import JOIN_TIMEOUT_S
from pdkv.errors import EngineDied, EngineUnavailable, RequestAborted, RequestFailed
from pdkv.offline.engine import SAVE_TIMEOUT_S, LocalEngine
from pdkv.wire.kv import EngineCard
from pdkv.wire.messages import Abort, EngineToRouter, Failed, Finished, Peers, Submit, Tokens
from pdkv.wire.tiers import CacheOrder

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = JOIN_TIMEOUT_S + SAVE_TIMEOUT_S
"""How long `stop` waits: for the step that runs, then for saves."""


class Listener(Protocol):
    """Who hears of the requests that it has sent. Both are called by the engine's thread and must not block."""

    def deliver(self, messages: Sequence[EngineToRouter]) -> bool:
        """What one step brought. Returns False if nobody listens any more: its requests are given up."""

    def lost(self) -> None:
        """None of its requests goes on; `EngineThread.ended` says why."""


class Ended(NamedTuple):
    """Why an engine takes nothing any more."""

    kind: type[RequestFailed]  # what its requests fail by
    reason: str


_Message = Submit | Abort | Peers | CacheOrder
_Order = tuple[_Message, Listener | None]


class EngineThread:
    """Until `stop`, which whoever made it must call: the thread and the engine live on otherwise."""

    def __init__(self, config: EngineConfig, handoff: HandoffConfig | None, connector: ConnectorPlan | None) -> None:
        """Load the model, on the thread that will run it.

        Raises:
            ConfigError: a wrong value, model directory or connector option.
        """
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()  # None: stop
        self._lock = threading.Lock()
        self.ended: Ended | None = None  # set under the lock
        self._listeners: dict[str, Listener] = {}  # by the engine's name of a request; the thread's own
        ready: Future[LocalEngine] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(ready, config, handoff, connector), name="engine", daemon=True
        )
        self._thread.start()
        try:
            self._engine = ready.result()
        except BaseException:  # KeyboardInterrupt among them
            self._orders.put(None)
            raise

    @property
    def card(self) -> EngineCard:
        """The engine's."""
        return self._engine.core.card

    def send(self, message: _Message, listener: Listener | None = None) -> None:
        """Say something to the engine, behind what was said before. Never blocks.

        Args:
            listener: of a Submit: hears what comes of it.

        Raises:
            EngineUnavailable: the engine has ended, and with it what was sent to it.
        """
        with self._lock:
            if self.ended is not None:
                raise EngineUnavailable(self.ended.reason)
            self._orders.put((message, listener))
        self._engine.wake()

    def stop(self) -> None:
        """End behind the step that runs, and wait for that and for saves. Idempotent; a finalizer may call it."""
        self._orders.put(None)
        self._engine.wake()
        if threading.current_thread() is self._thread:  # it came across the finalizer
            return
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the engine has not ended within %g s: its thread is left behind", STOP_TIMEOUT_S)

    def _run(
        self,
        ready: "Future[LocalEngine]",
        config: EngineConfig,
        handoff: HandoffConfig | None,
        connector: ConnectorPlan | None,
    ) -> None:
        try:
            engine = LocalEngine(config, handoff, connector)
        except BaseException as error:  # the caller's to raise
            ready.set_exception(error)
            return
        ready.set_result(engine)
        try:
            while self._obey(engine):
                self._deliver(engine, engine.step())
            self._end(Ended(RequestAborted, "the engine was shut down"))
            self._abort(engine, list(self._listeners))
            engine.settle()
        except Exception as error:
            logger.exception("the engine stops after an error")
            self._end(Ended(EngineDied, f"the engine failed: {type(error).__name__}: {error}"))
        finally:
            engine.close()

    def _obey(self, engine: LocalEngine) -> bool:
        """Take all orders. Returns whether to go on."""
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return True
            if order is None:
                return False
            message, listener = order
            if isinstance(message, Submit) and listener is not None:
                self._listeners[message.request_id] = listener
            elif isinstance(message, Abort):
                self._listeners.pop(message.request_id, None)
            engine.send(message)

    def _deliver(self, engine: LocalEngine, messages: Sequence[EngineToRouter]) -> None:
        """Each listener hears once of a step."""
        news: dict[Listener, list[EngineToRouter]] = {}
        for message in messages:
            if not isinstance(message, Tokens | Finished | Failed):
                continue
            listener = self._listeners.get(message.request_id)
            if listener is not None:  # else it is aborted
                news.setdefault(listener, []).append(message)
                if not isinstance(message, Tokens):
                    del self._listeners[message.request_id]
        for listener, heard in news.items():
            if not listener.deliver(heard):
                self._abort(engine, [name for name, other in self._listeners.items() if other is listener])

    def _abort(self, engine: LocalEngine, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._listeners.pop(request_id, None)
            engine.send(Abort(request_id, 0))

    def _end(self, ended: Ended) -> None:
        """Nothing is taken any more, and all who wait for something hear so. The first reason stays."""
        with self._lock:
            self.ended = self.ended or ended
            listeners = {*self._listeners.values()}
            while not self._orders.empty():
                order = self._orders.get_nowait()
                if order is not None and order[1] is not None:
                    listeners.add(order[1])
        for listener in listeners:
            listener.lost()
