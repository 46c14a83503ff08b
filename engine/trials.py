"""Runs suspected requests alone: while one runs, no step has another request in it, and its router knows
(docs/failures.md).

The beginning and the end of such a trial are agreed on with the router. So a crash during the trial can be blamed on
that request, and a crash before or after it cannot, whichever of the dying process's last messages arrive.
"""

from typing import Literal

from pdkv.engine.request import Request
from pdkv.wire.messages import Trial
from pdkv.wire.types import RequestKey

ANSWER_TIMEOUT_S = 5.0
"""Seconds for which an engine stands still for a router's answer; then it continues without."""

_State = Literal["none", "opening", "asked", "open", "closing", "over"]


class Trials:
    """At most one request is on trial at a time. Single-threaded; plain data in, plain data out.

    none ─▶ opening (steps in flight end) ─▶ asked ─▶ open ─▶ closing (its step ends) ─▶ over ─▶ none; `asked` and
    `over` wait for the router. Its steps follow each other strictly in turn.
    """

    def __init__(self) -> None:
        self.deadline: float | None = None  # of the router's answer
        self._num_suspects = 0  # requests here that have yet to run alone
        self._wanted: Request | None = None  # suspects that could run now
        self._request: Request | None = None
        self._state: _State = "none"
        self._is_idle = True  # when the planning of the current step began
        self._messages: list[tuple[str, Trial]] = []  # by router_id

    @property
    def active(self) -> bool:
        """Whether anything but `add` needs to be called: there are suspects."""
        return self._num_suspects > 0 or self._request is not None

    @property
    def is_open(self) -> bool:
        """Whether one request, and no other, may run."""
        return self._state == "open"

    def add(self, request: Request) -> None:
        """Add a new request."""
        self._num_suspects += request.trial_tokens > 0

    def holds(self, request: Request) -> bool:
        """Whether a request that could run now must wait."""
        if self._request is not None:
            return not (self._state == "open" and request is self._request and self._is_idle)
        if request.trial_tokens and self._wanted is None:
            self._wanted = request
        return request.trial_tokens > 0

    def advance(self, *, is_idle: bool) -> None:
        """Called before the next step is planned. `is_idle`: no step with requests is in progress."""
        self._is_idle = is_idle
        if self._state == "none" and self._wanted is not None:
            self._request, self._wanted, self._state = self._wanted, None, "opening"
        if self._state == "opening" and is_idle:
            self._ask(begins=True)

    @property
    def wants_step(self) -> bool:
        """Whether the next plan would advance the trial."""
        return self._wanted is not None and self._state == "none"

    def drew(self, request: Request, num_tokens: int) -> None:
        """Note that a suspect drew tokens. After enough tokens it is an ordinary request."""
        request.trial_tokens = max(request.trial_tokens - num_tokens, 0)
        if not request.trial_tokens:
            self._num_suspects -= 1
            self.end(request)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended."""
        self._num_suspects -= request.trial_tokens > 0
        request.trial_tokens = 0
        if request is self._wanted:
            self._wanted = None
        self.end(request)

    def end(self, request: Request) -> None:
        """End the trial of this request, if it is on trial; the others continue when its router knows."""
        if request is self._request:
            self.pause()

    def pause(self) -> None:
        """Interrupt the current trial."""
        if self._state == "opening":
            self._clear()
        elif self._state in ("asked", "open"):
            self._state = "closing"

    def close(self, *, is_idle: bool) -> None:
        """Tell the router that the trial is over, once it is and no step with requests is in progress."""
        if self._state == "closing" and is_idle:
            self._ask(begins=False)

    def answered(self, router_id: str, message: Trial) -> bool:
        """Take a router's answer; returns whether it was awaited."""
        state: _State = "asked" if message.begins else "over"
        key: RequestKey = (message.request_id, message.attempt)
        request = self._request
        if request is None or (self._state, request.key, request.router_id) != (state, key, router_id):
            return False
        if message.begins:
            self._state, self.deadline = "open", None
        else:
            self._clear()
        return True

    def router_left(self, router_id: str) -> None:
        """Note that a router has left, so no answer will come; its requests are already removed."""
        if self._request is not None and self._request.router_id == router_id:
            self._clear()

    def expire(self, now: float) -> bool:
        """Continue without an overdue answer; the request is then no longer on trial. Returns whether an answer was
        overdue.
        """
        if self.deadline is None or now < self.deadline or self._request is None:
            return False
        self._num_suspects -= self._request.trial_tokens > 0
        self._request.trial_tokens = 0
        self._clear()
        return True

    def take_messages(self, now: float) -> list[tuple[str, Trial]]:
        """(router_id, message) since the last call, to be sent now."""
        messages, self._messages = self._messages, []
        if messages:
            self.deadline = now + ANSWER_TIMEOUT_S
        return messages

    def _ask(self, *, begins: bool) -> None:
        assert self._request is not None
        self._state = "asked" if begins else "over"
        self._messages.append((self._request.router_id, Trial(*self._request.key, begins)))

    def _clear(self) -> None:
        self._request, self._state, self.deadline = None, "none", None
