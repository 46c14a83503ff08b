"""Decides how many engines of each role there should be, and which of them change, start or leave.

No I/O and no clock: the router and the simulator call it with what they see and the time.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pdkv.base.cost_line import Line
from pdkv.config import Bounds
from pdkv.router.scaling.attainment import Answers, Prompts, tpot, ttft

PERIOD_S = 1.0
"""Seconds between decisions."""

FAST_S, SLOW_S = 30.0, 120.0
"""Seconds over which the rate of prompt tokens is averaged; the difference of the two averages is its trend."""

MOST_GROWTH = 2.0
"""The most by which the rate is expected to grow until new engines are there."""

LEAD_S = 30.0
"""Seconds that the start of an engine is expected to take before one has been seen."""

PATIENCE_S = 30.0
"""Seconds, or twice the time of a start, for which an engine that is away counts as one that will be back."""

RETRY_S, MAX_RETRY_S = 10.0, 300.0
"""Seconds without a start after one has failed; twice as many after each further one."""

SPARE_S = 15.0
"""Seconds for which a role must not have needed an engine before the other role may have it."""

MEMORY = 0.99
"""Weight of a measured time relative to the next one: times are remembered over a swing of the load."""

_OTHER = {"prefill": "decode", "decode": "prefill"}


class Objectives(NamedTuple):
    """What is to be attained, and how slowly engines are taken away."""

    ttft_s: float
    tpot_s: float
    attainment: float  # part of the requests
    down_after_s: float


class Seen(NamedTuple):
    """One engine that the router knows."""

    name: str
    role: str
    serves: bool  # it may be given requests, unless it is draining
    draining: bool = False
    requests: int = 0


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the launcher is doing."""

    starting: dict[str, str] = {}  # roles of engines that are being started, by name
    leaving: list[str] = []  # engines that are drained or ended
    num_started: int = 0  # since the launch began
    num_failed: int = 0
    failure: str = ""  # the latest
    start_s: float = 0.0  # of the latest start; 0: none yet


class Observation(NamedTuple):
    """What is known at one moment."""

    engines: Sequence[Seen]
    told: Told = Told()
    queued: float = 0.0  # prompt tokens that are to be computed
    asked: float = 0.0  # prompt tokens that have come since the router began, those included
    sizes: tuple[float, float, float] = (0.0, 0.0, 0.0)  # prompts given to engines, their tokens, and squares of these
    prompt_times: Iterable[tuple[float, float]] = ()  # (tokens to the end of a prompt, seconds) as lately measured
    step_times: Iterable[tuple[float, float]] = ()  # (requests, seconds between two tokens)
    requests: float = 0.0  # that decode
    most: float = math.inf  # for which one engine has places and KV


class Decision(NamedTuple):
    """What should be done now."""

    at: float
    desired: Mapping[str, int]
    figures: dict[str, Any]  # JSON-ready
    start: Mapping[str, int] = {}  # by role
    stop: Sequence[str] = ()  # to be drained, and ended
    keep: Sequence[str] = ()  # leaving engines that are needed after all
    roles: Mapping[str, str] = {}  # new roles of engines
    reason: str = ""  # empty: nothing is to be done

    @property
    def changes(self) -> bool:
        """Whether anything is to be done."""
        return bool(self.reason)


class Rate:
    """How much of a growing total comes per second, and the trend of that."""

    def __init__(self) -> None:
        self.fast = self.slow = 0.0
        self._total = self._at = self._since = -1.0

    def note(self, total: float, now: float) -> None:
        """Take the total at a time."""
        if self._at >= 0 and (seconds := now - self._at) > 0:
            came, age = max(total - self._total, 0.0) / seconds, now - self._since
            self.fast += (came - self.fast) * -math.expm1(-seconds / min(FAST_S, age))
            self.slow += (came - self.slow) * -math.expm1(-seconds / min(SLOW_S, age))
        self._since = now if self._at < 0 else self._since
        self._total, self._at = total, now

    def ahead(self, seconds: float, squares: float) -> float:
        """The rate that is expected so many seconds from now; no less than it is now.

        `squares`: of what comes at once, per second. With them, the average of random arrivals has a standard deviation
        within which differences are no trend.
        """
        noise = math.sqrt(squares / (2 * FAST_S))
        trend = max(self.fast - self.slow - noise, 0.0) / (SLOW_S - FAST_S)
        return min(self.fast + trend * (FAST_S + seconds), MOST_GROWTH * self.fast)


class Autoscaler:
    """Decides from one observation after the other.

    An engine more is wanted at once. One less is wanted where a stricter attainment was predicted for
    `down_after_s` without it.
    """

    def __init__(self, bounds: Mapping[str, Bounds], objectives: Objectives) -> None:
        """`bounds`: by role; "any" are aggregated engines. Roles without bounds are left alone."""
        self.bounds, self.objectives = bounds, objectives
        self.prompts, self.answers = Prompts(0.0, 0.0, 0.0, 0.0), Answers(0.0, 0.0, 0.0, math.inf)
        self._rate, self._sizes = Rate(), [Rate(), Rate(), Rate()]
        self._mean, self._variation = 0.0, 1.0  # of the tokens of a prompt
        self._prompt_line, self._step_line = Line(MEMORY), Line(MEMORY)
        self._samples: Sequence[tuple[Line, float, float]] = ()  # of the last observation
        self._holds: Mapping[str, deque[tuple[float, int]]] = {role: deque() for role in bounds}
        self._away: dict[str, float] = {}  # engines that do not serve, and since when
        self._began = self._at = self._retry_at = -math.inf
        self._changed: dict[str, float] = {}  # engines with new roles, and since when
        self._failures = 0  # in a row
        self._counts = (0, 0)  # engines that started, and failed starts
        self._lead_s = LEAD_S

    def next_deadline(self) -> float:
        """When it should decide again."""
        return self._at + PERIOD_S

    def decide(self, seen: Observation, now: float) -> Decision:
        """What should be done, given what is seen now."""
        self._learn(seen, now)
        have = {role: self._count(role, seen, now) for role in self.bounds}
        desired = {role: self._desired(role, count, now) for role, count in have.items()}
        figures = self._figures(seen, have, desired)
        spare = {role: count - self._held(role, SPARE_S, now) for role, count in have.items()}
        self._changed = {name: at for name, at in self._changed.items() if now < at + self.objectives.down_after_s}
        plan = _Plan(seen, have, desired, spare, self._changed)
        for role in desired:
            plan.gain(role, self.bounds[role].most if now >= self._retry_at else 0)
        for role in desired:
            plan.lose(role, self.bounds[role].least)
        self._changed |= dict.fromkeys(plan.roles, now)
        why = [self._explain(role, have[role], desired[role]) for role in desired if desired[role] != have[role]]
        reason = "; ".join([*plan.steps, *why]) if plan.steps else ""
        return Decision(now, desired, figures, plan.start, plan.stop, plan.keep, plan.roles, reason)

    # --- what is known --------------------------------------------------------------------------------------------

    def _learn(self, seen: Observation, now: float) -> None:
        if self._at < 0:
            self._began, self._counts = now, (seen.told.num_started, seen.told.num_failed)
        self._at = now
        self._note_starts(seen, now)
        self._rate.note(seen.asked, now)
        samples = [(line, *each) for line, each in self._samples_of(seen)]
        for line, amount, seconds in samples:
            if (line, amount, seconds) not in self._samples:
                line.add(amount, seconds)
        self._samples = samples
        self._away = {e.name: self._away.get(e.name, now) for e in seen.engines if not e.serves}
        for rate, total in zip(self._sizes, seen.sizes, strict=True):
            rate.note(total, now)
        count, tokens, squares = (rate.slow for rate in self._sizes)
        ahead = self._rate.ahead(self._lead_s, squares)
        growth = ahead / self._rate.fast if self._rate.fast else 1.0
        if count * tokens > 0:
            self._mean, self._variation = tokens / count, max(squares * count / tokens**2 - 1, 0.0)
        at_rest, token_s = self._prompt_line.fit()
        self.prompts = Prompts(seen.queued, ahead, token_s, at_rest + token_s * self._mean, self._variation)
        self.answers = Answers(growth * seen.requests, *self._step(), seen.most)

    def _samples_of(self, seen: Observation) -> Iterable[tuple[Line, tuple[float, float]]]:
        yield from ((self._prompt_line, each) for each in seen.prompt_times)
        yield from ((self._step_line, each) for each in seen.step_times)

    def _step(self) -> tuple[float, float]:
        """(fixed seconds, seconds per request) of a step. Of equal numbers of requests alone the line knows no slope:
        requests are taken to cost nothing where steps are short enough, and to be all that costs where they are not.
        """
        fixed_s, request_s = self._step_line.fit()
        usual_s = self._step_line.at(self._step_line.amount)
        return (fixed_s, request_s) if fixed_s or usual_s > self.objectives.tpot_s else (usual_s, 0.0)

    def _note_starts(self, seen: Observation, now: float) -> None:
        started, failed = self._counts
        if seen.told.num_started > started:
            self._failures, self._retry_at = 0, -math.inf
        if seen.told.num_failed > failed:
            self._retry_at = now + min(RETRY_S * 2.0**self._failures, MAX_RETRY_S)
            self._failures = min(self._failures + 1, 16)
        self._counts = seen.told.num_started, seen.told.num_failed
        self._lead_s = seen.told.start_s or LEAD_S

    def _count(self, role: str, seen: Observation, now: float) -> int:
        """Engines that do this role's work, now or soon."""
        patience_s = max(2 * self._lead_s, PATIENCE_S)
        here = [
            e
            for e in seen.engines
            if e.role in (role, "any") and not e.draining and e.name not in seen.told.starting
            and now - self._away.get(e.name, now) < patience_s
        ]  # fmt: skip
        return len(here) + sum(each == role for each in seen.told.starting.values())

    # --- what is wanted -------------------------------------------------------------------------------------------

    def attainment(self, role: str, num: int, present: int) -> float:
        """The part of the requests that this many engines of a role will serve in time."""
        objectives = self.objectives
        found = []
        if role != "decode":
            found.append(ttft(self.prompts, num, present, objectives.ttft_s, self._lead_s))
        if role != "prefill":
            found.append(tpot(self.answers, num, objectives.tpot_s))
        return min(found)

    def _desired(self, role: str, have: int, now: float) -> int:
        target = self.objectives.attainment
        want, strict = self._least(role, have, target), self._least(role, have, (1 + target) / 2)
        held = self._holds[role]  # falling numbers, so that the first is the most of the time that counts
        while held and held[-1][1] <= strict:
            held.pop()
        held.append((now, strict))
        while held[0][0] <= now - self.objectives.down_after_s:
            held.popleft()
        is_new = now - self._began < self.objectives.down_after_s
        most = self.bounds[role].most if is_new else self._held(role, self.objectives.down_after_s, now)
        return max(want, min(have, most))

    def _held(self, role: str, seconds: float, now: float) -> int:
        """The most engines that were needed in the last seconds, up to `down_after_s`."""
        return next(num for at, num in self._holds[role] if at > now - seconds)

    def _least(self, role: str, present: int, target: float) -> int:
        """The least number with that attainment; the most, if there is none."""
        numbers = range(self.bounds[role].least, self.bounds[role].most)
        return numbers.start + bisect_left(numbers, target, key=lambda num: self.attainment(role, num, present))

    def _explain(self, role: str, have: int, desired: int) -> str:
        now, then = (self.attainment(role, num, have) for num in (max(have, 1), desired))
        return f"predicted attainment of {role}: {now:.3f} with {have}, {then:.3f} with {desired}"

    def _figures(self, seen: Observation, have: Mapping[str, int], desired: Mapping[str, int]) -> dict[str, Any]:
        """JSON-ready."""
        prompts, answers = self.prompts, self.answers
        return {
            "have": dict(have),
            "attainment": {r: round(self.attainment(r, max(n, 1), n), 4) for r, n in have.items()},
            "queued_tokens": round(prompts.queued),
            "tokens_per_s": round(self._rate.fast, 1),
            "expected_tokens_per_s": round(prompts.rate, 1),
            "prompt_token_s": round(prompts.token_s, 9),
            "prompt_s": round(prompts.own_s, 6),
            "requests_decoding": round(answers.requests, 1),
            "step_fixed_s": round(answers.fixed_s, 6),
            "step_request_s": round(answers.request_s, 9),
            "start_s": round(self._lead_s, 3),
            "failed_starts": seen.told.num_failed,
            "failure": seen.told.failure,
        }


class _Plan:
    """The steps from the engines that there are to those that are desired."""

    def __init__(
        self,
        seen: Observation,
        have: Mapping[str, int],
        desired: Mapping[str, int],
        spare: Mapping[str, int],
        fixed: Collection[str],
    ) -> None:
        """`spare`: engines that the other role may have; `fixed`: engines that keep their roles."""
        self.start: dict[str, int] = {}
        self.stop: list[str] = []
        self.keep: list[str] = []
        self.roles: dict[str, str] = {}
        self.steps: list[str] = []  # in words
        self._seen = seen
        self._over = {role: have[role] - desired[role] for role in desired}
        self._spare, self._fixed = dict(spare), fixed

    def gain(self, role: str, most: int) -> None:
        """Take engines that leave, then those that the other role does not need, then new ones up to `most`."""
        other = _OTHER.get(role, "")
        for engine in sorted(self._seen.engines, key=lambda e: e.role != role):
            is_left = engine.name in self._seen.told.leaving and engine.serves and engine.name not in self.keep
            if self._over[role] < 0 and is_left and engine.role in (role, other):
                self.keep.append(engine.name)
                self._take(engine, role, f"keep {engine.name}")
        while self._over[role] < 0 < self._spare.get(other, 0) and (idle := self._idlest(other, self._fixed)):
            self._spare[other] -= 1
            self._over[other] -= self._over[other] > 0
            self._take(idle, role)
        there = [r for n, r in self._seen.told.starting.items()]
        there += [self.roles.get(e.name, e.role) for e in self._seen.engines if e.name not in self._seen.told.starting]
        if (count := min(-self._over[role], most - there.count(role))) > 0:
            self.start[role] = count
            self.steps.append(f"start {count} {role}")

    def lose(self, role: str, least: int) -> None:
        """Let the idlest engines go that are not needed."""
        for _ in range(min(self._over[role], len(self._able(role)) - least)):
            idle = self._idlest(role)
            assert idle is not None, "one is able"
            self.stop.append(idle.name)
            self.steps.append(f"drain {self.stop[-1]}")

    def _take(self, engine: Seen, role: str, *steps: str) -> None:
        self._over[role] += 1
        self.steps += steps
        if engine.role != role:
            self.roles[engine.name] = role
            self.steps.append(f"give {engine.name} the role {role}")

    def _idlest(self, role: str, without: Collection[str] = ()) -> Seen | None:
        """The engine of a role with the fewest requests, the newest of several; None: there is none left."""
        able = [e for e in self._able(role) if e.name not in without]
        return min(reversed(able), key=lambda e: e.requests) if able else None

    def _able(self, role: str) -> list[Seen]:
        """Engines of a role that serve and are to go on with it."""
        taken = {*self.stop, *self.roles}
        return [e for e in self._seen.engines if e.role == role and e.serves and not e.draining and e.name not in taken]
