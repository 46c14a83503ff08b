"""`pd connector`: lists, describes, checks and measures KV connectors."""

import argparse
import sys
from typing import Any

import msgspec

from pdkv.cli.connector_bench import add_bench
from pdkv.cli.connector_show import add_show
from pdkv.cli.options import connector_options, new_command
from pdkv.cli.running import print_table
from pdkv.connectors.registry import CONNECTORS, load_connector
from pdkv.errors import ConfigError


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `connector` to the `pd` parser."""
    parser = commands.add_parser("connector", help="inspect KV connectors", description="Inspect KV connectors.")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    summary = "list the known connectors, with their kinds, hand-off orders and classes"
    new_command(subcommands, "list", run_list, summary)
    add_show(subcommands)
    add_check(subcommands)
    add_bench(subcommands)


def add_check(subcommands: "argparse._SubParsersAction[Any]") -> None:
    """Add `check` to `pd connector`."""
    parser = new_command(
        subcommands, "check", run_check, "run the conformance kit over a connector",
        ": producer and consumer run in separate processes, without a model. Exit code 0: no case failed; 1: some case "
        "failed; 2: unknown connector, case or option.",
    )  # fmt: skip
    parser.add_argument("connector", metavar="NAME|module:Class", help="connector to check")
    parser.add_argument(
        "--connector-config",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help='options of the connector; "{directory}" in a value stands for a private directory of each case',
    )
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="run this case only (repeatable)")
    parser.add_argument("--quick", action="store_true", help="run fewer lengths and rounds")
    parser.add_argument(
        "--timeout",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="seconds before a case counts as hung; must exceed every deadline of the connector (default: 20)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run_list(_: argparse.Namespace) -> int:
    """Run `pd connector list`: one line per connector. One that cannot be loaded says why and makes the exit code 1."""
    failed = False
    rows = [("NAME", "KIND", "CONTENT-ADDRESSED", "ORDERS", "CLASS")]
    for name, target in CONNECTORS.targets().items():
        try:
            plan = load_connector(name).declares
        except ConfigError as error:
            rows.append((name, "-", "-", f"cannot be loaded: {error}", target))
            failed = True
            continue
        content = "yes" if plan.content_addressed else "no"
        rows.append((name, plan.kind, content, ",".join(plan.orders), target))
    print_table(rows)
    return int(failed)


def run_check(arguments: argparse.Namespace) -> int:
    """Run `pd connector check`: one line per case, and a line with the totals."""
    from pdkv.connector_kit.check.report import CaseReport, check, print_case, print_totals

    def show(report: CaseReport) -> None:
        if not arguments.json:
            print_case(report, sys.stdout)

    if not 0 < arguments.timeout < float("inf"):
        raise ConfigError(f"--timeout: a number of seconds above 0 was expected, got {arguments.timeout:g}")
    options = connector_options(arguments.connector_config)
    print(f"checking {arguments.connector}: each case starts its own processes …", file=sys.stderr, flush=True)
    report = check(
        arguments.connector,
        options=options,
        names=arguments.case,
        quick=arguments.quick,
        timeout_s=arguments.timeout,
        on_case=show,
    )
    if arguments.json:
        print(msgspec.json.encode(report).decode())
    else:
        print_totals(report, sys.stdout)
    return int(report.failed > 0)
