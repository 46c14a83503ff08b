"""`pd restart`: every engine anew, while requests run."""

import argparse
import asyncio
from typing import Any

from pdkv.cli.options import capitalized
from pdkv.cli.running import add_drain_flag, add_run_flag, check_seconds, find_run, say
from pdkv.errors import ConfigError


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `restart` to the `pd` parser."""
    summary = "restart the engines of a running launch one after the other"
    parser = commands.add_parser(
        "restart",
        help=summary,
        usage="pd restart --rolling [--drain-s SECONDS] [--run NAME]",
        description=f"{capitalized(summary)}: each is drained, stopped, started and awaited before the next. For the "
        "only engine of a role, one of the other role stands in meanwhile. The router is not restarted.",
    )
    parser.add_argument("--rolling", action="store_true", help="one after the other; there is no other way")
    add_drain_flag(parser)
    add_run_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run `pd restart`."""
    from pdkv.launch.control import Restart, give_order

    if not arguments.rolling:
        raise ConfigError("say --rolling: engines are restarted one after the other (else stop the launch)")
    check_seconds("--drain-s", arguments.drain_s)
    print(asyncio.run(give_order(find_run(arguments), Restart(arguments.drain_s), say)))
    return 0
