"""Finds the running launch that a command is about."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdkv.base.limits import MAX_WAIT_S
from pdkv.base.log_fields import printable
from pdkv.errors import ConfigError, StartupError
from pdkv.launch.run_dir import RunInfo, run_root, running_launches

if TYPE_CHECKING:
    from pdkv.launch.router_admin import RouterAdmin


_WHICH = "which launch, if several are running: its port, URL, pid or run directory"


def add_run_flag(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """Add --run to a command. `default`: argparse.SUPPRESS for a subcommand whose parent has the flag, too."""
    parser.add_argument("--run", dest="run_name", metavar="NAME", default=default, help=_WHICH)


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Let a command that takes no other argument take --run's value as one."""
    parser.add_argument("run_name", nargs="?", metavar="LAUNCH", default=argparse.SUPPRESS, help="the same as --run")


def find_run(arguments: argparse.Namespace) -> Path:
    """The run directory of the launch that `find_launch` finds."""
    return Path(find_launch(arguments).path)


def find_launch(arguments: argparse.Namespace) -> RunInfo:
    """The launch that the command is about.

    Raises:
        StartupError: no launch is running.
        ConfigError: several are running, or none has the given name.
    """
    launches = running_launches()
    if not launches:
        raise StartupError(
            f"no launch of this user is ready: {run_root()} holds no run directory (a launch that was started with "
            "another TMPDIR is found only with the same TMPDIR)"
        )
    if arguments.run_name is None and len(launches) == 1:
        return launches[0]
    found = [launch for launch in launches if arguments.run_name is not None and launch.is_called(arguments.run_name)]
    if len(found) == 1:
        return found[0]
    known = "; ".join(f"port {each.url.rpartition(':')[2]} (pid {each.pid}, {each.shape})" for each in launches)
    if arguments.run_name is None:
        raise ConfigError(f"{len(launches)} launches are running: name one with --run PORT: {known}")
    raise ConfigError(f"no launch is named {arguments.run_name!r}; running: {known}")


def say(text: str) -> None:
    """Print progress to standard error; results go to standard output."""
    print(text, file=sys.stderr, flush=True)


def check_seconds(flag: str, seconds: float | None) -> None:
    """Raise ConfigError for a duration longer than the router would wait."""
    if seconds is not None and not 0 <= seconds <= MAX_WAIT_S:
        raise ConfigError(f"{flag}: a number of seconds from 0 to {MAX_WAIT_S:g} was expected, got {seconds:g}")


def ask_router(arguments: argparse.Namespace, call: "Callable[[RouterAdmin], Awaitable[Any]]") -> Any:
    """The answer of the launch's router."""
    from pdkv.launch.router_admin import RouterAdmin

    async def ask() -> Any:
        return await call(RouterAdmin(find_run(arguments)))

    return asyncio.run(ask())


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows of cells as a table; the first row is the heading. No cell reaches a terminal as its commands."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def engine_state(engine: dict[str, Any]) -> str:
    """The state of an engine, as the router describes it, in words."""
    if engine["drained"]:
        return "drained"
    return "draining" if engine["draining"] else str(engine["state"])


def add_drain_flag(parser: argparse.ArgumentParser) -> None:
    """Add --drain-s to a command."""
    parser.add_argument(
        "--drain-s", type=float, metavar="SECONDS",
        help="how long requests may keep running before their engine is stopped (default: --drain-s of the launch)",
    )  # fmt: skip
