"""Limits how long schemas may keep a thread busy before anything is generated."""

import time
from collections.abc import Callable

from pdkv.errors import InvalidRequest, RequestAborted

MAX_SECONDS = 2.0
"""Processor seconds for the schemas of one request: real ones take milliseconds."""


class SchemaTime:
    """The time shared by the schemas of one request, on the thread that made it."""

    def __init__(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """`cancelled`: returns whether the result is no longer wanted."""
        self._cancelled = cancelled
        self._end = time.thread_time() + MAX_SECONDS

    def check(self) -> None:
        """Check the time before work that may take long: a merge of two large schemas takes milliseconds.

        Raises:
            InvalidRequest: the time limit has passed.
            RequestAborted: the request was cancelled.
        """
        if self._cancelled():
            raise RequestAborted("the client went away", request_id="")
        if time.thread_time() > self._end:
            raise InvalidRequest(f"it takes more than {MAX_SECONDS:g} s of processor time to normalize")
