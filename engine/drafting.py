"""Decides how many guesses of each request a step verifies: as many as bring the most tokens a second.

It knows how often each request's guesses were right, and how long steps of some number of rows took. Both come with
steps' outputs, so the plan alone says how many rows there are, and no rank decides by its own clock.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import inf
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pdkv.engine.plan import DraftResult
from pdkv.engine.request import Request
from pdkv.wire.reports import MAX_DRAFTS, DraftCounts

LEAST_GAIN: Final = 1.05
"""Tokens a second with guesses, as a multiple of those without, from which on they are verified."""

_FIRST_RATE, _WEIGHT, _COMMON_WEIGHT = 0.25, 0.2, 0.05
_PATIENCE = 24
"""Steps without a guess worth verifying after which guessing itself pauses."""

_HOPELESS = 0.05
"""The common rate below which costly guessing pauses at once."""

_PROMISING = 0.5
"""The rate from which on guesses that cost little are made and compared although none is worth verifying yet."""

_TRIES, _OFTEN, _SELDOM = 2, 16, 64
"""A pause ends for 2 of 16 steps, the same for all requests; for 2 of 64 where guessing costs much, or of more."""

_TRIES_COST = 0.01
"""Share of an engine's time that the tries of a pause may take."""

_IN_VAIN, _LATELY = 0.02, 1 / 512
"""Time that guesses of which none was verified may take lately, as a share of the steps': guessing pauses beyond it."""

_MUCH = 0.1
"""Time of guessing that is much, as a share of a step's."""

_DISTURBED = 4
"""Guessing that took so many times as long as lately was disturbed, and counts as only that much."""

_PLAIN, _PLAIN_AT = 256, (0, 8)
"""Steps at these places of so many verify no guess, so that the time of a plain step stays known."""

_TIME_WEIGHT = 0.1
_FADE, _FEW, _FADE_OF_FEW = 0.1, 3, 0.3
"""Share of the extra time of larger steps that is forgotten at a time; more of a few tries, which may be disturbed."""

_LARGER = 1.2
"""A step of so many times the usual rows is a try."""

_TRIED, _TRIED_MORE = 2, 16
"""A step has at most so many times the rows of the largest seen, and so many more."""

_SIMILAR = 0.1
"""Steps whose sizes differ by this factor, less 1, take similar times."""

_CURVE_AGE = 8
"""Steps after which the curve is made anew."""


class Drafting:
    """The guesses of one engine. Not thread-safe."""

    def __init__(self, num_tokens: int, *, adapts: bool, is_costly: bool) -> None:
        """Args:
        num_tokens: the most guesses of a request.
        adapts: False: all of them are verified.
        is_costly: whether guessing takes much of a step's time, or makes it wait.
        """
        self.num_tokens = num_tokens
        self._adapts = adapts
        self._is_costly = is_costly
        self._num_idle = 0  # decode steps since one had guesses
        self._num_chosen = 0  # steps with guesses, which may have been left unverified
        self._rate = _FIRST_RATE  # of new requests: as of all others lately
        self._times = StepCosts()
        self._guessing = 0.0  # its time lately, as a share of the step's own
        self._by_depth = StepCosts()  # the same by the most guesses of a request
        self._depth = num_tokens  # the most guesses of a request that are worth their time
        self._found = 1.0  # share of the guesses asked for that there were lately
        self._verifies = False  # whether the step that ends verified guesses
        self._in_vain = 0.0  # as _guessing, but of steps that verified none, over all steps

    @property
    def _costs_much(self) -> bool:
        return self._is_costly or self._guessing > _MUCH

    def _cost(self, most: npt.NDArray[Any]) -> Any:
        """Time of guessing up to so many tokens of each request, ascending, as a share of the step's own."""
        return self._by_depth.of(most) if self._is_costly and self._guessing else self._guessing

    def num_to_guess(self, step_id: int) -> int:
        """The most tokens to guess for each request after that step's draws."""
        if not self._adapts:
            return self.num_tokens
        is_active = self._num_idle < _PATIENCE and self._in_vain < _IN_VAIN
        if not is_active and step_id % self._pause >= _TRIES:
            return 0
        return self._depth if self._is_costly else self.num_tokens

    @property
    def _pause(self) -> int:
        """Steps from one try to the next."""
        return max(_SELDOM if self._costs_much else _OFTEN, int(_TRIES * self._guessing / _TRIES_COST))

    def choose(self, requests: Sequence[Request], counts: Sequence[int], num_rows: int) -> list[int]:
        """How many of their guesses a step should verify that has `num_rows` without.

        Args:
            counts: how many there are of each request's; of one that is in flight, how many there may be.
        """
        if not self._adapts or not requests:
            return list(counts)
        rates = np.array([self._rate if request.draft_rate is None else request.draft_rate for request in requests])
        found = np.array([self._found if request.num_in_flight else 1.0 for request in requests])
        # Costly guesses may be few because few were asked for: more will be, if that pays.
        most = np.maximum(counts, self.num_tokens if self._is_costly else 0)
        depth = np.arange(1, most.max() + 1)
        likely = rates[:, None] ** depth * found[:, None]
        gains = np.where(depth <= most[:, None], likely, 0.0).ravel()
        is_plain, self._num_chosen = self._num_chosen % _PLAIN in _PLAIN_AT, self._num_chosen + 1
        if is_plain:
            return [0] * len(requests)
        self._depth = 1
        least_cost = 1.0 + np.min(self._cost(depth))
        if num_rows + gains.sum() < LEAST_GAIN * num_rows * least_cost:  # it would not pay if rows cost nothing
            return [0] * len(requests)
        best = np.argsort(-gains, kind="stable")  # those of one request in their order
        tokens = num_rows + np.concatenate([[0.0], np.cumsum(gains[best])])
        seconds = self._times.of(num_rows + np.arange(len(tokens)))
        seconds[1:] *= 1.0 + self._cost(np.maximum.accumulate(best % len(depth) + 1))
        speeds = tokens / seconds
        num_verified = int(speeds.argmax())
        if speeds[num_verified] < LEAST_GAIN * speeds[0]:
            return [0] * len(requests)
        wanted = np.bincount(best[:num_verified] // len(depth), minlength=len(requests))
        self._depth = int(wanted.max())
        chosen: list[int] = np.minimum(wanted, counts).tolist()
        return chosen

    def note_guesses(self, num_found: int, num_asked: int) -> None:
        """Note how many guesses a step made, of those asked for."""
        self._found += (num_found / num_asked - self._found) * _TIME_WEIGHT

    def learn(self, request: Request, result: DraftResult) -> None:
        """Note how a request's guesses did."""
        if result.num_verified:
            self._num_idle, self._verifies = 0, True
        if result.num_right or result.is_wrong:
            before = self._rate if request.draft_rate is None else request.draft_rate
            request.draft_rate = _moved(before, result, _WEIGHT)
            if request.draft_rate >= _PROMISING and not self._costs_much:
                self._num_idle = 0
            self._rate = _moved(self._rate, result, _COMMON_WEIGHT)

    def note_step(self, num_rows: int, seconds: float, guessing_s: float, num_guesses: int) -> None:
        """Note how long a step took.

        Args:
            num_rows: single tokens and their guesses, of a step that has nothing else; else 0.
            guessing_s: the part of the time that was guessing.
            num_guesses: the most that were to be made for a request.
        """
        is_hopeless = self._is_costly and not self._verifies and self._rate < _HOPELESS
        self._num_idle += _PATIENCE if is_hopeless else num_guesses > 0
        step_s = max(seconds - guessing_s, 1e-9)
        cost = min(guessing_s / step_s, _DISTURBED * self._guessing or inf)
        if num_rows:
            self._times.note(num_rows, step_s)
        if num_rows and num_guesses and cost:
            self._by_depth.note(num_guesses, cost)
            self._guessing += (cost - self._guessing) * (_TIME_WEIGHT if self._guessing else 1.0)
        self._in_vain += ((0.0 if self._verifies else cost) - self._in_vain) * _LATELY
        self._verifies = False


def _moved(rate: float, result: DraftResult, weight: float) -> float:
    """The rate after some right guesses and perhaps a wrong one."""
    rate = 1.0 - (1.0 - rate) * (1.0 - weight) ** result.num_right
    return rate * (1.0 - weight) if result.is_wrong else rate


class DraftTally:
    """Counts of an engine's guesses since its start."""

    def __init__(self) -> None:
        self.drafts = 0  # requests in steps with guesses
        self.tokens = 0
        self.accepted = 0
        self.accepted_at = [0] * MAX_DRAFTS  # by position behind the last token
        self.seconds = 0.0  # in which tokens were guessed
        self.drafter_tokens = 0, 0  # as in StepOutput

    def counts(self) -> DraftCounts:
        """The counts, for a report."""
        at = self.accepted_at
        most = next((i for i in range(MAX_DRAFTS, 0, -1) if at[i - 1]), 0)
        return DraftCounts(self.drafts, self.tokens, self.accepted, at[:most], self.seconds, *self.drafter_tokens)

    def add(self, num_verified: int, num_accepted: int) -> None:
        """Count one request's guesses in a step."""
        if num_verified:
            self.drafts += 1
            self.tokens += num_verified
            self.accepted += num_accepted
            for i in range(num_accepted):
                self.accepted_at[i] += 1


class StepCosts:
    """Seconds of a step by its number of rows, without its guessing; or what else grows with a size. Rows beyond the
    largest step so far are expected to cost what those below it did, and are tried little by little; a step smaller
    than all so far is hoped to take its share. What is larger than usual becomes cheaper until it is tried again.
    """

    def __init__(self) -> None:
        self._rows = list[int]()
        self._means = list[float]()
        self._counts = list[int]()
        self._curve: npt.NDArray[Any] | None = None
        self._age = 0  # steps since hope faded
        self._usual = 0.0  # rows lately
        self._num_tries = 0  # steps larger than usual
        self._hope = 1.0  # share of their extra time that is still expected

    def note(self, num_rows: int, seconds: float) -> None:
        """Record a step's time."""
        shift = max(num_rows.bit_length() - 4, 0)
        size = num_rows >> shift << shift
        at = bisect_left(self._rows, size)
        if at == len(self._rows) or self._rows[at] != size:
            self._rows.insert(at, size)
            self._means.insert(at, seconds)
            self._counts.insert(at, 0)
            self._curve = None
        self._counts[at] += 1
        mean = self._means[at]
        weight = max(1 / max(self._counts[at] - 1, 1), _TIME_WEIGHT)  # the first may have been slow, and does not stay
        self._means[at] += (min(seconds, 2 * mean) - mean) * weight
        self._age += 1
        if self._usual and num_rows > _LARGER * self._usual:
            self._num_tries += 1
            self._hope, self._curve = 1.0, None
        self._usual += (num_rows - self._usual) * (_TIME_WEIGHT if self._usual else 1.0)
        if self._age >= _CURVE_AGE:
            self._hope *= 1.0 - (_FADE_OF_FEW if self._num_tries < _FEW else _FADE)
            self._curve, self._age = None, 0

    def of(self, num_rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Expected seconds of steps with these numbers of rows, ascending; more rows take at least as long."""
        if not self._rows:
            return np.where(num_rows <= _TRIED * num_rows[0] + _TRIED_MORE, 1.0, np.inf)
        if self._curve is None:
            self._curve = self._smooth()
        last = self._rows[-1]
        expected: npt.NDArray[Any] = np.interp(num_rows, self._rows, self._curve)
        expected *= np.minimum(num_rows / self._rows[0], 1.0)
        # Steps hardly larger than usual are no tries: nothing would end the hope that they became cheap.
        common, below = np.interp((int(_LARGER * self._usual), last / _LARGER), self._rows, self._curve)
        expected += np.maximum(num_rows - last, 0) * (self._curve[-1] - below) / (last - last / _LARGER)
        expected -= np.maximum(expected - common, 0.0) * (1.0 - self._hope)
        expected[num_rows > _TRIED * max(last, num_rows[0]) + _TRIED_MORE] = np.inf
        return expected

    def _smooth(self) -> npt.NDArray[Any]:
        """The time at each size, as a line through those of similar sizes has it: single ones are too noisy."""
        size = np.log(self._rows)
        apart = size - size[:, None]
        means = np.array(self._means)
        weights = np.minimum(self._counts, 1 / _TIME_WEIGHT) * np.exp(-((apart / _SIMILAR) ** 2))
        total = weights.sum(axis=1)
        mean_apart, mean = (weights * apart).sum(axis=1) / total, weights @ means / total
        spread = (weights * (apart - mean_apart[:, None]) ** 2).sum(axis=1)
        common = (weights * (apart - mean_apart[:, None]) * (means - mean[:, None])).sum(axis=1)
        line = mean - mean_apart * common / np.maximum(spread, 1e-9)
        least: npt.NDArray[Any] = np.minimum.accumulate(np.maximum(line, 1e-9)[::-1])[::-1]
        return least
