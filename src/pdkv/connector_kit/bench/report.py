"""Prints measurements for people: a table, and a plot of bandwidth by length."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TextIO

from pdkv.connector_kit.bench.effects import Slowdown
from pdkv.connector_kit.bench.measure import Row

_HEAD = (
    f"{'pattern':<11} {'tokens':>7} {'MiB':>7} {'pieces':>7} {'ms':>9} {'GB/s':>7} {'memcpy':>7} {'bare':>7} "
    f"{'per piece':>9} {'x memcpy':>8} {'x bare':>7} {'save':>7}"
)
_BAR = 50


def print_head(out: TextIO) -> None:
    """The table's first line. Rates are GB/s."""
    print(_HEAD, file=out, flush=True)


def print_row(row: Row, out: TextIO) -> None:
    """Print one line of the table."""
    print(
        f"{row.pattern:<11} {row.tokens:>7} {row.bytes / 2**20:>7.2f} {row.pieces:>7} {row.ms:>9.3f} {row.gb_s:>7.2f} "
        f"{row.memcpy_gb_s:>7.2f} {_rate(row.raw_gb_s):>7} {_rate(row.per_piece_gb_s):>9} {row.ratio_to_memcpy:>8.2f} "
        f"{_rate(row.ratio_to_raw):>7} {_rate(row.save_gb_s):>7}",
        file=out,
        flush=True,
    )


def print_slowdown(slowdown: Slowdown, out: TextIO) -> None:
    """One line."""
    print(
        f"prefill steps of {slowdown.chunk} tokens beside a transport of {slowdown.transport_mb_s:.1f} MB/s (a tenth "
        f"of their pace): {slowdown.step_ms:.1f} ms, {slowdown.idle_step_ms:.1f} ms beside an idle one "
        f"({slowdown.slowdown:+.1%})",
        file=out,
    )


def print_plot(rows: Sequence[Row], out: TextIO) -> None:
    """GB/s by length, one bar per row: # the connector, | memcpy, + the bare transport."""
    top = max(max(row.gb_s, row.memcpy_gb_s, row.raw_gb_s or 0.0) for row in rows)
    print(f"GB/s, full scale {top:.1f}; # the connector, + bare, | memcpy", file=out)
    for row in rows:
        bar = list(("#" * round(row.gb_s / top * _BAR)).ljust(_BAR + 1))
        if row.raw_gb_s is not None:
            bar[round(row.raw_gb_s / top * _BAR)] = "+"
        bar[round(row.memcpy_gb_s / top * _BAR)] = "|"
        print(f"{row.pattern:<11} {row.tokens:>7} {''.join(bar)}", file=out)


def save_plot(rows: Sequence[Row], path: Path) -> bool:
    """GB/s by request length as PNG. False: matplotlib is not installed, nothing is written."""
    try:
        module = import_module("matplotlib.figure")
    except ImportError:
        return False
    figure = module.Figure(figsize=(8, 5))
    axes = figure.subplots()
    for pattern in dict.fromkeys(row.pattern for row in rows):
        chosen = [row for row in rows if row.pattern == pattern]
        tokens = [row.tokens for row in chosen]
        axes.plot(tokens, [row.gb_s for row in chosen], marker="o", label=f"{rows[0].connector}, {pattern}")
    longest = {row.tokens: row for row in rows}
    tokens = list(longest)
    axes.plot(tokens, [row.memcpy_gb_s for row in longest.values()], "k--", label="memcpy")
    if all(row.raw_gb_s is not None for row in longest.values()):
        axes.plot(tokens, [row.raw_gb_s for row in longest.values()], "k:", label="bare transport")
    axes.set(xscale="log", xlabel="tokens", ylabel="GB/s", title=f"KV of {rows[0].layout}", ylim=(0, None))
    axes.legend()
    figure.savefig(path)
    return True


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
