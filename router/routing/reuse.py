"""Whether KV that another engine has is better read from there than computed again: by what both took lately.

Pure functions of measurements. What has not been measured yet is tried: after that, it has been.
"""

from typing import NamedTuple

DECAY = 0.9
"""Weight of a measurement when the next one comes: the last ten or so count."""

FADING = 0.98
"""Of what loans lost lately, so much stays with each prompt that is computed: what failed is tried again some day."""

LOAD_PATIENCE = 2.0
"""A load may take so many times as long as computing what it brings; then that is computed."""

MIN_LOAD_TIMEOUT_S = 1.0
"""Below this a deadline would say more about how busy the machine is than about the load."""


class Line:
    """Seconds as a line over an amount, such as tokens or bytes: decayed least squares.

    With w_i = DECAY^(age), slope = (Σw Σwxy - Σwx Σwy) / (Σw Σwx² - (Σwx)²), intercept = (Σwy - slope Σwx) / Σw. Where
    amounts hardly differ, or the fit has a negative part, the line goes through the origin and the means.
    """

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """One measurement; one of nothing is none."""
        if amount <= 0 or seconds <= 0:
            return
        self._n = self._n * DECAY + 1
        self._x = self._x * DECAY + amount
        self._y = self._y * DECAY + seconds
        self._xx = self._xx * DECAY + amount * amount
        self._xy = self._xy * DECAY + amount * seconds

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._n > 0

    def fit(self) -> tuple[float, float]:
        """(seconds of nothing, seconds per unit of the amount); of no measurement (0, 0)."""
        if not self.known:
            return 0.0, 0.0
        spread = self._n * self._xx - self._x * self._x
        if spread > 0.01 * self._x * self._x:
            slope = (self._n * self._xy - self._x * self._y) / spread
            intercept = (self._y - slope * self._x) / self._n
            if slope >= 0 and intercept >= 0:
                return intercept, slope
        return 0.0, self._y / self._x


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
