"""Estimates a cost as a linear function of an amount, from recent measurements."""

DECAY = 0.9
"""Weight of a measurement relative to the next one: about the last ten count."""


class Line:
    """Seconds as a line over an amount, such as tokens or bytes: decayed least squares.

    With w_i = DECAY^(age), slope = (Σw Σwxy - Σwx Σwy) / (Σw Σwx² - (Σwx)²), intercept = (Σwy - slope Σwx) / Σw. If
    amounts hardly differ, or the fit has a negative coefficient, the line goes through the origin and the means.
    """

    __slots__ = ("_decay", "_n", "_x", "_xx", "_xy", "_y")

    def __init__(self, decay: float = DECAY) -> None:
        self._decay = decay
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, amount: float, seconds: float, count: int = 1) -> None:
        """Add a measurement; one with amount 0 is ignored. `count`: equal ones."""
        if amount <= 0 or seconds <= 0:
            return
        decay = self._decay**count
        self._n = self._n * decay + count
        self._x = self._x * decay + amount * count
        self._y = self._y * decay + seconds * count
        self._xx = self._xx * decay + amount * amount * count
        self._xy = self._xy * decay + amount * seconds * count

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._n > 0

    @property
    def mean(self) -> float:
        """Seconds per unit of the amount, fixed costs included; 0 without measurements."""
        return self._y / self._x if self.known else 0.0

    @property
    def amount(self) -> float:
        """The average amount; 0 without measurements."""
        return self._x / self._n if self.known else 0.0

    def at(self, amount: float) -> float:
        """Seconds for this amount; 0 without measurements."""
        at_rest, per_unit = self.fit()
        return at_rest + per_unit * amount

    def fit(self) -> tuple[float, float]:
        """(fixed seconds, seconds per unit of the amount); (0, 0) without measurements."""
        if not self.known:
            return 0.0, 0.0
        spread = self._n * self._xx - self._x * self._x
        if spread > 0.01 * self._x * self._x:
            slope = (self._n * self._xy - self._x * self._y) / spread
            intercept = (self._y - slope * self._x) / self._n
            if slope >= 0 and intercept >= 0:
                return intercept, slope
        return 0.0, self.mean
