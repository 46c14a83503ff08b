"""`pd connector show`: what one connector is, what it needs, and every option with its help."""

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from pdkv.base.options import Option, options_of
from pdkv.cli.options import connector_options, new_command, with_default
from pdkv.connectors.base import KVConnector
from pdkv.connectors.plan import ConnectorPlan, Requirement
from pdkv.connectors.registry import CONNECTORS, load_connector, plan_connector
from pdkv.errors import ConfigError

_WIDTH = 110
_INDENT = " " * 6


def add_show(subcommands: "argparse._SubParsersAction[Any]") -> None:
    """Add `show` to `pd connector`."""
    summary = "show what a connector is, what it needs, and its options"
    parser = new_command(subcommands, "show", run_show, summary)
    parser.add_argument("connector", metavar="NAME|module:Class", help="a name from `pd connector list`")
    parser.add_argument(
        "--connector-config", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="options of the connector, on which its kind and requirements may depend",
    )  # fmt: skip


def run_show(arguments: argparse.Namespace) -> int:
    """Run `pd connector show`."""
    name = arguments.connector
    print_connector(name, connector_options(arguments.connector_config), sys.stdout)
    return 0


def print_connector(name: str, options: Mapping[str, str], out: TextIO) -> None:
    """Print everything about a connector; without options, what it is and may need with any of them."""
    connector = load_connector(name)
    plan = plan_connector(name, options) if options else connector.declares
    module = sys.modules[connector.__module__]
    title = (module.__doc__ or "").strip().partition("\n")[0].removeprefix(f"The `{name}` connector: ")
    print(f"{name}: {title}\n" if title else f"{name}\n", file=out)
    rows = [("class", CONNECTORS.target(name))]
    variants = {"": plan} if options else _variants(name, connector)
    if "connectors" in connector.options_type.names() and not options:
        rows.append(("kind, orders", "those of its children; show them with --connector-config connectors=NAME,…"))
    else:
        rows.append(("kind", "; ".join(f"{variant.kind}{when}" for when, variant in variants.items())))
        orders = [f"{', '.join(variant.orders)}{when}" for when, variant in variants.items()]
        rows.append(("orders", "; ".join(dict.fromkeys(orders))))
        rows.append(("finds KV by content", "yes" if plan.content_addressed else "no"))
    if plan.one_process:
        rows.append(("between", "engines of one process only"))
    rows.append(("needs", "nothing more" if not plan.requirements else "; ".join(map(_describe, plan.requirements))))
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        print(f"{label:<{width}}  {text}", file=out)
    print("\noptions, each as --connector-config NAME=VALUE:", file=out)
    for item in sorted(options_of(connector.options_type).values(), key=lambda item: not item.required):
        _print_option(item, out)


def _variants(name: str, connector: type[KVConnector]) -> dict[str, ConnectorPlan]:
    """The plans that a single option chooses, by " with NAME=VALUE"; the default plan is under ""."""
    found = {"": connector.declares}
    for item in options_of(connector.options_type).values():
        for choice in item.choices:
            try:
                variant = plan_connector(name, {item.name: choice})
            except ConfigError:  # it requires other options, too
                continue
            if choice == item.default:
                found[""] = variant
            elif (variant.kind, variant.orders) != (found[""].kind, found[""].orders):
                found[f" with {item.name}={choice}"] = variant
    return found


def _describe(requirement: Requirement) -> str:
    packages = " or ".join(requirement.modules)
    when = f" for {requirement.when}" if requirement.when else ""
    return f"{packages}{when} ({'installed' if requirement.installed else f'not installed: {requirement.install}'})"


def _print_option(item: Option, out: TextIO) -> None:
    print(f"  {item.name}={item.metavar}", file=out)
    text = f"{item.help} (required)" if item.required else with_default(item)
    lines: Sequence[str] = textwrap.wrap(text, _WIDTH - len(_INDENT))
    for line in lines:
        print(_INDENT + line, file=out)
