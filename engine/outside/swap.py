"""Decides whether the KV of a preempted request is read back or computed again.

A preemption writes nothing: stores save confirmed KV after each step, and find it by key when the request is scheduled
again.
"""

from collections.abc import Callable

from pdkv.base.cost_line import Line
from pdkv.config import Preemption
from pdkv.wire.types import RequestKey

TRY_AGAIN_AFTER = 32
"""Number of recomputed requests after which the next one is read, to measure the current cost."""


class SwapRule:
    """The decision rule of one engine.

    Args:
        policy: "auto": the way that recently took less time; reading, if that has not been measured.
        step_s: seconds that a step of a number of tokens takes.
        step_tokens: the most tokens of one step.
    """

    def __init__(self, policy: Preemption, step_s: Callable[[int], float], step_tokens: int) -> None:
        self._policy = policy
        self._step_s = step_s
        self._step_tokens = step_tokens
        self._loads = Line()  # tokens
        self._computed: set[RequestKey] = set()  # since one was read
        self._tried: RequestKey | None = None  # to measure the current cost of reading

    @property
    def looks(self) -> bool:
        """Whether asking the stores can change the decision."""
        return self._policy != "recompute"

    def loaded(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a load from a store; failed loads count as well."""
        self._loads.add(num_tokens, seconds)

    def prefers_load(self, key: RequestKey, num_tokens: int) -> bool:
        """Whether to read this many stored tokens of the request. May be called again before the read is done."""
        if self._policy == "swap" or not self._loads.known:
            return self.looks
        if not self.looks:
            return False
        at_rest, per_token = self._loads.fit()
        reads = at_rest + per_token * num_tokens < self._compute_s(num_tokens)
        if reads or key == self._tried:
            return True
        self._computed.add(key)
        if len(self._computed) <= TRY_AGAIN_AFTER:
            return False
        self._tried = key
        self._computed.clear()
        return True

    def _compute_s(self, num_tokens: int) -> float:
        whole, rest = divmod(num_tokens, self._step_tokens)
        return whole * self._step_s(self._step_tokens) + (self._step_s(rest) if rest else 0.0)
