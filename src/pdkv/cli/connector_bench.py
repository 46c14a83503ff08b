"""`pd connector bench`: measures how fast a connector is and how much it slows the steps that run during a transfer."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdkv.cli.options import connector_options, new_command
from pdkv.errors import ConfigError

if TYPE_CHECKING:
    from pdkv.connector_kit.bench.plan import Plan

TOKENS = (64, 256, 1024, 4096, 8192)
TAIL_TOKENS = 2048


def add_bench(subcommands: "argparse._SubParsersAction[Any]") -> None:
    """Add `bench` to `pd connector`."""
    parser = new_command(
        subcommands, "bench", run_bench, "measure a connector's bandwidth and latency",
        " between two engines without a model, by request length, on pools with "
        "free blocks in the order left by 10,000 random allocations and frees (aged), and in adjacent order "
        "(contiguous). For comparison, memcpy (one thread) and the bare transport move the same bytes, the latter in "
        "one piece and in one piece per (layer, K or V, block). All take turns; medians, quartiles and ratios are "
        "taken over the same rounds. Then measure how much prefill steps slow down during "
        "a transfer throttled to a tenth of their pace. Other load on the machine distorts the results.",
    )  # fmt: skip
    add = parser.add_argument
    add("connector", metavar="NAME|module:Class", help="connector to measure")
    add("--connector-config", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help='options of the connector; "{directory}" in a value stands for a private directory')  # fmt: skip
    add("--model-layout", default="mid", metavar="LAYOUT",
        help="tiny, small, mid, or LAYERSxHEADSxHEAD_SIZE[:DTYPE] (default: mid)")  # fmt: skip
    add("--tokens", type=int, nargs="+", metavar="N",
        help=f"lengths in tokens (default: {' '.join(map(str, TOKENS))}; with --tail: {TAIL_TOKENS})")  # fmt: skip
    add("--repeats", type=int, default=7, metavar="N", help="rounds per row (default: 7)")
    add("--tp-pair", default="1,1", metavar="P,D", help="ranks of the producer and of the consumer (default: 1,1)")
    add("--block-sizes", default="16,16", metavar="P,D", help="tokens per block (default: 16,16)")
    add(
        "--pattern",
        action="append",
        default=[],
        choices=("aged", "contiguous"),
        help="measure only this order of free blocks",
    )
    add("--kv-checksum", default="on", choices=("off", "sample", "on"),
        help="compare digests of what was sent and what arrived, as engines do (default: on)")  # fmt: skip
    add(
        "--one-process",
        action="store_true",
        help="run both engines in one process, as a store with url=memory:// requires",
    )
    add("--no-throttle", action="store_true", help="do not measure steps during a throttled transfer")
    add("--tail", action="store_true", help="for a push: only measure how much of it is left when the forward pass of "
        "a prompt ends, with the prompt in one step and in four")  # fmt: skip
    add("--plot", type=Path, metavar="FILE", help="write a plot of bandwidth by length to this .png, .svg or .pdf file "
        "instead of printing a text plot (needs matplotlib: pdkv[plot])")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object instead of a table")


def run_bench(arguments: argparse.Namespace) -> int:
    """Run `pd connector bench`."""
    from pdkv.connector_kit.bench.aged_pools import PATTERNS
    from pdkv.connector_kit.bench.plan import make_plan

    tokens = sorted(set(arguments.tokens or ([TAIL_TOKENS] if arguments.tail else TOKENS)))
    if arguments.repeats < 1 or tokens[0] < 1:
        raise ConfigError("--repeats and --tokens: expected numbers above 0")
    plan = make_plan(
        arguments.connector,
        options=connector_options(arguments.connector_config),
        layout=arguments.model_layout,
        tokens=tokens,
        tp_pair=_pair(arguments.tp_pair, "--tp-pair"),
        block_sizes=_pair(arguments.block_sizes, "--block-sizes"),
        repeats=arguments.repeats,
        patterns=arguments.pattern or tuple(PATTERNS),
        one_process=arguments.one_process,
        kv_checksum=arguments.kv_checksum,
    )
    if arguments.tail and arguments.plot is not None:
        raise ConfigError("--plot draws bandwidth by length, which --tail does not measure: drop one of the two")
    if arguments.tail:
        _run_tail(plan, as_json=arguments.json)
    else:
        _run_rows(plan, as_json=arguments.json, plot=arguments.plot, throttled=not arguments.no_throttle)
    return 0


def _run_tail(plan: "Plan", *, as_json: bool) -> None:
    from pdkv.connector_kit.bench import report
    from pdkv.connector_kit.bench.effects import measure_push_tail
    from pdkv.connector_kit.rig.world import NotApplicable

    found = []
    for num_tokens in plan.tokens:
        try:
            tails = measure_push_tail(plan, num_tokens)
        except NotApplicable as error:
            raise ConfigError(f"--tail: {error}") from None
        found += tails
        for tail in tails if not as_json else ():
            report.print_tail(tail, sys.stdout)
    if as_json:
        _print_json({"connector": plan.connector, "tails": found})


def _run_rows(plan: "Plan", *, as_json: bool, plot: Path | None, throttled: bool) -> None:
    from pdkv.bench.plot_file import PlotFile
    from pdkv.connector_kit.bench import report
    from pdkv.connector_kit.bench.effects import measure_slowdown
    from pdkv.connector_kit.bench.measure import Row, measure

    drawing = None if plot is None else PlotFile(plot, 9, 5.5)
    if not as_json:
        report.print_head(sys.stdout)

    def show(row: Row) -> None:
        if not as_json:
            report.print_row(row, sys.stdout)

    rows = measure(plan, show)
    slowdown = measure_slowdown(plan) if throttled else None
    if as_json:
        _print_json({"connector": plan.connector, "rows": rows, "throttled": slowdown})
    elif slowdown is not None:
        report.print_slowdown(slowdown, sys.stdout)
    if drawing is not None:
        report.draw(rows, drawing)
    elif not as_json:
        report.print_plot(rows, sys.stdout)


def _print_json(document: object) -> None:
    import msgspec

    print(msgspec.json.encode(document).decode())


def _pair(text: str, flag: str) -> tuple[int, int]:
    try:
        first, second = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag}: expected two numbers such as 1,2, got {text!r}") from None
    if first < 1 or second < 1:
        raise ConfigError(f"{flag}: expected numbers above 0, got {text!r}")
    return first, second
