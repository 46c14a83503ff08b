"""`pd launch`: options of the topology, the hand-off, HTTP and the engines, these also per role."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdkv.cli.options import Option, add_options, build, collect, options_of, warn_of_secrets
from pdkv.config import EngineConfig, HandoffConfig, HttpLimits
from pdkv.errors import ConfigError
from pdkv.launch.config import Deployment, LaunchConfig

ROLES = ("prefill", "decode")


def option_groups() -> dict[str, list[Option]]:
    """The options of `pd launch` by the heading that they stand under."""
    groups = {
        "topology": options_of(LaunchConfig),
        "engines": options_of(EngineConfig),
        "hand-off": options_of(HandoffConfig),
        "HTTP": options_of(HttpLimits),
    }
    for role in ROLES:
        groups[f"{role} engines only"] = options_of(EngineConfig, role=role, exclude=("model", "generation_config"))
    return groups


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `launch` to the `pd` parser."""
    summary = "start a router, prefill engines and decode engines"
    parser = commands.add_parser("launch", help=summary, description=f"{summary.capitalize()}.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML or JSON file of option names and values")
    for title, options in option_groups().items():
        add_options(parser.add_argument_group(title), options)
    parser.set_defaults(run=run)


def read_deployment(arguments: argparse.Namespace, environment: Mapping[str, str] | None = None) -> Deployment:
    """The deployment from flags, environment and file. Raises ConfigError."""
    options = [option for group in option_groups().values() for option in group]
    values = collect(
        options,
        vars(arguments),
        environment=environment,
        file=arguments.config,
    )
    launch = build(LaunchConfig, values)
    if launch.prefill == 0:
        _check_no_prefill_options(options, values)
    return Deployment(
        launch=launch,
        handoff=build(HandoffConfig, values),
        http=build(HttpLimits, values),
        prefill=build(EngineConfig, values, role="prefill"),
        decode=build(EngineConfig, values, role="decode"),
    )


def _check_no_prefill_options(options: Sequence[Option], values: Mapping[str, Any]) -> None:
    """Raise ConfigError where options of prefill engines are given that nobody would follow."""
    for option in options:
        if option.name in values and option.name == f"prefill_{option.field}":
            raise ConfigError(
                f"{option.flag} is given, but prefill = 0 launches no prefill engines: "
                f"aggregated ones follow --{option.field.replace('_', '-')}"
            )


def launch_variables() -> set[str]:
    """The PDKV_* variables of `pd launch`, which are no mistake for other commands either."""
    return {option.variable for group in option_groups().values() for option in group}


def run(arguments: argparse.Namespace) -> int:
    """Run `pd launch`."""
    deployment = read_deployment(arguments)
    from pdkv.launch.launcher import launch
    from pdkv.launch.logs import configure_logging

    configure_logging("launcher", deployment.launch.log_level)
    warn_of_secrets(arguments.connector_config or ())
    return launch(deployment)
