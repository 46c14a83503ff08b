"""`pd cache`: show what KV pools and tiers hold, look up a prompt in them, and clear, pin, prefetch or move its KV."""

import argparse
import json
from pathlib import Path
from typing import Any

from pdkv.base.log_fields import printable
from pdkv.cli.options import new_command
from pdkv.cli.running import add_run_flag, ask_router, print_table
from pdkv.errors import ConfigError, StoreUnsupported
from pdkv.host.memory_limits import format_bytes

_ACTIONS = {
    "lookup": "show how many tokens of a prompt each engine and tier has",
    "clear": "drop the cached KV of a prompt, or of everything with --all",
    "pin": "keep a prompt's KV in host memory until it is unpinned or --ttl-s has passed",
    "unpin": "remove the pins of a prompt, or of everything with --all",
    "prefetch": "bring a prompt's KV from lower tiers into host memory",
    "move": "copy a prompt's KV to another tier, then remove it from the first",
}

_WHO = {"prefetch": "one", "move": "all; one if the target is host memory"}
"""Engines that are asked if none is named, where that is not all."""


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `cache` to the `pd` parser."""
    summary = "show what KV pools and tiers hold, and their hits; look up, clear, pin, prefetch or move a prompt's KV"
    parser = new_command(commands, "cache", run_cache, summary)
    add_run_flag(parser)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    for name, text in _ACTIONS.items():
        _add_action(actions, name, text)


def _add_action(actions: "argparse._SubParsersAction[Any]", name: str, text: str) -> None:
    parser = new_command(actions, name, run_action, text)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--prompt", metavar="TEXT", help="the prompt")
    which.add_argument("--prompt-file", type=Path, metavar="FILE", help="file that holds the prompt")
    which.add_argument("--messages", type=Path, metavar="FILE", help="conversation as a JSON list, as in chat requests")
    which.add_argument("--tokens", metavar="ID,ID,…", help="the prompt's token ids")
    which.add_argument("--keys", metavar="HEX,HEX,…", help="keys of the prompt's blocks, starting with the first")
    if name in ("clear", "unpin"):
        which.add_argument("--all", action="store_true", help="everything that is cached")
    parser.add_argument("--engine", metavar="NAME", help=f"only this engine (default: {_WHO.get(name, 'all')})")
    if name == "move":
        parser.add_argument("--from", required=True, metavar="TIER", help="tier to take the KV from, such as host")
        parser.add_argument(
            "--tier", required=True, metavar="TIER", help="tier to put the KV into, such as redis or 1-redis"
        )
        parser.add_argument("--copy", action="store_true", default=None, help="keep the KV in the first tier, too")
    else:
        tiers = "only this tier, such as pool, host, redis or 0-host"
        parser.add_argument("--tier", default="", metavar="TIER", help=tiers)
    parser.add_argument("--cache-salt", metavar="SALT", help="cache_salt of the requests that computed the KV")
    parser.add_argument("--api-key", metavar="NAME", help="name of the requests' API key, if keys have separate caches")
    if name == "pin":
        parser.add_argument(
            "--ttl-s", type=float, metavar="SECONDS", help="how long to keep the pin (default: until it is removed)"
        )
    parser.add_argument(
        "--timeout-s", type=float, default=10.0, metavar="SECONDS", help="seconds to wait for an answer (default: 10)"
    )
    add_run_flag(parser, default=argparse.SUPPRESS)
    parser.set_defaults(action=name)


def run_action(arguments: argparse.Namespace) -> int:
    """Run `pd cache ACTION`: one line per engine and tier. Exit code 1: none of them succeeded."""
    body = _content(arguments)
    for name in ("engine", "from", "tier", "copy", "cache_salt", "api_key", "ttl_s", "timeout_s"):
        value = getattr(arguments, name, None)
        if value not in (None, ""):
            body[name] = value
    answer = ask_router(arguments, lambda router: router.order_cache(arguments.action, body))
    heading: tuple[str, ...] = ("ENGINE", "TIER", "VALUES", "PROBLEM")
    if arguments.action not in ("clear", "unpin"):
        print(f"{answer['prompt_tokens']} tokens")
        heading = ("ENGINE", "TIER", "TOKENS", "VALUES", "PROBLEM")
    rows, unable = [heading], list[str]()  # what a tier can never do is no failure
    for engine in answer["engines"]:
        told = [*engine["tiers"], *([{"tier": "-", "error": engine["error"]}] if "error" in engine else ())]
        for tier in told:
            if tier.get("error", {}).get("code") == StoreUnsupported.code:
                unable.append(f"unchanged: {engine['name']} {tier['tier']}: {tier['error']['message']}")
            else:
                rows.append((engine["name"], *_cells(tier, len(heading) - 1)))
    if len(rows) > 1:
        print_table(rows)
    for line in unable:
        print(printable(line))
    return 0


def _cells(tier: dict[str, Any], size: int) -> tuple[str, ...]:
    """The cells of a tier's line: its name, counts, and what went wrong."""
    if "error" in tier:
        return (tier["tier"], *["-"] * (size - 2), tier["error"]["message"])
    counts = [str(tier["tokens"]), str(tier["values"])]
    return (tier["tier"], *counts[4 - size :], "-")


def _content(arguments: argparse.Namespace) -> dict[str, Any]:
    """The part of the body that says which KV is meant. Raises ConfigError if it cannot be read."""
    if arguments.prompt is not None:
        return {"prompt": arguments.prompt}
    if arguments.prompt_file is not None:
        return {"prompt": _read("--prompt-file", arguments.prompt_file)}
    if arguments.messages is not None:
        text = _read("--messages", arguments.messages)
        try:
            return {"messages": json.loads(text)}
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--messages: {arguments.messages} is not JSON: {error}") from None
    if arguments.tokens is not None:
        try:
            return {"tokens": [int(token) for token in arguments.tokens.split(",")]}
        except ValueError:
            raise ConfigError(f"--tokens: expected numbers separated by commas, got {arguments.tokens!r}") from None
    return {"keys": arguments.keys.split(",")} if arguments.keys is not None else {}


def _read(flag: str, path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: {path} cannot be read: {error}") from None


def run_cache(arguments: argparse.Namespace) -> int:
    """Run `pd cache`: one line per engine's pool, one per tier below it, and one per API key whose KV has terms."""
    rows = [("ENGINE", "TIER", "HOLDS", "OF", "HITS", "EVICTIONS", "FAILURES")]
    for engine in ask_router(arguments, lambda router: router.caches()):
        blocks, tokens = engine["blocks"], engine["prompt_tokens"]
        num_used = blocks["total"] - blocks["free"]
        rows.append((engine["name"], "pool", f"{num_used} blocks", str(blocks["total"]),
                     f"{tokens['local_hit']} tokens", "-", "-"))  # fmt: skip
        for tier in engine["tiers"]:
            rows.append((engine["name"], *_tier_cells(tier)))
            rows += [
                (engine["name"], f"  of {name}", format_bytes(num_bytes), "-", "-", "-", "-")
                for name, num_bytes in tier.get("keys", {}).items()
            ]
    print_table(rows)
    return 0


def _tier_cells(tier: dict[str, Any]) -> tuple[str, str, str, str, str, str]:
    holds, capacity, evictions = "-", "-", "-"
    if "capacity" in tier:
        holds, capacity = f"{tier['values']} values, {format_bytes(tier['bytes'])}", format_bytes(tier["capacity"])
        evictions = str(tier["evictions"])
    return tier["tier"], holds, capacity, f"{tier['hits']} values", evictions, str(tier["failures"])
