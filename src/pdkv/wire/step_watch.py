"""The current work of an engine's loop, since when, and how long it should take, for its beats to the router.

The loop notes the begin and the end of each step; a thread reads the oldest that has not ended (`heartbeat.py`).
"""

from collections import deque
from typing import NamedTuple

from pdkv.base.clock import MONOTONIC, Clock

FIRST_STEP_S = 24.0
"""Seconds expected of a step while none is known: kernels are compiled, and memory is touched for the first time."""

OTHER_WORK_S = 1.0
"""Seconds expected of work outside of steps: messages, peers, snapshots of the cache."""

LATE_S, LATE_FACTOR = 0.5, 5.0
"""Work that exceeds both of these is late."""

_RISE, _FALL = 0.5, 0.05
_NUM_SIZES = 32


def late_after_s(predicted_s: float) -> float:
    """Seconds after its beginning at which work with this prediction is late: max(LATE_S, LATE_FACTOR *
    predicted_s).
    """
    return max(LATE_S, LATE_FACTOR * predicted_s)


class Work(NamedTuple):
    """A piece of work that has begun and not ended."""

    since: float  # by the engine's clock
    predicted_s: float


class StepTimes:
    """Predicts how long a step of a number of tokens takes, from earlier steps.

    Sizes are powers of two. Each has a mean that follows longer steps quickly (by half of the difference) and shorter
    ones slowly (by a twentieth), since later chunks of a prompt take longer, and a single quick step says little. A
    size never seen is expected to take as long per token as the next smaller one, but no longer than the next larger
    one.
    """

    def __init__(self) -> None:
        self._means_s = [0.0] * _NUM_SIZES  # 0: never seen

    def predict_s(self, num_tokens: int) -> float:
        """Seconds that such a step should take."""
        size = min(num_tokens.bit_length(), _NUM_SIZES - 1)
        return self._means_s[size] or self._guess_s(size)

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record how long such a step took."""
        size = min(num_tokens.bit_length(), _NUM_SIZES - 1)
        mean = self._means_s[size]
        if mean:
            mean += (seconds - mean) * (_RISE if seconds > mean else _FALL)
        self._means_s[size] = mean or max(seconds, 1e-6)

    def _guess_s(self, size: int) -> float:
        means = self._means_s
        larger = next((means[i] for i in range(size + 1, _NUM_SIZES) if means[i]), FIRST_STEP_S)
        smaller = next((i for i in range(size - 1, -1, -1) if means[i]), None)
        return larger if smaller is None else min(means[smaller] * 2.0 ** (size - smaller), larger)


class StepWatch:
    """Written by the engine's loop, read by its heartbeat. Steps may overlap, and end in the order they began in."""

    def __init__(self, clock: Clock = MONOTONIC) -> None:
        self.times = StepTimes()
        self.clock = clock
        self._turn: Work | None = None  # the loop is awake
        self._step: Work | None = None  # the oldest unfinished one
        self._steps: deque[tuple[Work, int]] = deque()  # with their tokens
        self._last_end = 0.0

    @property
    def oldest(self) -> Work | None:
        """The oldest unfinished work. None: the loop waits for something to do."""
        return self._step or self._turn

    @property
    def num_under_way(self) -> int:
        """Number of steps in progress."""
        return len(self._steps)

    @property
    def num_computing(self) -> int:
        """Number of those that compute tokens."""
        return sum(num_tokens > 0 for _, num_tokens in self._steps)

    def wake(self) -> None:
        """Note that the loop begins to work."""
        self._turn = Work(self.clock.now(), OTHER_WORK_S)

    def rest(self) -> None:
        """Note that the loop begins to wait. Steps in progress continue."""
        self._turn = None

    def begin(self, num_tokens: int, now: float) -> None:
        """Note that a step of this many tokens begins."""
        work = Work(now, self.times.predict_s(num_tokens))
        self._steps.append((work, num_tokens))
        if self._step is None:
            self._step = work

    def end(self, now: float) -> float:
        """Note that the oldest step has ended; from then on the next one has had the engine to itself.

        Harmless if none has begun.

        Returns:
            Seconds for which it has had the engine to itself.
        """
        if not self._steps:
            return 0.0
        work, num_tokens = self._steps.popleft()
        seconds = now - max(work.since, self._last_end)
        self.times.note(num_tokens, seconds)
        self._last_end = now
        self._turn = Work(now, OTHER_WORK_S) if self._turn is not None else None
        self._step = Work(now, self._steps[0][0].predicted_s) if self._steps else None
        return seconds
