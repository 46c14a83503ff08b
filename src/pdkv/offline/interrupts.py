"""Ctrl-C while an engine works in the caller's thread: it takes effect between two steps; nothing is half done then."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

Handler = Callable[[int, FrameType | None], Any]


class HeldInterrupts:
    """While entered, SIGINT calls its handler, Python's or the caller's own, from `deliver` or at the end, and not at
    once. In threads to which Python sends no signals, and where SIGINT has no handler in Python, nothing is held back.

    Args:
        wake: called by a signal handler when SIGINT has come: ends whatever is waited for.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._handler: Handler | None = None  # that of SIGINT, while it is held back
        self._held: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Self:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._handler is not None and signal.getsignal(signal.SIGINT) == self._hold:
            signal.signal(signal.SIGINT, self._handler)  # else the handler has put another in its own place
        self.deliver()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held = number, frame
        self._wake()

    def deliver(self) -> None:
        """Call the handler if SIGINT has come. Raises what it raises, by default KeyboardInterrupt."""
        held, self._held = self._held, None
        if held is not None and self._handler is not None:
            self._handler(*held)
