"""`pd connector`: what is known about KV connectors."""

import argparse
from typing import Any

from pdkv.connectors.registry import connector_targets, load_connector
from pdkv.errors import ConfigError


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `connector` to the `pd` parser."""
    parser = commands.add_parser("connector", help="inspect KV connectors", description="Inspect KV connectors.")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    summary = "list the known connectors with their flags"
    listing = subcommands.add_parser("list", help=summary, description=f"{summary.capitalize()}.")
    listing.set_defaults(run=run_list)


def run_list(_: argparse.Namespace) -> int:
    """Run `pd connector list`: one line per connector. One that cannot be loaded says why and makes the exit code 1."""
    failed = False
    rows = [("NAME", "KIND", "CONTENT-ADDRESSED", "ORDERS", "CLASS")]
    for name, target in connector_targets().items():
        try:
            connector = load_connector(name)
        except (ConfigError, ImportError) as error:
            rows.append((name, "-", "-", f"cannot be loaded: {error}", target))
            failed = True
            continue
        content = "yes" if connector.content_addressed else "no"
        rows.append((name, connector.kind, content, ",".join(connector.orders()), target))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return int(failed)
