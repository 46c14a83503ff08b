"""`pd scale` and `pd restart`: change the number of engines, or restart all of them, while requests run."""

import argparse
import asyncio
from typing import Any

from pdkv.cli.options import new_command
from pdkv.cli.running import add_drain_flag, add_launch, add_run_flag, check_seconds, find_run, say
from pdkv.errors import ConfigError


def add_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `scale` and `restart` to the `pd` parser."""
    parser = new_command(
        commands, "scale", run_scale, "change the number of engines of a running launch",
        ". New engines get the launch's own options. The newest are removed first, each once its requests are done. If "
        "all engines are aggregated, --decode sets their number.",
        usage="pd scale [--prefill N] [--decode M] [--drain-s SECONDS] [--run NAME | LAUNCH]",
    )  # fmt: skip
    parser.add_argument("--prefill", type=int, metavar="N", help="number of prefill engines")
    parser.add_argument("--decode", type=int, metavar="M", help="number of decode engines")
    restart = new_command(
        commands, "restart", run_restart, "restart the engines of a running launch one after the other",
        ": each engine is drained, stopped, started and ready before the next one is drained. While the only engine of "
        "a role is down, an engine of the other role stands in for it. The router is not restarted.",
        usage="pd restart [--drain-s SECONDS] [--run NAME | LAUNCH]",
    )  # fmt: skip
    restart.add_argument("--rolling", action="store_true", help="one engine after the other, as without it")
    for each in (parser, restart):
        add_drain_flag(each)
        add_run_flag(each)
        add_launch(each)


def run_scale(arguments: argparse.Namespace) -> int:
    """Run `pd scale`."""
    from pdkv.launch.control import Scale, give_order

    if arguments.prefill is None and arguments.decode is None:
        raise ConfigError("expected --prefill N, --decode M, or both")
    for role in ("prefill", "decode"):
        count = getattr(arguments, role)
        if count is not None and count < 1:
            raise ConfigError(f"--{role} must be at least 1, got {count}: to have no engines, stop the launch")
    check_seconds("--drain-s", arguments.drain_s)
    order = Scale(arguments.prefill, arguments.decode, arguments.drain_s)
    print(asyncio.run(give_order(find_run(arguments), order, say)))
    return 0


def run_restart(arguments: argparse.Namespace) -> int:
    """Run `pd restart`."""
    from pdkv.launch.control import Restart, give_order

    check_seconds("--drain-s", arguments.drain_s)
    print(asyncio.run(give_order(find_run(arguments), Restart(arguments.drain_s), say)))
    return 0
