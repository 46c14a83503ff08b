"""How long schemas may keep a thread busy before anything is generated."""

import time
from collections.abc import Callable

from pdkv.errors import InvalidRequest, RequestAborted

MAX_SECONDS = 2.0
"""Of a processor's time for the schemas of one request: real ones take milliseconds."""


class SchemaTime:
    """The time that the schemas of one request share; for the thread that made it."""

    def __init__(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """`cancelled`: whether nobody waits for the result any more."""
        self._cancelled = cancelled
        self._end = time.thread_time() + MAX_SECONDS

    def check(self) -> None:
        """To be called before what may take long: a merge of two large schemas takes milliseconds.

        Raises:
            InvalidRequest: the time is over.
            RequestAborted: nobody waits any more.
        """
        if self._cancelled():
            raise RequestAborted("the client went away", request_id="")
        if time.thread_time() > self._end:
            raise InvalidRequest(f"it takes more than {MAX_SECONDS:g} s of a processor to bring it to its normal form")
