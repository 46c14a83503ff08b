"""What matching may take of all answers of an engine together: each of its steps waits for every one of them."""

import time
from collections.abc import Callable

SPARE_S = 1.0
_S_PER_STEP = 0.02
"""A few answers whose grammars are as slow as any that is compiled (5 ms a token) may go on for ever."""

_S_PER_TOKEN = 0.00025
"""A mask takes a tenth of it."""

_LEAST_S = 0.005
"""Nobody goes who owes less: most of it is owed by grammars that are gone."""

_SUSPICIOUS_S = 0.25
_CALM_STEPS = 256


class MatchTime:
    """A second to spare, to which each step adds some milliseconds. What answers take is subtracted, except for a
    quarter of a millisecond per token, which they may take in any case.

    A grammar's work may grow with the answer, as that of `root ::= root root | "a"` does. When nothing is left, the
    grammars that owe most of what is missing go, each with all its answers. So the others lose no more than the spare
    second and what steps add, no matter how many answers share a grammar, and how many grammars there are.

    Time is taken by `time.perf_counter`, because the system call of `time.thread_time` may take longer than a mask. If
    much is gone by that clock, that is only a suspicion: the process may have stood still. From then on `thread_time`
    counts, for each grammar, until nothing has been taken of the spare second for a while.
    """

    def __init__(self, *, is_exact: bool = False) -> None:
        """`is_exact`: without a suspicion."""
        self.total_s = 0.0
        self.clock: Callable[[], float] = time.thread_time if is_exact else time.perf_counter
        self._step_s = 0.0
        self._left_s = SPARE_S
        # By grammar, since there is a suspicion: what it took in this step, and its part of what is missing.
        self._taken_s: dict[int, float] = {}
        self._owed_s: dict[int, float] = {}
        self._num_calm = 0  # steps since something was taken of the spare second

    @property
    def is_exact(self) -> bool:
        """Whether each grammar's time is taken by itself."""
        return self.clock is time.thread_time

    def spend(self, grammar: int | None, seconds: float, num_tokens: int = 0) -> None:
        """An answer took so long. `grammar`: its number; None: those of several, which are filled together."""
        self.total_s += seconds
        seconds -= _S_PER_TOKEN * num_tokens
        self._step_s += seconds
        if grammar is not None and self.is_exact:
            self._taken_s[grammar] = self._taken_s.get(grammar, 0.0) + seconds

    def end_step(self) -> list[tuple[int, float]]:
        """The grammars that have to go, and what each of them owes, in seconds."""
        before_s, taken_s = self._left_s, max(self._step_s, 0.0)
        self._left_s = min(before_s + _S_PER_STEP - taken_s, SPARE_S)
        self._step_s = 0.0
        if not self.is_exact:
            if self._left_s < SPARE_S - _SUSPICIOUS_S:
                self._begin_again(time.thread_time)
            return []
        self._share(before_s - self._left_s, taken_s)
        self._num_calm = self._num_calm + 1 if self._left_s == SPARE_S else 0
        if self._num_calm == _CALM_STEPS:
            self._begin_again(time.perf_counter)
        return self._choose()

    def forget(self, grammar: int) -> None:
        """No answer has it any more."""
        self._taken_s.pop(grammar, None)
        self._owed_s.pop(grammar, None)

    def _share(self, lost_s: float, step_s: float) -> None:
        """Who took most of a step of `step_s` owes most of what it lost; what it gained is taken off what everybody
        owes.
        """
        if lost_s < 0:
            missing_s = SPARE_S - self._left_s
            rest = missing_s / (missing_s - lost_s)
            self._owed_s = {grammar: owed_s * rest for grammar, owed_s in self._owed_s.items()}
        elif lost_s > 0:
            taken_s = {grammar: seconds for grammar, seconds in self._taken_s.items() if seconds > 0}
            all_s = max(sum(taken_s.values()), step_s)  # one that took some of it may be gone
            for grammar, seconds in taken_s.items():
                self._owed_s[grammar] = self._owed_s.get(grammar, 0.0) + lost_s * seconds / all_s
        self._taken_s.clear()

    def _choose(self) -> list[tuple[int, float]]:
        chosen = list[tuple[int, float]]()
        while self._left_s < 0 and self._owed_s:
            grammar = max(self._owed_s, key=self._owed_s.__getitem__)
            if self._owed_s[grammar] < _LEAST_S:
                break
            chosen.append((grammar, self._owed_s.pop(grammar)))
            self._left_s += chosen[-1][1]
        self._left_s = min(max(self._left_s, 0.0), SPARE_S)
        return chosen

    def _begin_again(self, clock: Callable[[], float]) -> None:
        self.clock, self._left_s, self._num_calm = clock, SPARE_S, 0
        self._taken_s.clear()
        self._owed_s.clear()
