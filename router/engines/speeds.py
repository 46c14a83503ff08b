"""What KV is worth that lies elsewhere, in another engine or in a tier below the caches: by the times that loads and
prompts took lately.

Pure functions of measurements. What has not been measured yet is tried: after that, it has been.
"""

from typing import NamedTuple

from pdkv.base.cost_line import DECAY, Line
from pdkv.wire.reports import LoadReport

FADING = 0.98
"""Of what loans lost lately, so much stays with each prompt that is computed: what failed is tried again some day."""

MAX_TIER_NAMES = 256
"""Tiers whose reads are measured."""

LOAD_PATIENCE = 2.0
"""A load may take so many times as long as computing what it brings; then that is computed."""

MIN_LOAD_TIMEOUT_S = 1.0
"""Below this a deadline would say more about how busy the machine is than about the load."""


LOADED_SHARE = 0.9
"""Where it is not known what loading takes, or what computing does: a token that is loaded is worth so many computed
ones.

Loading 4,096 tokens of a model of 197 M parameters takes 15 to 35 ms and computing them 4.1 s (README, "Connectors");
of a small model, or from afar, it is a larger part. So an engine that has the prompt itself comes first among equally
loaded ones, and no other has to wait for it.
"""


def saved_tokens(num_tokens: int, load_s: float | None, token_s: float | None) -> int:
    """How many tokens need not be computed if so many are loaded, less those that could be computed meanwhile.

    Args:
        load_s: seconds of the load; None: not known.
        token_s: seconds in which the engine computes a token.
    """
    if load_s is None or not token_s:
        return int(num_tokens * LOADED_SHARE)
    return int(max(num_tokens - load_s / token_s, 0.0))


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
    """What loads between engines, reads of tiers, answers of lenders, and each engine's prefills took."""

    def __init__(self) -> None:
        self._loads = Line()  # bytes
        self._answers = Line()  # questions: 1 each
        self._prefills: dict[str, Line] = {}  # tokens, by engine
        self._tiers: dict[str, Line] = {}  # bytes, by name as in LoadReport.connectors
        self._reads: dict[str, dict[str, tuple[int, float]]] = {}  # by engine and tier: what was counted already
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

    def reported(self, engine: str, report: LoadReport) -> None:
        """An engine says what reads of its tiers took since its start. Bytes count with the seconds that they took: a
        report may have the one without the other.
        """
        counted = self._reads.setdefault(engine, {})
        for part, stats in report.connectors.items():
            bytes_before, seconds_before = counted.get(part, (0, 0.0))
            num_bytes, seconds = stats.read_bytes - bytes_before, stats.read_seconds - seconds_before
            if num_bytes > 0 and seconds > 0 and (part in self._tiers or len(self._tiers) < MAX_TIER_NAMES):
                self._tiers.setdefault(part, Line()).add(num_bytes, seconds)
                counted[part] = stats.read_bytes, stats.read_seconds

    def byte_s(self, tier: str) -> float | None:
        """Seconds in which a rank reads a byte of a tier, what every read takes included; None: not known."""
        line = self._tiers.get(tier)
        return None if line is None else line.mean

    def token_s(self, engine: str) -> float | None:
        """Seconds in which the engine computes a token of a prompt; None: not known."""
        line = self._prefills.get(engine)
        return None if line is None else line.fit()[1]

    def answered(self, seconds: float) -> None:
        """A lender took so long to answer."""
        self._answers.add(1, seconds)

    def computed(self, engine: str, num_tokens: int, seconds: float) -> None:
        """The engine computed so many tokens of one prompt, among others."""
        self._prefills.setdefault(engine, Line()).add(num_tokens, seconds)
        self._lost_s *= FADING

    def forget(self, engine: str) -> None:
        """The engine is gone; its next incarnation may run elsewhere, and counts anew."""
        self._prefills.pop(engine, None)
        self._reads.pop(engine, None)

    def load_s(self, num_bytes: int) -> float:
        """Seconds of a load between engines; 0: not known."""
        at_rest, per_byte = self._loads.fit()
        return at_rest + per_byte * num_bytes

    def costs(self, engine: str, num_tokens: int, num_bytes: int) -> Costs:
        """Of so many tokens that `engine` lacks and has to compute tokens behind anyhow."""
        token_s = self.token_s(engine)
        load_s = None
        if self._loads.known or self._lost_s:
            load_s = self._answers.fit()[1] + self.load_s(num_bytes) + self._lost_s
        return Costs(load_s, None if token_s is None else token_s * num_tokens)
