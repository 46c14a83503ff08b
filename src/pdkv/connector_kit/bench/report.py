"""Shows measurements: a table, and a plot of bandwidth by length, in text or by matplotlib."""

from collections.abc import Callable, Sequence
from typing import Any, TextIO

from pdkv.bench.plot_file import PlotFile
from pdkv.connector_kit.bench.effects import BARE_SHARE, SLACK_MS, PushTail, Slowdown
from pdkv.connector_kit.bench.measure import Row
from pdkv.connector_kit.bench.turns import Spread

_HEAD = (
    f"{'pattern':<11} {'tokens':>7} {'MiB':>7} {'pieces':>7} {'ms':>20} {'GB/s':>7} {'memcpy':>7} {'bare':>7} "
    f"{'per piece':>9} {'x memcpy':>16} {'x bare':>16} {'x per piece':>16} {'step p, d':>11} {'save':>7}"
)
_BAR = 50

_YARDSTICKS: Sequence[tuple[str, str, Callable[[Row], Spread | None]]] = (
    ("memcpy", "k--", lambda row: row.memcpy_gb_s),
    ("bare, in one piece", "k:", lambda row: row.raw_gb_s),
    ("bare, per piece", "k-.", lambda row: row.per_piece_gb_s),
)


def print_head(out: TextIO) -> None:
    """The table's first lines."""
    print("medians, followed by lower-upper quartiles; rates in GB/s; ratios are taken in each round", file=out)
    print(_HEAD, file=out, flush=True)


def print_row(row: Row, out: TextIO) -> None:
    """Print one line of the table."""
    steps = f"{row.producer_step_ms.median:>5.2f} {row.consumer_step_ms.median:>5.2f}"
    print(
        f"{row.pattern:<11} {row.tokens:>7} {row.bytes / 2**20:>7.2f} {row.pieces:>7} {_spread(row.ms):>20} "
        f"{row.gb_s.median:>7.2f} {row.memcpy_gb_s.median:>7.2f} {_median(row.raw_gb_s):>7} "
        f"{_median(row.per_piece_gb_s):>9} {_spread(row.ratio_to_memcpy):>16} {_spread(row.ratio_to_raw):>16} "
        f"{_spread(row.ratio_to_per_piece):>16} {steps} "
        f"{_median(row.save_gb_s):>7}",
        file=out,
        flush=True,
    )


def print_tail(tail: PushTail, out: TextIO) -> None:
    """Print one line about a push's tail."""
    print(
        f"{tail.tokens} tokens in {tail.steps} step{'s' * (tail.steps > 1)}: {_spread(tail.tail_ms)} ms are left when "
        f"the forward pass ends, the bare transfer takes {_spread(tail.bare_ms)} ms; of {BARE_SHARE:.0%} of it and "
        f"{SLACK_MS:g} ms: {_spread(tail.ratio_to_allowed)}",
        file=out,
    )


def print_slowdown(slowdown: Slowdown, out: TextIO) -> None:
    """Print one line about the slowdown of steps."""
    print(
        f"prefill steps of {slowdown.chunk} tokens during a transfer of {slowdown.transport_mb_s:.1f} MB/s (a tenth "
        f"of their pace): {slowdown.step_ms:.1f} ms, {slowdown.idle_step_ms:.1f} ms with an idle connector "
        f"({slowdown.slowdown:+.1%})",
        file=out,
    )


def print_plot(rows: Sequence[Row], out: TextIO) -> None:
    """Print GB/s by length, one bar per row: # the connector, | memcpy, + the bare transport."""
    medians = [[rate.median for rate in (row.gb_s, row.memcpy_gb_s, row.raw_gb_s) if rate is not None] for row in rows]
    top = max(max(each) for each in medians)
    print(f"GB/s, full scale {top:.1f}; # the connector, + bare, | memcpy", file=out)
    for row, (own, memcpy, *raw) in zip(rows, medians, strict=True):
        bar = list(("#" * round(own / top * _BAR)).ljust(_BAR + 1))
        for mark, rate in (*(("+", each) for each in raw), ("|", memcpy)):
            bar[round(rate / top * _BAR)] = mark
        print(f"{row.pattern:<11} {row.tokens:>7} {''.join(bar)}", file=out)


def draw(rows: Sequence[Row], plot: PlotFile) -> None:
    """Draw GB/s by length: a line for each pattern with its quartiles, and lines for the yardsticks.

    Raises:
        ConfigError: the file cannot be written.
    """
    axes = plot.figure.subplots()
    for pattern in dict.fromkeys(row.pattern for row in rows):
        chosen = [row for row in rows if row.pattern == pattern]
        _draw(axes, chosen, lambda row: row.gb_s, f"{rows[0].connector}, {pattern}", "o-")
    by_length = list({row.tokens: row for row in rows}.values())
    for label, style, rate in _YARDSTICKS:
        if all(rate(row) is not None for row in by_length):
            _draw(axes, by_length, rate, label, style)
    axes.set(
        xscale="log", xlabel="tokens", ylabel="GB/s (median, quartiles)", ylim=(0, None),
        title=f"KV of {rows[0].layout}, {rows[0].rounds} rounds",
    )  # fmt: skip
    axes.set_xticks([row.tokens for row in by_length], [str(row.tokens) for row in by_length])
    axes.minorticks_off()
    axes.legend()
    plot.write()


def _draw(axes: Any, rows: Sequence[Row], rate: Callable[[Row], Spread | None], label: str, style: str) -> None:
    tokens = [row.tokens for row in rows]
    spreads = [spread for spread in map(rate, rows) if spread is not None]
    [line] = axes.plot(tokens, [spread.median for spread in spreads], style, label=label)
    low, high = [spread.low for spread in spreads], [spread.high for spread in spreads]
    axes.fill_between(tokens, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def _median(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.2f}"


def _spread(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.2f} {spread.low:.2f}-{spread.high:.2f}"
