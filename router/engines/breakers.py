"""Circuit breakers for engines and (prefill, decode) pairs that fail so often that others are preferred.

They only re-rank: if nothing else is left, engines with an open breaker are used all the same. No clock: `now` is in
seconds.
"""

from collections import Counter, deque
from itertools import islice
from typing import Literal

WINDOW_S = 30.0
"""Seconds for which an event counts."""

MIN_EVENTS, PAIR_MIN_EVENTS = 5, 1
"""Events in the window before a breaker opens. A pair without any known success opens at its first failed load: another
route costs nothing, and a second failure a recomputed prompt.
"""

FAILURE_RATE = 0.5
"""Share of failures among the events in the window at which a breaker opens."""

OPEN_S = 10.0
"""Seconds that it stays open. Then it is half open: one request or probe at a time decides what comes next."""

TRIAL_S = 10.0
"""Seconds that a trial keeps others away if no result arrives."""

CRASH_WINDOW_S, CRASHES = 60.0, 3
"""Number of deaths within a time that make a crash loop, in which a success closes nothing."""

BreakerState = Literal["closed", "open", "half_open"]


class Breaker:
    """Counts the successes and failures of one engine or pair per second. Outlives an engine's incarnations."""

    __slots__ = ("_counts", "_deaths", "_min_events", "_open_until", "_trial_until")

    def __init__(self, min_events: int = MIN_EVENTS) -> None:
        self._min_events = min_events
        self._counts: deque[list[int]] = deque()  # [second, successes, failures]
        self._deaths: deque[float] = deque(maxlen=CRASHES)
        self._open_until: float | None = None  # None: closed
        self._trial_until = 0.0

    def state(self, now: float) -> BreakerState:
        """The current state."""
        if self._open_until is None:
            return "closed"
        return "open" if now < self._open_until else "half_open"

    def passes(self, now: float) -> bool:
        """Whether requests may go there although there are alternatives: closed, or half open without a running
        trial.
        """
        if self._open_until is None:
            return True
        return now >= self._open_until and now >= self._trial_until

    def is_idle(self, now: float) -> bool:
        """Whether nothing happened in the window."""
        return not self._counts or self._counts[-1][0] <= now - WINDOW_S

    def begin_trial(self, now: float) -> None:
        """Record that a request or probe goes there. While the breaker is half open, no other one does."""
        if self.state(now) == "half_open":
            self._trial_until = now + TRIAL_S

    def succeeded(self, now: float) -> None:
        """Record a success. A half-open breaker closes, or in a crash loop reopens."""
        self._note(now, 1)
        if self.state(now) == "half_open":
            self._trial_until = 0.0
            if self._crashes(now):
                self._open_until = now + OPEN_S
            else:
                self._open_until = None
                self._counts.clear()

    def failed(self, now: float) -> None:
        """Record a failure that it caused. A half-open breaker reopens."""
        self._note(now, 2)
        state = self.state(now)
        successes, failures = self._totals(now)
        enough = successes + failures >= self._min_events and failures >= FAILURE_RATE * (successes + failures)
        if state == "half_open" or (state == "closed" and enough):
            self._open(now)

    def died(self, now: float) -> None:
        """Record the death of the engine's process: one failure, however many requests it had; the third in a minute
        opens.
        """
        self._deaths.append(now)
        self.failed(now)
        if self._crashes(now):
            self._open(now)

    def _open(self, now: float) -> None:
        self._open_until = now + OPEN_S
        self._trial_until = 0.0

    def _crashes(self, now: float) -> bool:
        return len(self._deaths) == CRASHES and self._deaths[0] > now - CRASH_WINDOW_S

    def _note(self, now: float, which: int) -> None:
        second = int(now)
        if not self._counts or self._counts[-1][0] != second:
            self._counts.append([second, 0, 0])
            while self._counts[0][0] <= second - WINDOW_S:
                self._counts.popleft()
        self._counts[-1][which] += 1

    def _totals(self, now: float) -> tuple[int, int]:
        recent = [counts for counts in self._counts if counts[0] > now - WINDOW_S]
        return sum(counts[1] for counts in recent), sum(counts[2] for counts in recent)


class PairBreakers:
    """A breaker per (prefill, decode) pair: whether KV loads between them work.

    What is asked for each request costs by the pairs that fail, which are few, and not by those that were ever used.
    """

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], Breaker] = {}  # those that were used longest ago first
        self._failing: set[tuple[str, str]] = set()  # those that are not closed

    def loaded(self, prefill: str, decode: str, ok: bool, now: float) -> None:
        """Record that a KV load from `prefill` to `decode` ended."""
        pair = (prefill, decode)
        breaker = self._pairs.pop(pair) if pair in self._pairs else Breaker(PAIR_MIN_EVENTS)
        self._pairs[pair] = breaker
        if ok:
            breaker.succeeded(now)
        else:
            breaker.failed(now)
        if breaker.state(now) == "closed":
            self._failing.discard(pair)
        else:
            self._failing.add(pair)
        for oldest in list(islice(self._pairs, 2)):  # so that what is not used any more goes
            if oldest in self._failing:
                self._pairs[oldest] = self._pairs.pop(oldest)
            elif self._pairs[oldest].is_idle(now):
                del self._pairs[oldest]

    def begin_trial(self, prefill: str, decode: str, now: float) -> None:
        """Record that a request goes from one to the other."""
        if (breaker := self._pairs.get((prefill, decode))) is not None:
            breaker.begin_trial(now)

    def avoided(self, now: float) -> frozenset[tuple[str, str]]:
        """Pairs that are avoided now."""
        return frozenset(pair for pair in self._failing if not self._pairs[pair].passes(now))

    def states(self, now: float) -> dict[tuple[str, str], BreakerState]:
        """States of the pairs that are not closed."""
        return {pair: self._pairs[pair].state(now) for pair in self._failing}

    def forget(self, name: str) -> None:
        """Forget an engine that is gone for good."""
        self._pairs = {pair: breaker for pair, breaker in self._pairs.items() if name not in pair}
        self._failing &= self._pairs.keys()


def common_sides(pairs: frozenset[tuple[str, str]]) -> frozenset[str]:
    """Engines that explain several failing pairs: all those pairs have them in common, and nothing else.

    (p0, d0) and (p1, d0) suspect d0 alone; (p0, d0) by itself suspects neither; with (p0, d1), too, p0 and d0 both
    explain two of three, and both are suspected.
    """
    sides = Counter(side for pair in pairs for side in pair)
    return frozenset(side for side, count in sides.items() if count > 1)
