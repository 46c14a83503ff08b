"""Whether KV that another engine has is better read from there than computed again: by what both took lately.

Pure functions of measurements. What has not been measured yet is tried: after that, it has been.
"""

from typing import NamedTuple

from pdkv.cost_line import DECAY, Line

FADING = 0.98
"""Of what loans lost lately, so much stays with each prompt that is computed: what failed is tried again some day."""

LOAD_PATIENCE = 2.0
"""A load may take so many times as long as computing what it brings; then that is computed."""

MIN_LOAD_TIMEOUT_S = 1.0
"""Below this a deadline would say more about how busy the machine is than about the load."""


class Costs(NamedTuple):
    """Seconds of the two ways to the same KV; None: not known."""

    load_s: float | None  # asking the lender, reading it, and what loans that failed lost lately
    compute_s: float | None

    @property
    def prefers_load(self) -> bool:
        """Whether the KV is read; where either is unknown, too: then it will be known."""
        return self.load_s is None or self.compute_s is None or self.load_s < self.compute_s

    @property
    def load_timeout_s(self) -> float:
        """How long the load may take before computing is the better way; 0: as long as any load."""
        return 0.0 if self.compute_s is None else max(LOAD_PATIENCE * self.compute_s, MIN_LOAD_TIMEOUT_S)


class Speeds:
    """What loads between engines, answers of lenders, and each engine's prefills took."""

    def __init__(self) -> None:
        self._loads = Line()  # bytes
        self._answers = Line()  # questions: 1 each
        self._prefills: dict[str, Line] = {}  # tokens, by engine
        self._lost_s = 0.0  # by a loan, on average

    def loaded(self, num_bytes: int, seconds: float) -> None:
        """A load from a peer went well."""
        self._loads.add(num_bytes, seconds)

    def lent(self) -> None:
        """A loan was read."""
        self._lost_s *= DECAY

    def lost(self, seconds: float) -> None:
        """A loan came to nothing: what it took, and what computing it after all does."""
        self._lost_s += (1 - DECAY) * (seconds - self._lost_s)

    def answered(self, seconds: float) -> None:
        """A lender took so long to answer."""
        self._answers.add(1, seconds)

    def computed(self, engine: str, num_tokens: int, seconds: float) -> None:
        """The engine computed so many tokens of one prompt, among others."""
        self._prefills.setdefault(engine, Line()).add(num_tokens, seconds)
        self._lost_s *= FADING

    def forget(self, engine: str) -> None:
        """The engine is gone; its next incarnation may run elsewhere."""
        self._prefills.pop(engine, None)

    def costs(self, engine: str, num_tokens: int, num_bytes: int) -> Costs:
        """Of so many tokens that `engine` lacks and has to compute tokens behind anyhow."""
        prefill = self._prefills.get(engine, Line())
        at_rest, per_byte = self._loads.fit()
        load_s = None
        if self._loads.known or self._lost_s:
            load_s = self._answers.fit()[1] + at_rest + per_byte * num_bytes + self._lost_s
        return Costs(load_s, prefill.fit()[1] * num_tokens if prefill.known else None)
