"""Judges engines by comparison with their peers: one score for each, and the few pairs between which KV does not pass.

After Envoy's outlier detection. An engine that is much worse than its peers is ejected: others are preferred for a
time that grows with each ejection. No clock: `now` is in seconds.
"""

import math
from collections.abc import Iterator

SHARE, HALF_LIFE_S = 0.1, 60.0
"""Share of the latest request in the average of failures, and seconds in which earlier failures fade by half."""

FAILING, DEATHS, SLOW = 0.25, 2.1, 5.0
"""What ejects an engine whose peers are well: an average of so many failures, so many recent deaths of its process, or
answers that take so many times as long.
"""

LEAST_S = 0.01
"""Seconds: shorter answers are as good as this one."""

NOT_SLOW = 2.0
"""How many times as long as at its peers answers may take on trial: an engine on trial has less to do."""

GAP_SHARE, PROMPT_SHARE = 0.05, 0.2
"""Share of the latest answer in the average of paces: several chunks of one long prompt make no engine slow."""

MIN_PACES, TRIAL_PACES = 10, 3
"""Times of answers after which an engine can be called slow, and after which a trial is decided before its end."""

HOLD_S, MAX_HOLD_S = 5.0, 300.0
"""Seconds of the first ejection, doubled by each further one up to a maximum; each HALF_LIFE_S without one takes back
a doubling.
"""

TRIAL_S = 10.0
"""Seconds for which a trial keeps other requests away if no result arrives."""


class Usual:
    """What is usual among the engines of one role."""

    __slots__ = ("_seconds", "_work", "pace")

    def __init__(self) -> None:
        self.pace = 0.0  # 0: not known
        self._work = self._seconds = 0.0  # recent averages

    def relate(self, work: float, seconds: float) -> float:
        """An answer's time, divided by the usual one. More work may take proportionally longer; less work may take as
        long, since a step costs something by itself.
        """
        seconds, work = max(seconds, LEAST_S), max(work, 1)
        if not self._seconds:
            self._work, self._seconds = work, seconds
        pace = seconds / (self._seconds * max(work / self._work, 1.0))
        self._work += SHARE * (work - self._work)
        self._seconds += SHARE * (seconds - self._seconds)
        return pace


def typical(values: list[float]) -> float:
    """The lower median: what is usual among peers, even if there are two and one of them is an outlier."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


def hold_s(num_before: int) -> float:
    """Seconds of a hold that so many others came before."""
    return min(HOLD_S * 2.0 ** min(num_before, 10), MAX_HOLD_S)


class OutlierScore:
    """How an engine does, whatever its incarnation, and whether it is ejected.

    When its hold is over, one request or probe at a time shows whether it has recovered.
    """

    __slots__ = (
        *("_at", "_deaths", "_failing", "_held_until", "_is_on_trial", "_num_ejections"),
        *("is_ejected", "num_in_row", "num_paces", "pace"),
    )

    def __init__(self) -> None:
        self.pace = 1.0  # average of the times of answers, each divided by what is expected of its role
        self.num_paces = 0  # times in that average
        self.num_in_row = 0  # successes since the last failure
        self.is_ejected = False  # or on trial after that
        self._failing = 0.0
        self._deaths = 0.0
        self._at = 0.0  # when these two were last changed
        self._held_until = -math.inf  # of the latest hold or trial
        self._is_on_trial = False
        self._num_ejections = 0

    def value(self, now: float, usual_pace: float) -> float:
        """The engine's score, at least 0; from 1 on it is an outlier among peers with lower scores. `usual_pace`: the
        pace of its peers.
        """
        slowness = self.relative_pace(usual_pace)
        failures = self._fading(now) * max(self._failing / FAILING, self._deaths / DEATHS)
        return max(failures, (slowness - 1.0) / (SLOW - 1.0))

    def relative_pace(self, usual_pace: float) -> float:
        """How many times as long as its peers it takes to answer; 1: not known."""
        return self.pace / usual_pace if self.num_paces >= MIN_PACES and usual_pace else 1.0

    def held_until(self, now: float) -> float:
        """Until when others are preferred; 0: not now. It is not ejected, or nothing tries it yet."""
        return self._held_until if self.is_ejected and now < self._held_until else 0.0

    def awaits_trial(self, now: float) -> bool:
        """Whether its hold is over, and nothing tries it."""
        return self.is_ejected and now >= self._held_until

    def begin_trial(self, now: float) -> None:
        """Note that a request or probe goes there. If it awaits a trial, this is the one."""
        if self.awaits_trial(now):
            self._is_on_trial, self._held_until, self.num_paces = True, now + TRIAL_S, 0

    def paced(self, pace: float, share: float = PROMPT_SHARE) -> None:
        """Note how long an answer took, divided by what is expected of its role."""
        self.num_paces += 1
        self.pace += (min(pace, 2 * SLOW) - self.pace) * max(share, 1.0 / self.num_paces)

    def succeeded(self, now: float, usual_pace: float) -> None:
        """Note a success. On trial, it has recovered, unless it is still slow, or has died too often lately."""
        self._failing -= SHARE * self._failing
        self.num_in_row += 1
        if not self._is_on_trial:
            return
        is_slow = self.num_paces > 0 and self.pace > NOT_SLOW * usual_pace > 0
        if is_slow or self._fading(now) * self._deaths >= DEATHS:
            self.eject(now)
        else:
            self.is_ejected = self._is_on_trial = False
            self._failing = 0.0

    def failed(self, now: float) -> None:
        """Note a failure that it caused. On trial, it is ejected again."""
        self._bear(now, SHARE * (1.0 - self._failing), 0.0)

    def died(self, now: float) -> None:
        """Note the death of its process: one event, however many requests it had, which no success outweighs."""
        self._bear(now, 0.0, 1.0)

    def eject(self, now: float) -> None:
        """Eject this engine: the router prefers others for a time."""
        forgiven = max(now - self._held_until, 0.0) // HALF_LIFE_S if self._num_ejections else 0
        self._num_ejections = max(self._num_ejections - int(forgiven), 0)
        self._held_until = now + hold_s(self._num_ejections)
        self._num_ejections += 1
        self.is_ejected, self._is_on_trial = True, False

    @property
    def is_tried(self) -> bool:
        """Whether its answers on trial, which has not ended, show how it does."""
        return self._is_on_trial and self.num_paces >= TRIAL_PACES

    def _fading(self, now: float) -> float:
        return math.pow(2.0, (self._at - now) / HALF_LIFE_S)

    def _bear(self, now: float, failing: float, deaths: float) -> None:
        fading, self.num_in_row = self._fading(now), 0
        self._failing, self._deaths, self._at = fading * self._failing + failing, fading * self._deaths + deaths, now
        if self._is_on_trial:
            self.eject(now)


class BadPairs:
    """(prefill, decode) pairs whose latest KV load failed. Each is avoided for a time that grows with each hold."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], tuple[float, int]] = {}  # until when it is avoided, and its holds in turn
        self._avoided: frozenset[tuple[str, str]] = frozenset()
        self._ends_at = math.inf  # when the first of these holds ends

    def loaded(self, prefill: str, decode: str, ok: bool, now: float) -> None:
        """Note that a KV load from `prefill` to `decode` ended. Failures while the pair is avoided say nothing new."""
        pair = (prefill, decode)
        until, num = self._pairs.get(pair, (-math.inf, 0))
        if ok and num:
            del self._pairs[pair]
        elif not ok and now >= until:
            self._pairs[pair] = now + hold_s(num), num + 1
        else:
            return
        self._ends_at = -math.inf

    def avoided(self, now: float) -> frozenset[tuple[str, str]]:
        """Pairs that are avoided now. The others of these await a trial: their next load decides."""
        if now >= self._ends_at:
            held = {pair: until for pair, (until, _) in self._pairs.items() if now < until}
            self._avoided, self._ends_at = frozenset(held), min(held.values(), default=math.inf)
        return self._avoided

    def __len__(self) -> int:
        return len(self._pairs)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._pairs)

    def forget(self, name: str) -> None:
        """Forget an engine that is gone for good."""
        self._pairs = {pair: held for pair, held in self._pairs.items() if name not in pair}
        self._ends_at = -math.inf
