"""Divides engines into prefill and decode for a load: which division keeps the SLO at the highest rate."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TextIO

from pdkv.bench.report import Slo
from pdkv.bench.sweep import is_burst
from pdkv.simulate.deployment import Topology
from pdkv.simulate.engine import EngineOptions
from pdkv.simulate.load import Load, simulate

MAX_DOUBLINGS, MAX_HALVINGS, REFINEMENTS = 12, 5, 4
"""Steps from the rate asked for up or, where it is too much, down, and bisections behind them."""

ENOUGH = 1.05
"""Divisions whose rates differ by less than this factor are equal; of equals, the simpler one is recommended."""

ALL = 8
"""Engines up to which every division is tried."""


class Question(NamedTuple):
    """What is to be served with what."""

    load: Load
    num_engines: int
    engine: EngineOptions
    slo_ttft_s: float
    slo_tpot_s: float
    attainment: float = 0.9

    @property
    def slo(self) -> Slo:
        """The objectives as `pd bench` counts them."""
        return Slo({"ttft": 1e3 * self.slo_ttft_s, "tpot": 1e3 * self.slo_tpot_s})


class Division(NamedTuple):
    """Engines by role."""

    prefill: int  # 0: all do both
    decode: int
    conditional: bool = False  # decode engines compute prompts that they lack little of

    @property
    def name(self) -> str:
        """The division in the usual form, such as 4P4D."""
        if not self.prefill:
            return f"{self.decode} aggregated"
        return f"{self.prefill}P{self.decode}D{' conditional' if self.conditional else ''}"

    def topology(self, engine: EngineOptions) -> Topology:
        """The deployment."""
        made = Topology(engine, self.prefill, self.decode)
        return made._replace(orders=["decode_first"]) if self.conditional else made


class Outcome(NamedTuple):
    """What a division came to."""

    division: Division
    rate: (
        float  # highest known at which it keeps the SLO, exact for the best two and aggregated; 0: none of those tried
    )
    report: dict[str, Any]  # at the question's rate
    more: bool = False  # it may keep it at higher rates, for which the load is too short

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        keys = ("slo_attainment", "p99_ttft_ms", "p99_tpot_ms", "median_ttft_ms", "median_tpot_ms")
        return {"name": self.division.name, **self.division._asdict(), "rate": self.rate} | {
            key: self.report.get(key) for key in keys
        }


class Plan(NamedTuple):
    """The answer."""

    outcomes: Sequence[Outcome]  # the best first
    best: Outcome
    runner_up: Outcome | None
    why: str

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "recommended": self.best.describe(),
            "runner_up": self.runner_up and self.runner_up.describe(),
            "why": self.why,
            "divisions": [outcome.describe() for outcome in self.outcomes],
        }


def divisions(num_engines: int) -> Iterator[Division]:
    """The divisions to try: aggregated, and each xPyD or, of many engines, one per eighth of them."""
    yield Division(0, num_engines)
    counts = {max(1, min(num_engines - 1, round(num_engines * i / ALL))) for i in range(1, ALL)}
    for prefill in sorted(counts if num_engines > ALL else range(1, num_engines)):
        yield Division(prefill, num_engines - prefill)
        yield Division(prefill, num_engines - prefill, conditional=True)


class Trials:
    """Runs of a question's divisions at rates, each made once."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._reports: dict[tuple[Division, float], dict[str, Any]] = {}

    def report(self, division: Division, rate: float) -> dict[str, Any]:
        """What `pd bench` would report."""
        asked = self._question
        if (division, rate) not in self._reports:
            _, report = simulate(division.topology(asked.engine), asked.load.at_rate(rate), [99], asked.slo)
            self._reports[division, rate] = report | {"request_rate": rate}
        return self._reports[division, rate]

    def keeps(self, division: Division, rate: float) -> bool:
        """Whether enough requests are within the SLO."""
        return float(self.report(division, rate)["slo_attainment"]) >= self._question.attainment

    def highest(self, division: Division, begin: float) -> float:
        """The highest rate at which it keeps the SLO: twice or half `begin`, and so on, then between; 0: none of them.

        It is not looked for beyond rates at which the load is over before it has set in (`falls_short`).
        """
        low, high = begin, begin
        if self.keeps(division, begin):
            for _ in range(MAX_DOUBLINGS):
                if self.falls_short(division, high):
                    return high
                low, high = high, 2 * high
                if not self.keeps(division, high):
                    break
        else:
            for _ in range(MAX_HALVINGS):
                low, high = low / 2, low
                if self.keeps(division, low):
                    break
            else:
                return 0.0
        for _ in range(REFINEMENTS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.keeps(division, middle) else (low, middle)
        return low

    def falls_short(self, division: Division, rate: float) -> bool:
        """Whether the load has too few requests for this rate."""
        return is_burst(self.report(division, rate))


def plan(question: Question) -> Plan:
    """Find the highest rate of the first division, then of each that keeps the SLO at the highest one so far; of the
    others only the next best is looked at again.
    """
    trials, asked = Trials(question), question.load.rate
    tried = list(divisions(question.num_engines))
    rates = {tried[0]: trials.highest(tried[0], asked)}
    for division in tried[1:]:
        most = max(rates.values()) or asked
        if trials.keeps(division, most):
            rates[division] = trials.highest(division, most)
    others = [division for division in tried if division not in rates]
    if others:
        most = max(rates.values()) or asked
        second = max(others, key=lambda division: float(trials.report(division, most)["slo_attainment"]))
        rates[second] = trials.highest(second, asked)
    found = []
    for division in tried:
        rate = rates.get(division, asked if trials.keeps(division, asked) else 0.0)
        more = rate > 0 and trials.falls_short(division, rate)
        found.append(Outcome(division, rate, trials.report(division, asked), more))
    return _conclude(question, sorted(found, key=lambda o: (-o.rate, -float(o.report["slo_attainment"]))))


def _conclude(question: Question, outcomes: Sequence[Outcome]) -> Plan:
    """Recommend the simplest of the divisions that are as good as the best."""
    equals = [outcome for outcome in outcomes if outcome.rate * ENOUGH >= outcomes[0].rate]
    best = min(equals, key=lambda o: (o.division.prefill > 0, o.division.conditional))
    others = [outcome for outcome in outcomes if outcome is not best]
    runner_up = others[0] if others else None
    ordered = [best, *others]
    return Plan(ordered, best, runner_up, _why(question, best, ordered))


def _why(question: Question, best: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Three sentences: what it reaches, what holds the other kind back, and how sure that is."""
    rate = question.load.rate
    together = next(o for o in outcomes if not o.division.prefill)
    apart = next((o for o in outcomes if o.division.prefill), None)
    margin = best.rate / rate - 1
    said = f"{margin:.0%} more than asked for" if margin >= 0 else f"{-margin:.0%} less than asked for"
    sentences = [
        f"{best.division.name} keeps the SLO for {question.attainment:.0%} of the requests up to {best.rate:.3g} "
        f"requests/s, {said}{'; the load is too short to show more' if best.more else ''}."
    ]
    if apart is None:
        return f"{sentences[0]} One engine cannot be divided."
    other = apart if best is together else together
    sentences.append(
        f"{other.division.name} {_reaches(other)}: at {rate:.3g} requests/s {_limit(question, other)}, against "
        f"{best.report.get('p99_ttft_ms', 0):.0f} ms and {best.report.get('p99_tpot_ms', 0):.1f} ms here."
    )
    if best is together:
        sentences.append(
            "Disaggregation does not pay here: what it takes from decoding to keep prompts out of its way is worth "
            "more than the way."
            if other.rate < best.rate
            else "Disaggregation does not pay here: it is no better, and each prompt's KV has to be moved."
        )
    else:
        sentences.append(
            f"Disaggregation pays: prompts of {_mean_prompt(question):.0f} tokens hold no decode up, and "
            f"{best.division.prefill} of {question.num_engines} engines are enough for them."
        )
    return " ".join(sentences)


def _reaches(outcome: Outcome) -> str:
    return f"keeps it up to {outcome.rate:.3g}" if outcome.rate else "keeps it at no rate that was tried"


def _limit(question: Question, outcome: Outcome) -> str:
    """The figures of the SLO, with what exceeds it."""
    ttft, tpot = outcome.report.get("p99_ttft_ms", 0.0), outcome.report.get("p99_tpot_ms", 0.0)
    return f"its P99 of TTFT is {ttft:.0f} ms and of TPOT {tpot:.1f} ms"


def _mean_prompt(question: Question) -> float:
    turns = [len(session.turns[0].prompt) for session in question.load.sessions]
    return sum(turns) / len(turns)


def print_plan(question: Question, answer: Plan, out: TextIO) -> None:
    """A line per division, then the recommendation."""
    print(f"{'division':<18} {'max req/s':>9} {'within SLO':>10} {'p99 TTFT':>10} {'p99 TPOT':>10}", file=out)
    for outcome in answer.outcomes:
        report = outcome.report
        print(
            f"{outcome.division.name:<18} {outcome.rate:>9.3g} {report['slo_attainment']:>10.1%} "
            f"{report.get('p99_ttft_ms', 0):>8.0f}ms {report.get('p99_tpot_ms', 0):>8.1f}ms",
            file=out,
        )
    print(f"\nrecommended: {answer.best.division.name}", file=out)
    if answer.runner_up is not None:
        print(f"runner-up: {answer.runner_up.division.name}, {answer.runner_up.rate:.3g} requests/s", file=out)
    print(answer.why, file=out)
