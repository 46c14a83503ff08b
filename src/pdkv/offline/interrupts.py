"""Ctrl-C while an engine works in the caller's thread: it takes effect between two steps; nothing is half done then."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

LOOK_S = 1.0
"""Longest wait while SIGINT is held back: Python does not end one that begins just after the signal."""


class HeldInterrupts:
    """While entered, SIGINT calls its handler, Python's or the caller's own, from `deliver` or at the end, and not at
    once. If Python has no handler for it, or the thread gets no signals, nothing is held back.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake`: called by a signal handler when SIGINT has come; ends the current wait."""
        self._wake = wake
        self._handler: Callable[[int, FrameType | None], Any] | None = None  # SIGINT's own
        self.longest_wait_s = threading.TIMEOUT_MAX
        self._held: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler, self.longest_wait_s = handler, LOOK_S
            signal.signal(signal.SIGINT, self._hold)

    def __exit__(self, *_: object) -> None:
        if signal.getsignal(signal.SIGINT) == self._hold:  # otherwise its handler has installed another one
            signal.signal(signal.SIGINT, self._handler)
        self.longest_wait_s = threading.TIMEOUT_MAX
        self.deliver()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held = number, frame
        self._wake()

    def deliver(self) -> None:
        """Call the handler if SIGINT has come. Raises what it raises, by default KeyboardInterrupt."""
        held, self._held = self._held, None
        if held is not None and self._handler is not None:
            self._handler(*held)
