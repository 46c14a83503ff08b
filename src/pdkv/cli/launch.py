"""`pd launch`: options of the topology, the hand-off, HTTP and the engines, these also per role."""

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdkv.base.secret_options import read_option
from pdkv.cli.options import CONNECTOR_CONFIG, Flag, add_flags, build, capitalized, collect, flags_of, warn_of_secrets
from pdkv.config import (
    AccessConfig,
    AdmissionConfig,
    EngineConfig,
    HandoffConfig,
    HealthConfig,
    HttpApi,
    HttpLimits,
    ObservabilityConfig,
    RecoveryConfig,
    ReuseConfig,
    RouterConfig,
    TiersConfig,
    TlsConfig,
)
from pdkv.connectors.registry import SHIPPED
from pdkv.errors import ConfigError
from pdkv.host.cuda_devices import count_cuda_devices
from pdkv.launch.config import Deployment, LaunchConfig
from pdkv.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from pdkv.router.routing.policies import POLICIES

ROLES = ("prefill", "decode")

_GROUPS = {
    "engines": "All but --model and --generation-config can be set for one role: --prefill-tp 2, --decode-threads 4."
}
_EXAMPLES = """\
examples:
  pd launch                                             1 prefill and 1 decode engine, the embedded model
  pd launch --model DIR --prefill 2 --decode 4          a Hugging Face model directory
  pd launch --prefill 0 --decode 2                      2 engines that do both
  pd launch --connector nixl --connector-config mode=push
  pd launch --connector nixl --kv-host-memory 8GiB --kv-store redis://127.0.0.1:6379/0
  pd launch --connector store --connector-config url=redis://127.0.0.1:6379/0
  pd launch --config FILE                               options from a TOML or JSON file: prefill = 2

Every option is also an environment variable: PDKV_PREFILL=2, PDKV_DECODE_THREADS=4. `pd connector list` names the
connectors, `pd connector show NAME` the options of one.
"""


def flag_groups() -> dict[str, list[Flag]]:
    """The flags of `pd launch` by the heading that they stand under."""
    groups = {
        "topology": [_with_choices(flag, "policy", POLICIES) for flag in flags_of(LaunchConfig)],
        "engines": flags_of(EngineConfig),
        "hand-off": [_with_choices(flag, "connector", SHIPPED) for flag in flags_of(HandoffConfig)],
        "tiers of KV": flags_of(TiersConfig),
        "failures": flags_of(RecoveryConfig),
        "reuse": flags_of(ReuseConfig),
        "HTTP": [*flags_of(HttpLimits), *map(_with_parsers, flags_of(HttpApi))],
        "admission": flags_of(AdmissionConfig),
        "access": flags_of(AccessConfig),
        "TLS": flags_of(TlsConfig),
        "health": flags_of(HealthConfig),
        "observability": flags_of(ObservabilityConfig),
    }
    for role in ROLES:
        groups[f"{role} engines only"] = flags_of(EngineConfig, role=role, exclude=("model", "generation_config"))
    return groups


def _with_choices(flag: Flag, name: str, choices: Iterable[str]) -> Flag:
    """The flag called `name` with its known values in the help; it may take others, and is checked later."""
    if flag.name != name:
        return flag
    return dataclasses.replace(flag, help=f"{flag.help}; one of {', '.join(choices)}")


def _with_parsers(flag: Flag) -> Flag:
    tools = _with_choices(flag, "tool_parser", TOOL_PARSERS.shipped)
    return _with_choices(tools, "reasoning_parser", REASONING_PARSERS.shipped)


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `launch` to the `pd` parser."""
    summary = "start a router, prefill engines and decode engines"
    parser = commands.add_parser(
        "launch",
        help=summary,
        usage="pd launch [--model DIR] [--prefill N] [--decode M] [--connector NAME] [OPTION …]",
        description=f"{capitalized(summary)}. Ctrl-C stops them once their requests have finished; twice: at once.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML or JSON file of option names and values")
    parser.add_argument(
        "--check", action="store_true", help="only check the options, the model and the memory they need; start nothing"
    )
    for title, flags in flag_groups().items():
        shown = any(flag.help is not None for flag in flags)
        group = parser.add_argument_group(title, _GROUPS.get(title)) if shown else parser
        add_flags(group, flags)
    parser.set_defaults(run=run)


def read_deployment(arguments: argparse.Namespace, environment: Mapping[str, str] | None = None) -> Deployment:
    """The deployment from flags, environment and file. Raises ConfigError."""
    flags = [flag for group in flag_groups().values() for flag in group]
    values = collect(flags, vars(arguments), environment=environment, file=arguments.config)
    launch = build(LaunchConfig, values)
    if launch.aggregated:
        _check_no_prefill_options(flags, values)
    prefill, decode = (build(EngineConfig, values, role=role) for role in ROLES)
    return Deployment(
        launch=launch,
        handoff=build_handoff(values, [prefill, decode]),
        tiers=build_tiers(values),
        router=RouterConfig(
            http=build(HttpLimits, values),
            api=build(HttpApi, values),
            admission=build(AdmissionConfig, values),
            access=build(AccessConfig, values),
            tls=build(TlsConfig, values),
            health=build(HealthConfig, values),
            recovery=build(RecoveryConfig, values),
            reuse=build(ReuseConfig, values),
            observability=build(ObservabilityConfig, values),
        ),
        prefill=prefill,
        decode=decode,
    )


def build_handoff(values: Mapping[str, Any], engines: Sequence[EngineConfig]) -> HandoffConfig:
    """The hand-off between these engines. Raises ConfigError."""
    if "connector" not in values and not _share_memory(engines):
        values = {**values, "connector": "nixl"}
    return build(HandoffConfig, values)


def _share_memory(engines: Sequence[EngineConfig]) -> bool:
    """Whether all pools lie in host memory, or on one GPU, which processes map into each other."""
    on_gpus = [config for config in engines if not config.in_host_memory]
    if len(on_gpus) < len(engines):
        return not on_gpus
    devices = {number for config in on_gpus for number in config.device_numbers or range(count_cuda_devices())}
    return len(devices) == 1


def build_tiers(values: Mapping[str, Any]) -> TiersConfig:
    """The tiers of KV; a URL that is kept in a file is read. Raises ConfigError."""
    tiers = build(TiersConfig, values)
    return dataclasses.replace(tiers, kv_store=read_option(tiers.kv_store, "--kv-store"))


def _check_no_prefill_options(flags: Sequence[Flag], values: Mapping[str, Any]) -> None:
    """Raise ConfigError where options of prefill engines are given that nobody would follow."""
    for flag in flags:
        if flag.name in values and flag.name == f"prefill_{flag.option.name}":
            raise ConfigError(
                f"{flag.flag} is given, but prefill = 0 launches no prefill engines: "
                f"aggregated ones follow --{flag.option.name.replace('_', '-')}"
            )


def launch_variables() -> set[str]:
    """The PDKV_* variables of `pd launch`, which are no mistake for other commands either."""
    return {flag.variable for group in flag_groups().values() for flag in group}


def run(arguments: argparse.Namespace) -> int:
    """Run `pd launch`."""
    deployment = read_deployment(arguments)
    from pdkv.launch.launcher import check, launch
    from pdkv.launch.logs import configure_logging

    configure_logging("launcher", deployment.launch.log_level, deployment.router.observability.log_format)
    warn_of_secrets(CONNECTOR_CONFIG, arguments.connector_config or ())
    warn_of_secrets("--kv-store", [arguments.kv_store or ""])
    return check(deployment) if arguments.check else launch(deployment)
