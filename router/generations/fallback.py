"""When requests go to another deployment (docs/fallback.md): by two rules with hysteresis, or by hand. No I/O."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pdkv.router.engines.fleet import FALLBACK, Fleet
from pdkv.router.engines.foreign_kinds import cannot_continue, missing
from pdkv.router.engines.state import EngineState
from pdkv.router.request import GenerateRequest, Route

logger = logging.getLogger(__name__)

Reason = Literal["", "overflow", "disaster", "hand"]

ELSEWHERE = Route(FALLBACK, FALLBACK)
"""The route of a request that the other deployment runs."""

BACK_S = 5.0
"""Seconds for which a rule's cause must be gone before it ends."""

BACK_SHARE = 0.5
"""The part of the bound below which the queue's wait must fall before an overflow can end."""

FIRST_REQUESTS, MORE_REQUESTS = 4, 2
"""Requests that run there at once after a failure, and how many more for each success since: what a deployment that
hangs or lies can hold is little.
"""

RECENT = 100
"""About how many of the latest requests the share shown is of."""


class Fallback:
    """Decides for each request that may leave this deployment. `now` is in seconds."""

    def __init__(self, fleet: Fleet, is_down: Callable[[], bool], wait_s: float) -> None:
        """`is_down`: whether no engine here can serve; `wait_s`: the wait in the queue beyond which it overflows."""
        self.cause: Reason = ""  # of the rule that holds
        self.wanted = 0.0  # the share by hand
        self.sent: Counter[str] = Counter()  # choices, by reason
        self.recent = 0.0  # the share of the latest choices that left
        self.defaults: Mapping[str, Any] = {}  # of the model: parameters with these values are no client's
        self.is_down = is_down
        self.queue: Callable[[], tuple[float, bool]] = lambda: (0.0, False)
        """The predicted wait of the queue in seconds, and whether it refuses requests."""
        self._fleet, self._wait_s = fleet, wait_s
        self._caused_at = -math.inf
        self._owed = 0.0  # requests by hand that are due

    @property
    def engine(self) -> EngineState | None:
        """The other deployment as an engine; None: there is none."""
        engine = self._fleet.engines.get(FALLBACK)
        return engine if engine is not None and engine.role == FALLBACK else None

    def is_open(self, now: float, num_choices: int = 1) -> bool:
        """Whether it takes so many more choices now."""
        engine = self.engine
        if engine is None or not engine.serves or engine.score.held_until(now):
            return False
        return engine.books.requests + num_choices <= self.limit

    def takes_over(self, now: float) -> bool:
        """Whether no engine here can serve, and it takes one more request now."""
        return self.is_open(now) and self.is_down()

    @property
    def limit(self) -> int:
        """Requests that it is given at once."""
        engine = self.engine
        if engine is None or engine.card is None:
            return 0
        return min(FIRST_REQUESTS + MORE_REQUESTS * engine.score.num_in_row, engine.card.max_num_seqs)

    def look(self, now: float) -> None:
        """Compare the queue and the engines with the rules."""
        (wait_s, is_full), before = self.queue(), self.cause
        bound = self._wait_s * (BACK_SHARE if before == "overflow" else 1.0)
        cause: Reason = "disaster" if self.is_down() else "overflow" if is_full or wait_s > bound else ""
        if cause:
            self.cause, self._caused_at = cause, now
        elif now - self._caused_at >= BACK_S:
            self.cause = ""
        if self.cause != before and self.engine is not None:
            logger.warning("fallback: %s, a wait of %.1f s", self.cause or "requests stay here again", wait_s)
            self._fleet.events.note(now, "fallback", FALLBACK, self.cause or "over")

    def reason(self, request: GenerateRequest, now: float, num_output: int = 0) -> Reason:
        """Why a request leaves, which then counts; "": it stays. `num_output`: tokens that it has already."""
        if not self.is_open(now) or not self.fits(request, num_output):
            return ""
        if not self.cause and not num_output:
            self._owed = min(self._owed + self.wanted, 1.0)
        reason: Reason = self.cause or ("hand" if self._owed >= 1.0 else "")
        self._owed -= reason == "hand"
        return reason

    def began(self, reason: str) -> None:
        """Count a choice that begins; `reason` "": here."""
        self.recent += (bool(reason) - self.recent) / RECENT
        if reason:
            self.sent[reason] += 1

    def fits(self, request: GenerateRequest, num_output: int = 0) -> bool:
        """Whether a request may leave, and asks for nothing that the other deployment lacks."""
        engine, params = self.engine, request.params
        if not request.may_leave or engine is None or engine.card is None:
            return False
        is_whole = not num_output or cannot_continue(params) == ""
        lacks_none = not missing(engine.card.backend, params, self.defaults)
        return is_whole and lacks_none and engine.takes(request.most_tokens(num_output))

    def describe(self, now: float) -> dict[str, Any]:
        """What it does now, JSON-ready; empty: there is none."""
        if (engine := self.engine) is None:
            return {}
        return {
            "mode": "off" if engine.draining else "auto", "share": self.wanted, "reason": self.cause,
            "recent_share": round(self.recent, 4), "sent": dict(self.sent),
            "open": self.is_open(now), "limit": self.limit, "bound_s": self._wait_s,
        }  # fmt: skip
