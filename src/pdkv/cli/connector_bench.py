"""`pd connector bench`: how fast a connector is, and what it costs the steps beside it."""

import argparse
import sys
from pathlib import Path
from typing import Any

from pdkv.cli.options import connector_options
from pdkv.errors import ConfigError

TOKENS = (64, 256, 1024, 4096, 8192)


def add_bench(subcommands: "argparse._SubParsersAction[Any]") -> None:
    """Add `bench` to `pd connector`."""
    summary = "measure a connector's bandwidth and latency"
    parser = subcommands.add_parser(
        "bench",
        help=summary,
        description=f"{summary.capitalize()} between two engines without a model, by request length, on pools whose "
        "free blocks lie as after 10,000 random allocations and frees (aged) and side by side (contiguous). Beside it: "
        "memcpy (one thread), and the bare transport moving the same bytes in one piece, and in one piece per (layer, "
        "K or V, block). Then what prefill steps lose beside a transport throttled to a tenth of their pace. Leave "
        "the machine alone meanwhile.",
    )
    add = parser.add_argument
    add("connector", metavar="NAME|module:Class", help="what to measure")
    add("--connector-config", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help='options of the connector; "{directory}" in a value is a private directory')  # fmt: skip
    add("--model-layout", default="mid", metavar="LAYOUT",
        help="tiny, small, mid, or LAYERSxHEADSxHEAD_SIZE[:DTYPE] (default: mid)")  # fmt: skip
    add("--tokens", type=int, nargs="+", default=list(TOKENS), metavar="N",
        help=f"lengths (default: {' '.join(map(str, TOKENS))})")  # fmt: skip
    add("--repeats", type=int, default=7, metavar="N", help="loads per row (default: 7)")
    add("--tp-pair", default="1,1", metavar="P,D", help="ranks of the producer and of the consumer (default: 1,1)")
    add("--block-sizes", default="16,16", metavar="P,D", help="tokens per block (default: 16,16)")
    add("--pattern", action="append", default=[], choices=("aged", "contiguous"), help="this one only")
    add("--one-process", action="store_true", help="both engines in one process, as for a store of url=memory://")
    add("--no-throttle", action="store_true", help="leave the throttled transport out")
    add("--plot", type=Path, metavar="PNG", help="write the plot there (needs matplotlib), instead of a text plot")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run_bench)


def run_bench(arguments: argparse.Namespace) -> int:
    """Run `pd connector bench`."""
    import msgspec

    from pdkv.connector_kit.bench import report
    from pdkv.connector_kit.bench.effects import measure_slowdown
    from pdkv.connector_kit.bench.measure import Row, measure
    from pdkv.connector_kit.bench.plan import make_plan

    if arguments.repeats < 1 or min(arguments.tokens) < 1:
        raise ConfigError("--repeats and --tokens: numbers above 0 were expected")
    plan = make_plan(
        arguments.connector,
        options=connector_options(arguments.connector_config),
        layout=arguments.model_layout,
        tokens=sorted(set(arguments.tokens)),
        tp_pair=_pair(arguments.tp_pair, "--tp-pair"),
        block_sizes=_pair(arguments.block_sizes, "--block-sizes"),
        repeats=arguments.repeats,
        patterns=arguments.pattern,
        one_process=arguments.one_process,
    )
    if not arguments.json:
        report.print_head(sys.stdout)

    def show(row: Row) -> None:
        if not arguments.json:
            report.print_row(row, sys.stdout)

    rows = measure(plan, show)
    slowdown = None if arguments.no_throttle else measure_slowdown(plan)
    if arguments.json:
        document = {"connector": arguments.connector, "rows": rows, "throttled": slowdown}
        print(msgspec.json.encode(document).decode())
    elif slowdown is not None:
        report.print_slowdown(slowdown, sys.stdout)
    if arguments.plot is not None:
        if not report.save_plot(rows, arguments.plot):
            raise ConfigError("--plot needs matplotlib: pip install matplotlib")
    elif not arguments.json:
        report.print_plot(rows, sys.stdout)
    return 0


def _pair(text: str, flag: str) -> tuple[int, int]:
    try:
        first, second = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag}: two numbers such as 1,2 were expected, got {text!r}") from None
    if first < 1 or second < 1:
        raise ConfigError(f"{flag}: numbers above 0 were expected, got {text!r}")
    return first, second
