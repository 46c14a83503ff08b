"""`pd scale`: more engines or fewer, while requests run."""

import argparse
import asyncio
from typing import Any

from pdkv.cli.options import capitalized
from pdkv.cli.running import add_drain_flag, add_run_flag, check_seconds, find_run, say
from pdkv.errors import ConfigError


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `scale` to the `pd` parser."""
    summary = "have more or fewer engines in a running launch"
    parser = commands.add_parser(
        "scale",
        help=summary,
        usage="pd scale [--prefill N] [--decode M] [--drain-s SECONDS] [--run NAME]",
        description=f"{capitalized(summary)}. New ones are started as those that the launch began with; the newest go "
        "first, each when it has no request any more. Where all engines are aggregated, --decode says how many.",
    )
    parser.add_argument("--prefill", type=int, metavar="N", help="number of engines whose role is prefill")
    parser.add_argument("--decode", type=int, metavar="M", help="number of engines whose role is decode")
    add_drain_flag(parser)
    add_run_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run `pd scale`."""
    from pdkv.launch.control import Scale, give_order

    if arguments.prefill is None and arguments.decode is None:
        raise ConfigError("say how many: --prefill N, --decode M, or both")
    for role in ("prefill", "decode"):
        count = getattr(arguments, role)
        if count is not None and count < 1:
            raise ConfigError(f"--{role} must be at least 1, got {count}: to have none, stop the launch")
    check_seconds("--drain-s", arguments.drain_s)
    order = Scale(arguments.prefill, arguments.decode, arguments.drain_s)
    print(asyncio.run(give_order(find_run(arguments), order, say)))
    return 0
