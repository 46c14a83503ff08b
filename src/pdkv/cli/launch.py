"""`pd launch`: options of the topology, the hand-off, HTTP and the engines; engine options also exist per role."""

import argparse
import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdkv.base.secret_options import read_option
from pdkv.cli.options import (
    Flags,
    Noted,
    add_flags,
    add_vllm_flags,
    build,
    collect,
    flags_of,
    new_command,
    variables_of,
    warn_of_given_secrets,
)
from pdkv.config import MODEL_FILES, EngineConfig, HandoffConfig, RouterConfig, TiersConfig
from pdkv.connectors.registry import SHIPPED
from pdkv.errors import ConfigError
from pdkv.host.cuda_devices import count_cuda_devices
from pdkv.launch.config import Deployment, LaunchConfig
from pdkv.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from pdkv.router.routing.policies import POLICIES

ROLES = ("prefill", "decode")

_CONCERNS: dict[str, Any] = typing.get_type_hints(RouterConfig)
"""Configuration classes of the router."""

_GROUPS = {
    "engines": "Any of these options except those about the model's files can be set per role,\n"
    "as in --prefill-tp 2 or --decode-threads 4."
}
_EXAMPLES = """\
examples:
  pd launch                                             1 prefill and 1 decode engine, the embedded model
  pd launch DIR --prefill 2 --decode 4                  a Hugging Face model directory
  pd launch --prefill 0 --decode 2                      2 engines that do both
  pd launch --connector nixl --connector-config mode=push
  pd launch --connector nixl --kv-host-memory 8GiB --kv-store redis://127.0.0.1:6379/0
  pd launch --connector store --connector-config url=redis://127.0.0.1:6379/0
  pd launch DIR --backend vllm=http://10.0.0.2:8000,http://10.0.0.3:8000
  pd launch --cluster ray --prefill 2 --decode 2        engines on the nodes of a Ray cluster
  pd launch --config FILE                               options from a TOML, YAML or JSON file: prefill = 2

Every option is also an environment variable: PDKV_PREFILL=2, PDKV_DECODE_THREADS=4. `pd connector list` names the
connectors, `pd connector show NAME` the options of one.
"""


def flag_groups() -> dict[str, Flags]:
    """The flags of `pd launch`, grouped by heading."""
    groups = {"topology": flags_of(LaunchConfig), "engines": flags_of(EngineConfig)}
    groups |= {"hand-off": flags_of(HandoffConfig), "tiers of KV": flags_of(TiersConfig)}
    groups |= {f"router: {name}": flags_of(concern) for name, concern in _CONCERNS.items()}
    known = {
        "policy": POLICIES, "connector": SHIPPED,
        "tool_parser": TOOL_PARSERS.shipped, "reasoning_parser": REASONING_PARSERS.shipped,
    }  # fmt: skip
    for flags in groups.values():  # each role may have its own values, which are checked later
        for name in known.keys() & flags.keys():
            help = f"{flags[name].help}; one of {', '.join(known[name])}"
            flags[name] = dataclasses.replace(flags[name], details={**flags[name].details, "help": help})
    for role in ROLES:
        groups[f"{role} engines only"] = flags_of(EngineConfig, role=role, exclude=MODEL_FILES)
    return dict(groups)


def all_flags() -> Flags:
    """All flags of `pd launch`."""
    return {name: item for group in flag_groups().values() for name, item in group.items()}


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `launch` to the `pd` parser."""
    parser = new_command(
        commands, "launch", run, "start a router, prefill engines and decode engines",
        ". Ctrl-C stops them once their requests have finished; pressed again, it stops them at once.",
        aliases=["serve"], usage="pd launch [DIR] [--prefill N] [--decode M] [--connector NAME] [OPTION …]",
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("model_tag", nargs="?", action=Noted, metavar="DIR", help="the same as --model DIR")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML, YAML or JSON file of options by name")
    parser.add_argument(
        "--check", action="store_true", help="check the options, the model and the memory they need, but start nothing"
    )
    for title, flags in flag_groups().items():
        group = parser if title.endswith("only") else parser.add_argument_group(title, _GROUPS.get(title))
        add_flags(group, flags)
    add_vllm_flags(parser)


def read_deployment(arguments: argparse.Namespace, environment: Mapping[str, str] | None = None) -> Deployment:
    """The deployment from flags, environment and file. Raises ConfigError."""
    flags = all_flags()
    values = collect(flags, vars(arguments), environment=environment, file=arguments.config)
    router = RouterConfig(**{name: build(concern, values) for name, concern in _CONCERNS.items()})
    bounds = router.autoscaling.bounds
    if values.get("backend"):
        if bounds:
            raise ConfigError("--autoscale excludes --backend, whose servers this launch can neither start nor end")
        _check_no_engine_options(flags, values)
    counts = dict.fromkeys(ROLES, 0) if values.get("backend") else {}  # those run everything
    launch = build(LaunchConfig, counts | {role: least for role, (least, _) in bounds.items()} | values)
    router.autoscaling.check(launch.prefill, launch.decode)
    if bounds and (launch.remote_engines or launch.takes_others):
        raise ConfigError(
            "--autoscale excludes --remote-engines, --join-listen, --engines-file and --engines-dns, whose engines "
            "this launch can neither start nor end"
        )
    if launch.aggregated:
        _check_no_prefill_options(flags, values)
    prefill, decode = (build(EngineConfig, values, role=role) for role in ROLES)
    return Deployment(
        launch=launch,
        handoff=build_handoff({"connector": "p2p"} | values if launch.cluster == "ray" else values, [prefill, decode]),
        tiers=build_tiers(values),
        router=router,
        prefill=prefill,
        decode=decode,
    )


def build_handoff(values: Mapping[str, Any], engines: Sequence[EngineConfig]) -> HandoffConfig:
    """The hand-off between these engines. Raises ConfigError."""
    if "connector" not in values and not _share_memory(engines):
        values = {**values, "connector": "nixl"}
    return build(HandoffConfig, values)


def _share_memory(engines: Sequence[EngineConfig]) -> bool:
    """Whether all pools lie in host memory, or on one GPU, which processes map into one another."""
    on_gpus = [config for config in engines if not config.in_host_memory]
    if len(on_gpus) < len(engines):
        return not on_gpus
    devices = {number for config in on_gpus for number in config.device_numbers or range(count_cuda_devices())}
    return len(devices) == 1


def build_tiers(values: Mapping[str, Any]) -> TiersConfig:
    """The tiers of KV; a URL that is kept in a file is read from it. Raises ConfigError."""
    tiers = build(TiersConfig, values)
    return dataclasses.replace(tiers, kv_store=read_option(tiers.kv_store, "--kv-store"))


def _check_no_prefill_options(flags: Flags, values: Mapping[str, Any]) -> None:
    """Raise ConfigError if options of prefill engines are given although there are none to follow them."""
    for name, item in flags.items():
        if name in values and name == f"prefill_{item.name}":
            given, common = (flag.replace("_", "-") for flag in (name, item.name))
            raise ConfigError(
                f"--{given} is given, but prefill = 0 launches no prefill engines: aggregated ones follow --{common}"
            )


def _check_no_engine_options(flags: Flags, values: Mapping[str, Any]) -> None:
    """Raise ConfigError if options of engines are given beside --backend, whose servers have their own."""
    used = {*flags_of(LaunchConfig), *MODEL_FILES, "max_model_len", "max_num_seqs"}
    used |= {name for concern in _CONCERNS.values() for name in flags_of(concern)}
    used -= {"kv_shards", "start_method", "order", "pooling"}
    for name in values:
        if name in flags and name not in used:
            raise ConfigError(
                f"--{name.replace('_', '-')} is given, but --backend starts no engine that could follow it: set this "
                "where the servers are started"
            )


def launch_variables() -> set[str]:
    """The PDKV_* variables of `pd launch`, which other commands ignore rather than refuse."""
    return variables_of(all_flags())


def run(arguments: argparse.Namespace) -> int:
    """Run `pd launch`."""
    deployment = read_deployment(arguments)
    from pdkv.launch.check import check
    from pdkv.launch.launcher import launch
    from pdkv.launch.logs import configure_logging

    configure_logging("launcher", deployment.launch.log_level, deployment.router.observability.log_format)
    warn_of_given_secrets(arguments)
    return check(deployment) if arguments.check else launch(deployment)
