"""Draws bandwidth by request length. Needs matplotlib."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pdkv.bench.plot_file import PlotFile
from pdkv.connector_kit.bench.measure import Row
from pdkv.connector_kit.bench.turns import Spread

_YARDSTICKS: Sequence[tuple[str, str, Callable[[Row], Spread | None]]] = (
    ("memcpy", "k--", lambda row: row.memcpy_gb_s),
    ("bare, in one piece", "k:", lambda row: row.raw_gb_s),
    ("bare, per piece", "k-.", lambda row: row.per_piece_gb_s),
)


class Plot(PlotFile):
    """Bandwidth by request length."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError as `PlotFile`."""
        super().__init__(path, 9, 5.5)

    def save(self, rows: Sequence[Row]) -> None:
        """Draw GB/s by length: a line for each pattern with its quartiles, and lines for the yardsticks.

        Raises:
            ConfigError: the file cannot be written.
        """
        axes = self.figure.subplots()
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
        self.write()


def _draw(axes: Any, rows: Sequence[Row], rate: Callable[[Row], Spread | None], label: str, style: str) -> None:
    tokens = [row.tokens for row in rows]
    spreads = [spread for spread in map(rate, rows) if spread is not None]
    [line] = axes.plot(tokens, [spread.median for spread in spreads], style, label=label)
    low, high = [spread.low for spread in spreads], [spread.high for spread in spreads]
    axes.fill_between(tokens, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
