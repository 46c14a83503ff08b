"""Estimates what it is worth to load KV from another engine or from a tier below the caches, by the times that recent
loads and prompts took.

Pure functions of measurements. A way that has not been measured yet is tried, which measures it.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from pdkv.base.cost_line import DECAY, Line
from pdkv.router.engines.outliers import typical
from pdkv.wire.reports import LoadReport

FADING = 0.98
"""Decay, per computed prompt, of the average time lost to failed loans, so that they are tried again some day."""

MAX_TIER_NAMES = 256
"""Tiers whose reads are measured."""

LOAD_PATIENCE = 2.0
"""How many times as long as computing a load may take; beyond that, the KV is computed."""

MIN_LOAD_TIMEOUT_S = 1.0
"""Shortest deadline of a load: a shorter one would say more about a busy machine than about the load."""


LOADED_SHARE = 0.9
"""The value of a loaded token in computed ones, while the time of loading or of computing is not known.

Loading 4,096 tokens of a model of 197 M parameters takes 15 to 35 ms and computing them 4.1 s (README, "Connectors");
for a small model or a distant peer, loading is a larger part. So an engine that has the prompt itself comes first among
equally loaded ones, but requests never wait for it.
"""


def saved_tokens(num_tokens: int, load_s: float | None, token_s: float | None) -> int:
    """Tokens that loading saves from being computed, less those that could be computed in the meantime.

    Args:
        load_s: seconds of the load; None: not known.
        token_s: seconds in which the engine computes a token.
    """
    if load_s is None or not token_s:
        return int(num_tokens * LOADED_SHARE)
    return int(max(num_tokens - load_s / token_s, 0.0))


class Costs(NamedTuple):
    """Seconds that loading and computing the same KV take; None: not known."""

    load_s: float | None  # asking the lender, reading the KV, and the recent cost of failed loans
    compute_s: float | None

    @property
    def prefers_load(self) -> bool:
        """Whether to load the KV; also True if either time is unknown, since that measures it."""
        return self.load_s is None or self.compute_s is None or self.load_s < self.compute_s

    @property
    def load_timeout_s(self) -> float:
        """Seconds after which a load should give way to computing; 0: no limit of its own."""
        return 0.0 if self.compute_s is None else max(LOAD_PATIENCE * self.compute_s, MIN_LOAD_TIMEOUT_S)


PACE_DECAY = 0.97
"""Weight of a prompt's time relative to the next one where engines are compared: about the last thirty count."""

TOKEN_DECAY = 0.999
"""Weight of a token's time relative to the next one: about the last thousand count."""

LATELY_S = 5.0
"""Seconds for which an engine counts as slower or faster than its peers after it was last measured. Given nothing while
others have less to do, it would never be measured again, nor have anything to do after it has recovered.
"""

CONTEXT_STEPS = 64
"""Steps of an aggregated engine for which a choice counts what each token of KV there costs them."""

MAX_PAIRS = 1 << 14
"""Pairs of engines whose loads are measured each by itself: those that loaded last."""


class Speeds:
    """Recent times of loads between engines, reads of tiers, lenders' answers, and each engine's prefills."""

    def __init__(self) -> None:
        self._loads = Line()  # bytes
        self._pairs: dict[tuple[str, str], Line] = {}  # bytes, by source and reader, the latest last
        self._answers = Line()  # questions, 1 each
        self._prefills: dict[str, Line] = {}  # tokens, by engine
        self._works: dict[str, tuple[Line, float]] = {}  # tokens to the end of a prompt, by engine, and until when
        self._steps: dict[str, Line] = {}  # requests that decode together, by engine
        self._gaps: dict[str, Line] = {}  # requests that decode together, by engine; of the latest tokens
        self._contexts: dict[str, Line] = {}  # tokens of their KV
        self._tiers: dict[str, Line] = {}  # bytes, by name as in LoadReport.connectors
        self._reads: dict[str, dict[str, tuple[int, float]]] = {}  # by engine and tier: the part already counted
        self._lost_s = 0.0  # per loan, on average

    def loaded(self, num_bytes: int, seconds: float, pair: tuple[str, str] = ("", "")) -> None:
        """Record a successful load from a peer. `pair`: source and reader."""
        self._loads.add(num_bytes, seconds)
        line = self._pairs[pair] = self._pairs.pop(pair, Line())
        line.add(num_bytes, seconds)
        if len(self._pairs) > MAX_PAIRS:
            del self._pairs[next(iter(self._pairs))]

    def lent(self) -> None:
        """Record a successful loan."""
        self._lost_s *= DECAY

    def lost(self, seconds: float) -> None:
        """Record a loan that failed: the time it took, and the time to compute its KV after all."""
        self._lost_s += (1 - DECAY) * (seconds - self._lost_s)

    def reported(self, engine: str, report: LoadReport) -> None:
        """Record an engine's times of reads from its tiers since its start. Bytes are counted together with their
        seconds: a report may have one without the other.
        """
        counted = self._reads.setdefault(engine, {})
        for part, stats in report.connectors.items():
            bytes_before, seconds_before = counted.get(part, (0, 0.0))
            num_bytes, seconds = stats.read_bytes - bytes_before, stats.read_seconds - seconds_before
            if num_bytes > 0 and seconds > 0 and (part in self._tiers or len(self._tiers) < MAX_TIER_NAMES):
                self._tiers.setdefault(part, Line()).add(num_bytes, seconds)
                counted[part] = stats.read_bytes, stats.read_seconds

    def byte_s(self, tier: str) -> float | None:
        """Seconds per byte that a rank reads from a tier, fixed costs included; None: not known."""
        line = self._tiers.get(tier)
        return None if line is None else line.mean

    def token_s(self, engine: str) -> float | None:
        """Seconds per prompt token that the engine computes; None: not known."""
        line = self._prefills.get(engine)
        return None if line is None else line.fit()[1]

    def answered(self, seconds: float) -> None:
        """Record how long a lender took to answer."""
        self._answers.add(1, seconds)

    def computed(self, engine: str, num_tokens: int, seconds: float) -> None:
        """Record how many tokens of one prompt, among others, the engine computed."""
        self._prefills.setdefault(engine, Line()).add(num_tokens, seconds)
        self._lost_s *= FADING

    def worked(self, engine: str, num_tokens: int, seconds: float, now: float) -> None:
        """Record how long the engine took to the end of a prompt, with so many tokens to compute until then."""
        line, until = self._works.get(engine) or (Line(PACE_DECAY), now)
        if now > until:
            line = Line(PACE_DECAY)
        line.add(num_tokens, seconds)
        self._works[engine] = line, now + LATELY_S

    def paces(self, engines: Collection[str], now: float) -> Mapping[str, float]:
        """How many times as long as usual each of these takes for as many tokens of prompts as are usual; those that
        were not measured lately are left out.
        """
        known = {e: self._works[e][0] for e in engines if e in self._works and now < self._works[e][1]}
        amount = typical([line.amount for line in known.values()])
        seconds = {engine: line.at(amount) for engine, line in known.items()}
        usual = typical(list(seconds.values()))
        return {engine: each / usual for engine, each in seconds.items()} if usual else {}

    def usual_work_s(self, num_tokens: int) -> float:
        """Seconds to the end of a prompt behind so many tokens, at the typical engine; 0: not known."""
        return typical([line.at(num_tokens) for line, _ in self._works.values()])

    def work_at(self, engine: str) -> tuple[float, float]:
        """(tokens, seconds) to the end of a prompt, as lately measured; zeros: not known."""
        return _usual_of(self._works.get(engine, (None, 0.0))[0])

    def step_at(self, engine: str) -> tuple[float, float]:
        """(requests, seconds between two tokens of each), as lately measured; zeros: not known."""
        return _usual_of(self._gaps.get(engine))

    def work_token_s(self, engine: str) -> float:
        """Seconds by which each prompt token that waits there delays those behind it; 0: not known."""
        line, _ = self._works.get(engine) or (Line(), 0.0)
        return line.fit()[1]

    def stepped(self, engine: str, num_requests: int, seconds: float, num_tokens: int) -> None:
        """Record the time between each two of the latest tokens of one of so many requests."""
        self._gaps.setdefault(engine, Line(TOKEN_DECAY)).add(num_requests, seconds, num_tokens)

    def decoded(self, engine: str, num_requests: int, seconds: float, kv_tokens: int = 0) -> None:
        """Record the average time between two tokens of a request that has ended, among so many. `kv_tokens`: KV of
        all of them, if nothing but their steps took time; 0: not known.
        """
        self._steps.setdefault(engine, Line()).add(num_requests, seconds)
        self._contexts.setdefault(engine, Line(PACE_DECAY)).add(kv_tokens, seconds)

    def context_weight(self, engine: str) -> float | None:
        """What a token of KV costs CONTEXT_STEPS, in prompt tokens to compute; None: not known."""
        line, token_s = self._contexts.get(engine), self.token_s(engine)
        at_rest, kv_token_s = (0.0, 0.0) if line is None else line.fit()
        if not token_s or not at_rest:  # without what a step takes by itself, the slope says nothing
            return None
        return min(CONTEXT_STEPS * kv_token_s / token_s, 1.0)

    def step_line(self, engine: str) -> tuple[float, float]:
        """(fixed seconds, seconds per request) of the time between two tokens; 0: not known."""
        line = self._steps.get(engine)
        return (0.0, 0.0) if line is None else line.fit()

    def step_s(self, engine: str, num_requests: int) -> float | None:
        """Seconds between two tokens of each of so many requests; None: not known."""
        line = self._steps.get(engine)
        if line is None or not line.known:
            return None
        at_rest, per_request = line.fit()
        return at_rest + per_request * num_requests

    def forget(self, engine: str) -> None:
        """Forget an engine that is gone; its next incarnation may run elsewhere and starts from zero."""
        for measured in (self._prefills, self._works, self._steps, self._gaps, self._contexts, self._reads):
            measured.pop(engine, None)
        self._pairs = {pair: line for pair, line in self._pairs.items() if engine not in pair}

    @property
    def knows_loads(self) -> bool:
        """Whether any load between engines was measured."""
        return self._loads.known

    def load_s(self, num_bytes: int, pair: tuple[str, str] = ("", "")) -> float:
        """Seconds of a load between engines, of these two if it was measured; 0: not known."""
        return self._pairs.get(pair, self._loads).at(num_bytes)

    def costs(self, engine: str, num_tokens: int, num_bytes: int) -> Costs:
        """Costs of loading and of computing this many tokens that `engine` lacks, given that it computes later tokens
        anyway.
        """
        token_s = self.token_s(engine)
        load_s = None
        if self._loads.known or self._lost_s:
            load_s = self._answers.fit()[1] + self.load_s(num_bytes) + self._lost_s
        return Costs(load_s, None if token_s is None else token_s * num_tokens)


def _usual_of(line: Line | None) -> tuple[float, float]:
    """The average amount of a line, and the seconds for it."""
    return (0.0, 0.0) if line is None else (line.amount, line.at(line.amount))
