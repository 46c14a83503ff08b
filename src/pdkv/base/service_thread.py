"""A thread that belongs to an object: its start, its end, and log lines if it fails or does not end."""

import logging
import threading
from collections.abc import Callable

from pdkv.errors import PdkvError, ServerBusy

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0
"""Seconds for which `stop` waits for a thread to end."""


def start_thread(thread: threading.Thread, error: type[PdkvError] = ServerBusy) -> None:
    """Start a thread. Raises `error`: the system has none left; it may be tried again."""
    try:
        thread.start()
    except RuntimeError as problem:
        raise error(f"no thread for {thread.name}: {problem}") from None


class ServiceThread:
    """Calls `run(stopping)` once, on a daemon thread of its own.

    Args:
        run: returns soon after `stopping` is set and `wake` was called. An exception ends the thread and is logged.
        wake: makes `run` check `stopping`; called on any thread, and never before `stopping` is set.
        name: the thread's name in logs and in leak checks.
    """

    def __init__(self, run: Callable[[threading.Event], None], wake: Callable[[], None], name: str) -> None:
        self.stopping = threading.Event()
        self.failure: BaseException | None = None
        self._run = run
        self._wake = wake
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._lock = threading.Lock()  # guards start and stop
        self._is_started = False

    @property
    def name(self) -> str:
        """Name of the thread."""
        return self._thread.name

    @property
    def ident(self) -> int | None:
        """The thread's number in the interpreter; None: it has not begun."""
        return self._thread.ident

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on it."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Start the thread, unless it has been started or stopped before.

        Raises:
            ServerBusy: the system has no thread left; it may be tried again.
        """
        with self._lock:
            if not (self._is_started or self.stopping.is_set()):
                start_thread(self._thread)
                self._is_started = True

    def start_or(self, release: Callable[[], object]) -> None:
        """Start the thread as `start` does; if that fails, call `release` first, for an owner that is not made then."""
        try:
            self.start()
        except ServerBusy:
            release()
            raise

    def stop(self, timeout_s: float = JOIN_TIMEOUT_S) -> bool:
        """End the thread and wait for its end; a thread that does not end in time is named in the log. Idempotent.

        Returns:
            Whether it has ended. If called on the thread itself, False, at once.
        """
        self.stopping.set()
        self._wake()
        with self._lock:
            is_started = self._is_started
        if is_started and self.is_current:
            return False
        if is_started:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("thread %s does not end", self.name)
            return False
        self._run, self._wake = _no_run, _no_wake  # its owner may be freed at once, with everything it holds
        return True

    def _serve(self) -> None:
        try:
            self._run(self.stopping)
        except BaseException as error:
            self.failure = error
            logger.exception("thread %s ended with an error", self.name)


def _no_run(stopping: threading.Event) -> None:
    pass


def _no_wake() -> None:
    pass
