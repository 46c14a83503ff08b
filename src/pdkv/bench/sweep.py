"""Finds the highest rate at which a server keeps its SLO, and draws what it costs on the way."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from pdkv.bench.plot_file import PlotFile

MAX_DOUBLINGS = 12

BURST_SHARE = 0.6
"""Share of its rate that a run of enough requests reaches: the last answers take longer than the last gap."""

_BAR = 40
_WIDTH, _HEIGHT = 64, 12  # of a plot in the terminal, in characters

Report = Mapping[str, Any]


def find_rate(measure: Callable[[float], Report], *, begin: float, attainment: float, refinements: int) -> list[Report]:
    """Measure at rising rates until the SLO breaks, then between the last that kept it and the first that did not.

    Args:
        measure: a run at a rate; its report has `slo_attainment` and gets `request_rate`.
        attainment: the share of requests that has to be within the SLO.
        refinements: bisections behind the first break.

    Returns:
        The reports, in the order of their rates. `best_rate` reads the result.
    """
    reports: list[Report] = []

    def is_kept(rate: float) -> bool:
        reports.append({"request_rate": rate, **measure(rate)})
        return bool(reports[-1]["slo_attainment"] >= attainment)

    low, high, broke = 0.0, begin, False
    for _ in range(MAX_DOUBLINGS):
        broke = not is_kept(high)
        if broke or is_burst(reports[-1]):
            break
        low, high = high, 2 * high
    for _ in range(refinements if broke else 0):
        middle = (low + high) / 2
        if is_kept(middle):
            low = middle
        else:
            high = middle
    return sorted(reports, key=lambda report: float(report["request_rate"]))


def is_burst(report: Report) -> bool:
    """Whether a run had too few requests to last at its rate: faster ones would be the same burst."""
    return bool(report["request_throughput"] < BURST_SHARE * report["request_rate"])


def best_rate(reports: Sequence[Report], attainment: float) -> Report | None:
    """The run at the highest rate below which every one kept the SLO; None: the lowest broke it."""
    best = None
    for report in reports:
        if report["slo_attainment"] < attainment:
            break
        best = report
    return best


def print_sweep(reports: Sequence[Report], attainment: float, out: TextIO) -> None:
    """Print a row per rate, with a bar of the share within the SLO."""
    print(f"{'rate':>9} {'req/s':>9} {'tok/s':>10} {'p99 TTFT':>10} {'p99 TPOT':>10}  within the SLO", file=out)
    for report in reports:
        share = report["slo_attainment"]
        bar = "#" * round(_BAR * share)
        print(
            f"{report['request_rate']:>9.3g} {report['request_throughput']:>9.3g} "
            f"{report['output_throughput']:>10.1f} {_ms(report, 'ttft'):>10} {_ms(report, 'tpot'):>10}  "
            f"{bar:<{_BAR}} {share:.1%}",
            file=out,
        )
    rates = [float(report["request_rate"]) for report in reports]
    print("\nlatency in ms (P99: F first token, t each further one) over requests/s", file=out)
    found = [(at, mark, report.get(f"p99_{name}_ms")) for mark, name in (("F", "ttft"), ("t", "tpot"))
             for at, report in zip(rates, reports, strict=True)]  # fmt: skip
    draw([(at, float(value), mark) for at, mark, value in found if value is not None], out)
    print("\ntokens/s of the server over tokens/s for one user", file=out)
    fast = [r for r in reports if r.get("mean_tpot_ms")]
    draw([(1e3 / r["mean_tpot_ms"], float(r["output_throughput"]), "o") for r in fast], out)
    best = best_rate(reports, attainment)
    if best is reports[-1]:
        print("no rate that was tried breaks the SLO; send more prompts (--num-prompts) to try higher ones", file=out)
    if best is None:
        print(f"no rate that was tried keeps the SLO for {attainment:.0%} of the requests", file=out)
    else:
        print(
            f"highest rate that keeps the SLO for {attainment:.0%} of the requests: {best['request_rate']:.3g} "
            f"requests/s (goodput {best['goodput']:.3g})",
            file=out,
        )


def draw(points: Sequence[tuple[float, float, str]], out: TextIO) -> None:
    """Print points (x, y, mark), both axes logarithmic where all their values are above 0; later ones cover earlier."""
    if not points:
        return
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    rows = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for column, row, (_, _, mark) in zip(_places(xs, _WIDTH), _places(ys, _HEIGHT), points, strict=True):
        rows[_HEIGHT - 1 - row][column] = mark
    labels = {0: max(ys), _HEIGHT - 1: min(ys)}
    for number, cells in enumerate(rows):
        label = f"{labels[number]:.4g}" if number in labels else ""
        print(f"{label:>9} |{''.join(cells).rstrip()}", file=out)
    print(f"{'':>9} +{'-' * _WIDTH}\n{'':>11}{min(xs):<{_WIDTH - 9}.4g}{max(xs):>9.4g}", file=out)


def _places(values: Sequence[float], size: int) -> list[int]:
    scaled = [math.log(value) for value in values] if min(values) > 0 else list(values)
    low, high = min(scaled), max(scaled)
    return [round((value - low) / ((high - low) or 1.0) * (size - 1)) for value in scaled]


def _ms(report: Report, name: str) -> str:
    value = report.get(f"p99_{name}_ms")
    return "-" if value is None else f"{value:.1f} ms"


class Plot(PlotFile):
    """Latency over rate, and throughput over the speed that one user sees."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError as `PlotFile`."""
        super().__init__(path, 11, 4.5)

    def save(self, reports: Sequence[Report]) -> None:
        """Draw latency over rate, and throughput over the speed that one user sees. Raises ConfigError."""
        latency, pareto = self.figure.subplots(1, 2)
        rates = [report["request_rate"] for report in reports]
        for name in ("ttft", "tpot"):
            for prefix, style in (("median_", "o-"), ("p99_", "s--")):
                values = [report.get(f"{prefix}{name}_ms") for report in reports]
                if None not in values:
                    latency.plot(rates, values, style, label=f"{prefix.strip('_')} {name.upper()}")
        latency.set(xlabel="requests/s", ylabel="ms", yscale="log", title="latency over rate")
        latency.legend()
        users = [1e3 / report["mean_tpot_ms"] for report in reports if report.get("mean_tpot_ms")]
        whole = [report["output_throughput"] for report in reports if report.get("mean_tpot_ms")]
        pareto.plot(users, whole, "o")
        pareto.set(
            xlabel="tokens/s for one user", ylabel="tokens/s of the server", title="throughput over interactivity"
        )
        self.write()
