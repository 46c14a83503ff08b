"""A LocalEngine on its own thread, to which any thread may give work."""

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
"""Seconds that `stop` waits: for the current step, then for saves."""


class Listener(Protocol):
    """Receives the results of its requests. Both methods are called on the engine's thread and must not block."""

    def deliver(self, messages: Sequence[EngineToRouter]) -> bool:
        """Take the results of one step. Returns False if the reader is gone: its requests are then given up."""

    def lost(self) -> None:
        """Note that its requests will not continue; `EngineThread.ended` says why."""


class Ended(NamedTuple):
    """The reason why an engine no longer accepts requests."""

    kind: type[RequestFailed]  # the error of its requests
    reason: str


_Message = Submit | Abort | Peers | CacheOrder
_Order = tuple[_Message, Listener | None]


class EngineThread:
    """The thread and the engine live until `stop`, which the owner must call."""

    def __init__(self, config: EngineConfig, handoff: HandoffConfig | None, connector: ConnectorPlan | None) -> None:
        """Load the model, on the thread that will run it.

        Raises:
            ConfigError: a wrong value, model directory or connector option.
        """
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()  # None: stop
        self._lock = threading.Lock()
        self.ended: Ended | None = None  # set under the lock
        self._listeners: dict[str, Listener] = {}  # by the engine's name of a request; used only on the thread
        ready: Future[LocalEngine] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(ready, config, handoff, connector), name="engine", daemon=True
        )
        self._thread.start()
        try:
            self._engine = ready.result()
        except BaseException:  # including KeyboardInterrupt
            self._orders.put(None)
            raise

    @property
    def card(self) -> EngineCard:
        """The engine's card."""
        return self._engine.core.card

    def send(self, message: _Message, listener: Listener | None = None) -> None:
        """Send a message to the engine, after earlier ones. Never blocks.

        Args:
            listener: for a Submit: receives its results.

        Raises:
            EngineUnavailable: the engine has ended, and with it everything sent to it.
        """
        with self._lock:
            if self.ended is not None:
                raise EngineUnavailable(self.ended.reason)
            self._orders.put((message, listener))
        self._engine.wake()

    def stop(self) -> None:
        """End the engine after its current step, and wait for that step and for saves. Idempotent; a finalizer may call
        it.
        """
        self._orders.put(None)
        self._engine.wake()
        if threading.current_thread() is self._thread:  # the finalizer called it on this thread
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
        except BaseException as error:  # for the caller to raise
            ready.set_exception(error)
            return
        ready.set_result(engine)
        try:
            while self._obey(engine):
                self._deliver(engine, engine.step())
            self._end(Ended(RequestAborted, "the engine was shut down"))
            self._abort(engine, list(self._listeners))
            engine.settle()
        except BaseException as error:  # whatever it was, nothing may wait for it
            logger.exception("the engine stops after an error")
            self._end(Ended(EngineDied, f"the engine failed: {type(error).__name__}: {error}"))
        finally:
            engine.close()

    def _obey(self, engine: LocalEngine) -> bool:
        """Take all orders. Returns whether to continue."""
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
        """Call each listener once for a step."""
        news: dict[Listener, list[EngineToRouter]] = {}
        for message in messages:
            if not isinstance(message, Tokens | Finished | Failed):
                continue
            listener = self._listeners.get(message.request_id)
            if listener is not None:  # otherwise it is aborted
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
        """Accept nothing any more, and tell all waiters. The first reason stays."""
        with self._lock:
            self.ended = self.ended or ended
            listeners = {*self._listeners.values()}
            while not self._orders.empty():
                order = self._orders.get_nowait()
                if order is not None and order[1] is not None:
                    listeners.add(order[1])
        for listener in listeners:
            listener.lost()
