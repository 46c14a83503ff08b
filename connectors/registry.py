"""Names of KV connectors: the shipped ones in one table, third parties by entry point, or "module:Class" directly."""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import msgspec

from pdkv.base.options import OptionTexts
from pdkv.base.registry import Registry
from pdkv.connectors.plan import INTERFACE, ConnectorPlan
from pdkv.errors import ConfigError, UnknownConnector

if TYPE_CHECKING:
    from pdkv.connectors.base import Built, ConnectorConfig, KVConnector

ENTRY_POINT_GROUP = "pdkv.connectors"

SHIPPED: Mapping[str, str] = {
    "lmcache": "pdkv.connectors.store.lmcache:LMCacheConnector",
    "memory": "pdkv.connectors.memory.connector:MemoryConnector",
    "multi": "pdkv.connectors.multi.connector:MultiConnector",
    "nixl": "pdkv.connectors.nixl.connector:NixlConnector",
    "p2p": "pdkv.connectors.p2p.connector:P2PConnector",
    "shared_memory": "pdkv.connectors.shared_memory.connector:SharedMemoryConnector",
    "shared_storage": "pdkv.connectors.store.shared_storage:SharedStorageConnector",
    "store": "pdkv.connectors.store.url:StoreUrlConnector",
}
"""name -> "module:Class" of the shipped connectors; defined only here. Imported on first use."""


CONNECTORS: "Registry[KVConnector]" = Registry(
    "connector", ENTRY_POINT_GROUP, SHIPPED, "pdkv.connectors.base:KVConnector", unknown=UnknownConnector
)


def load_connector(name: str) -> "type[KVConnector]":
    """Import and return the connector class behind `name`.

    Raises:
        UnknownConnector: unknown name, or its module or class is missing.
        ConfigError: the class is not a KVConnector or is written for another interface, or its module lacks an import.
    """
    connector = CONNECTORS.load(name)
    number = connector.declares.interface if hasattr(connector, "declares") else 1
    if number != INTERFACE:
        raise ConfigError(
            f"connector {name!r} ({CONNECTORS.target(name)}) is written for interface {number} of connectors, and this "
            f"is interface {INTERFACE}: see docs/writing-a-transport.md"
        )
    return connector


def plan_connector(name: str, options: Mapping[str, str]) -> ConnectorPlan:
    """The plan of the connector behind `name` with these options, which may be OptionTexts. It need not be installed.

    Raises:
        ConfigError: an option is unknown or wrong; and the errors of `load_connector`.
    """
    texts = options if isinstance(options, OptionTexts) else OptionTexts(options, f"connector {name}")
    plan = load_connector(name).plan(texts)
    build = plan.build or f"{CONNECTORS.target(name)}.build"
    return msgspec.structs.replace(plan, name=name, options=dict(options), build=build)


def check_connector(name: str, options: Mapping[str, str]) -> ConnectorPlan:
    """As `plan_connector`, for a connector that must be installed. Raises ConfigError if it is not."""
    plan = plan_connector(name, options)
    check_installed(plan)
    return plan


def check_installed(plan: ConnectorPlan) -> None:
    """Raise ConfigError for a missing package."""
    for requirement in plan.requirements:
        if not requirement.installed:
            packages = " or ".join(requirement.modules)
            raise ConfigError(f"connector {plan.name} needs {packages}, which is not installed: {requirement.install}")


def probe_connector(plan: ConnectorPlan) -> str:
    """Why the connector's medium cannot be reached now; empty: no problem is known.

    May block up to the deadlines in the options. Raises ConfigError for errors that waiting would not cure.
    """
    problems = {part.name: probe_connector(part) for part in plan.parts}
    if plan.probe:
        return str(resolve_name(plan.probe)(plan))
    return "; ".join(f"{name}: {problem}" for name, problem in problems.items() if problem)


def build_connector(config: "ConnectorConfig", notify: Callable[[], None]) -> "Built":
    """One rank's connector, of the plan in its configuration.

    Raises:
        ConfigError: the plan does not support the engine's KV, or its ranks are not in one process. Also raises what
            its `build` raises.
    """
    plan, layout = config.plan, config.layout
    if plan.one_process and config.tp > 1:
        raise ConfigError(f"connector {plan.name} supports only tp=1, but engine {config.engine} has tp={config.tp}")
    for what, ours, theirs in (
        ("in layouts", layout.kinds, plan.layouts), ("with positions", (layout.positions,), plan.positions)
    ):  # fmt: skip
        if not {*ours} <= {*theirs}:
            raise ConfigError(
                f"connector {plan.name} carries KV {what} {', '.join(theirs)}, but the KV of engine {config.engine} "
                f"is {', '.join(ours)}"
            )
    built: Built = resolve_name(config.plan.build)(config, notify)
    return built
