"""`pd engines`, `pd cache`, `pd drain`, `pd resume`, `pd role`: a running launch's engines, as its router sees them."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from pdkv.cli.running import add_run_flag, check_seconds, find_run
from pdkv.host.memory_limits import format_bytes

if TYPE_CHECKING:
    from pdkv.launch.router_admin import RouterAdmin

ROLES = ("prefill", "decode", "any")


def add_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the five to the `pd` parser."""
    _add(commands, "engines", "list the engines of a running launch", run_engines, names=False)
    _add(commands, "cache", "show what pools and tiers of KV hold, and what they gave", run_cache, names=False)
    drain = _add(
        commands, "drain", "give an engine no new requests, and wait until it has none", run_drain,
        "Exit code 1: it still has some. `pd resume` undoes it. The last engine of a role is refused.",
    )  # fmt: skip
    drain.add_argument(
        "--wait-s", type=float, default=30.0, metavar="SECONDS", help="how long to wait at most (default: 30)"
    )
    _add(commands, "resume", "give a drained engine requests again", run_resume)
    role = _add(
        commands, "role", "give an engine another role, without a restart", run_role,
        "Requests that it has go on in its old one. Its other options stay as they were.",
    )  # fmt: skip
    role.add_argument("role", choices=ROLES, help="the new role; any: both")


def _add(
    commands: "argparse._SubParsersAction[Any]",
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], int],
    more: str = "",
    *,
    names: bool = True,
) -> argparse.ArgumentParser:
    description = f"{summary.capitalize()}. {more}".strip()
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=description)
    if names:
        parser.add_argument("engine", metavar="ENGINE", help="such as decode-0, as in `pd engines`")
    add_run_flag(parser)
    parser.set_defaults(run=run)
    return parser


def run_engines(arguments: argparse.Namespace) -> int:
    """Run `pd engines`: one line per engine."""
    engines = _ask(arguments, lambda router: router.engines())
    rows = [("NAME", "ROLE", "STATE", "PID", "REQUESTS")]
    rows += [(e["name"], e["role"], _state(e), str(e["pid"] or "-"), str(e["requests"])) for e in engines]
    _print(rows)
    return 0


def run_cache(arguments: argparse.Namespace) -> int:
    """Run `pd cache`: a line per engine's pool, and one per tier below it."""
    rows = [("ENGINE", "TIER", "HOLDS", "OF", "HITS", "EVICTIONS", "FAILURES")]
    for engine in _ask(arguments, lambda router: router.caches()):
        blocks, tokens = engine["blocks"], engine["prompt_tokens"]
        num_used = blocks["total"] - blocks["free"]
        rows.append((engine["name"], "pool", f"{num_used} blocks", str(blocks["total"]),
                     f"{tokens['local_hit']} tokens", "-", "-"))  # fmt: skip
        rows += [(engine["name"], *_tier_cells(tier)) for tier in engine["tiers"]]
    _print(rows)
    return 0


def _tier_cells(tier: dict[str, Any]) -> tuple[str, str, str, str, str, str]:
    holds, capacity, evictions = "-", "-", "-"
    if "capacity" in tier:
        holds, capacity = f"{tier['values']} values, {format_bytes(tier['bytes'])}", format_bytes(tier["capacity"])
        evictions = str(tier["evictions"])
    return tier["tier"], holds, capacity, f"{tier['hits']} values", evictions, str(tier["failures"])


def run_drain(arguments: argparse.Namespace) -> int:
    """Run `pd drain`."""
    check_seconds("--wait-s", arguments.wait_s)
    engine = _ask(arguments, lambda router: router.drain(arguments.engine, arguments.wait_s))
    rest = "" if engine["drained"] else f": it still has {engine['requests']} requests"
    print(f"{engine['name']} is {_state(engine)}{rest}")
    return int(not engine["drained"])


def run_resume(arguments: argparse.Namespace) -> int:
    """Run `pd resume`."""
    engine = _ask(arguments, lambda router: router.resume(arguments.engine))
    print(f"{engine['name']} is {_state(engine)}")
    return 0


def run_role(arguments: argparse.Namespace) -> int:
    """Run `pd role`."""
    engine = _ask(arguments, lambda router: router.set_role(arguments.engine, arguments.role))
    print(f"{engine['name']} has the role {engine['role']}; {engine['requests']} requests go on in theirs")
    return 0


def _ask(arguments: argparse.Namespace, call: "Callable[[RouterAdmin], Awaitable[Any]]") -> Any:
    from pdkv.launch.router_admin import RouterAdmin

    async def ask() -> Any:
        return await call(RouterAdmin(find_run(arguments)))

    return asyncio.run(ask())


def _state(engine: dict[str, Any]) -> str:
    if engine["drained"]:
        return "drained"
    return "draining" if engine["draining"] else str(engine["state"])


def _print(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
