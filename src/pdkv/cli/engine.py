"""`pd engine`: one engine on this host, for a launch that runs on another."""

import argparse
from pathlib import Path
from typing import Any

from pdkv.cli.launch import build_handoff, build_tiers, launch_variables
from pdkv.cli.options import (
    Flags,
    add_flags,
    add_vllm_flags,
    build,
    collect,
    flags_of,
    new_command,
    warn_of_given_secrets,
)
from pdkv.config import EngineConfig, HandoffConfig, TiersConfig
from pdkv.launch.config import HostedEngine

_EXAMPLES = """\
on the engine's host:
  pd engine --name decode-b --role decode --listen tcp://10.0.0.2:7000 --cluster-key-file FILE \\
      --model DIR --connector p2p --connector-config host=10.0.0.2
on the router's host:
  pd launch --prefill 1 --decode 0 --remote-engines decode-b=tcp://10.0.0.2:7000 --cluster-key-file FILE \\
      --model DIR --connector p2p --connector-config host=10.0.0.1
"""


def flag_groups() -> dict[str, Flags]:
    """The flags of `pd engine`, grouped by heading."""
    return {
        "place": flags_of(HostedEngine),
        "engine": flags_of(EngineConfig),
        "hand-off": flags_of(HandoffConfig),
        "tiers of KV": flags_of(TiersConfig),
    }


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `engine` to the `pd` parser."""
    parser = new_command(
        commands, "engine", run, "run one engine on this host, for a launch that runs on another",
        ". It is restarted if it dies. Drain it before stopping it with Ctrl-C.",
        usage="pd engine --name NAME --role ROLE --listen tcp://ADDRESS:PORT --cluster-key-file FILE [OPTION …]",
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML, YAML or JSON file of options by name")
    for title, flags in flag_groups().items():
        add_flags(parser.add_argument_group(title), flags)
    add_vllm_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run `pd engine`."""
    flags = {name: item for group in flag_groups().values() for name, item in group.items()}
    values = collect(flags, vars(arguments), known_variables=launch_variables(), file=arguments.config)
    hosted = build(HostedEngine, values)
    config = build(EngineConfig, values)
    handoff, tiers = build_handoff(values, [config]), build_tiers(values)
    from pdkv.launch.engine_host import host_engine
    from pdkv.launch.logs import configure_logging

    configure_logging("launcher", hosted.log_level, hosted.log_format)
    warn_of_given_secrets(arguments)
    return host_engine(hosted, config, handoff, tiers)
