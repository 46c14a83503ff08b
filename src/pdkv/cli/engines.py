"""`pd engines`, `drain`, `resume`, `role`, `split`: the engines of a running launch, as its router sees them."""

import argparse
from collections.abc import Callable
from typing import Any

from pdkv.base.options import parse_pairs
from pdkv.cli.options import new_command
from pdkv.cli.running import add_launch, add_run_flag, ask_router, check_seconds, engine_state, print_table
from pdkv.router.engines.address import read_split

ROLES = ("prefill", "decode", "any")


def add_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the five commands to the `pd` parser."""
    add_launch(_add(commands, "engines", "list the engines of a running launch", run_engines, names=False))
    drain = _add(
        commands, "drain", "stop giving an engine new requests, and wait until it has finished those it has", run_drain,
        ". Exit code 1: it still has requests. `pd resume` undoes it. The last engine of a role is refused.",
    )  # fmt: skip
    drain.add_argument(
        "--wait-s", type=float, default=30.0, metavar="SECONDS", help="how long to wait at most (default: 30)"
    )
    _add(commands, "resume", "give a drained engine new requests again", run_resume)
    role = _add(
        commands, "role", "change an engine's role without a restart", run_role,
        ". Requests that it has go on in its old one. Its other options stay as they were.",
    )  # fmt: skip
    role.add_argument("role", choices=ROLES, help="the new role; any means both")
    split = _add(
        commands, "split", "change which percent of requests for the launch's model pools run instead", run_split,
        ". Other pools' percent stays as it is; 0 ends it.", names=False,
    )  # fmt: skip
    split.add_argument("shares", nargs="+", metavar="POOL=PERCENT", help="a pool of --pool, and 0 to 100")


def _add(
    commands: "argparse._SubParsersAction[Any]",
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], int],
    more: str = ".",
    *,
    names: bool = True,
) -> argparse.ArgumentParser:
    parser = new_command(commands, name, run, summary, more)
    if names:
        parser.add_argument("engine", metavar="ENGINE", help="name of the engine as in `pd engines`, such as decode-0")
    add_run_flag(parser)
    return parser


def run_engines(arguments: argparse.Namespace) -> int:
    """Run `pd engines`: one line per engine."""
    engines = ask_router(arguments, lambda router: router.engines(fresh=True))
    rows: list[tuple[str, ...]] = [("NAME", "ROLE", "STATE", "PID", "REQUESTS")]
    rows += [(e["name"], e["role"], engine_state(e), str(e["pid"] or "-"), str(e["requests"])) for e in engines]
    if any(e.get("pool") for e in engines):
        rows = [(*row, pool) for row, pool in zip(rows, ("POOL", *(e["pool"] or "-" for e in engines)), strict=True)]
    if any(e["source"] != "launch" for e in engines):
        sources = [("SOURCE", "ENDPOINT"), *((e["source"], e["endpoint"]) for e in engines)]
        rows = [(*row, *source) for row, source in zip(rows, sources, strict=True)]
    print_table(rows)
    return 0


def run_drain(arguments: argparse.Namespace) -> int:
    """Run `pd drain`."""
    check_seconds("--wait-s", arguments.wait_s)
    engine = ask_router(arguments, lambda router: router.drain(arguments.engine, arguments.wait_s))
    rest = "" if engine["drained"] else f": it still has {engine['requests']} requests"
    print(f"{engine['name']} is {engine_state(engine)}{rest}")
    return int(not engine["drained"])


def run_resume(arguments: argparse.Namespace) -> int:
    """Run `pd resume`."""
    engine = ask_router(arguments, lambda router: router.resume(arguments.engine))
    print(f"{engine['name']} is {engine_state(engine)}")
    return 0


def run_role(arguments: argparse.Namespace) -> int:
    """Run `pd role`."""
    engine = ask_router(arguments, lambda router: router.set_role(arguments.engine, arguments.role))
    print(f"{engine['name']} has the role {engine['role']}; {engine['requests']} requests finish in the old one")
    return 0


def run_split(arguments: argparse.Namespace) -> int:
    """Run `pd split`."""
    pairs = parse_pairs(arguments.shares)
    shares = ask_router(arguments, lambda router: router.split(read_split(pairs, pairs)))
    print(", ".join(f"{pool} {percent:g} %" for pool, percent in shares.items()) or "no pool has a share")
    return 0
