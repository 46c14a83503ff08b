"""A system that has no thread left."""

import contextlib
import threading
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def no_threads(but: int = 0) -> Iterator[None]:
    """A context in which none can be started, but for the first ones."""
    start, left = threading.Thread.start, iter(range(but))

    def refuse(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        yield
