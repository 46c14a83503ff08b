"""Prints measurements: a table, and a text plot of bandwidth by length."""

from collections.abc import Sequence
from typing import TextIO

from pdkv.connector_kit.bench.effects import Slowdown
from pdkv.connector_kit.bench.measure import Row
from pdkv.connector_kit.bench.tail import BARE_SHARE, SLACK_MS, PushTail
from pdkv.connector_kit.bench.turns import Spread

_HEAD = (
    f"{'pattern':<11} {'tokens':>7} {'MiB':>7} {'pieces':>7} {'ms':>20} {'GB/s':>7} {'memcpy':>7} {'bare':>7} "
    f"{'per piece':>9} {'x memcpy':>16} {'x bare':>16} {'x per piece':>16} {'step p, d':>11} {'save':>7}"
)
_BAR = 50


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


def _median(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.2f}"


def _spread(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.2f} {spread.low:.2f}-{spread.high:.2f}"
